"""The Triton backends as the engine uses them: mixed batches, persistent tables, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.engine.backends import choice
from alignedserve.engine.backends.base import AttentionNeeds, AttentionOptions
from alignedserve.engine.backends.registry import BACKENDS
from alignedserve.engine.batch import DecodeTable, ForwardItem
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.runner import ModelRunner, allocate_cache
from alignedserve.errors import AlignedServeError
from alignedserve.testing.attention import TOLERANCE, attend_exactly, paged_case
from alignedserve.testing.models import make_model

NAMES = ["triton", "triton_no_split"]
MIXED = [(1, 30), (20, 17), (1, 99), (5, 0), (1, 0)]
DECODES = [(1, 15), (1, 60), (1, 16)]


@pytest.mark.parametrize("spans", [MIXED, DECODES, [(9, 8)]], ids=["mixed", "decodes", "chunk"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("triton", torch.bfloat16), ("triton", torch.float32), ("triton_no_split", torch.float32)],
    ids=str,
)
def test_a_packed_batch_equals_fp64(name: str, spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case = paged_case(spans, heads=6, kv_heads=2, head_dim=40, block_size=16, dtype=dtype)
    options = AttentionOptions(0.2, sliding_window=50, softcap=9.0, sinks=torch.linspace(-1, 1, 6))
    backend = BACKENDS.get(name)(case.cache)
    backend.begin(case.batch)
    query, key = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in (case.query, case.key))
    value = case.value.transpose(1, 2).contiguous().transpose(1, 2)  # elements of a head apart
    output = backend.attend(1, query, key, value, options)
    torch.testing.assert_close(output.double(), case.expected(options)[0], rtol=0.0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", NAMES)
def test_a_table_that_stays_serves_what_it_holds_at_each_pass(name: str) -> None:
    """Rows grow past a block's end, one row leaves, and another joins in its block."""
    torch.manual_seed(0)
    cache = torch.full((6, 2, 1, 2, 16, 16), float("nan"))
    backend = BACKENDS.get(name)(cache)
    table = DecodeTable(torch.zeros(3, dtype=torch.int32), torch.full((3, 2), 2**31 - 1, dtype=torch.int32))
    options = AttentionOptions(0.3, sliding_window=20)
    blocks = [[4, 2], [3], [3, 5]]
    past: list[list[Any]] = [[], [], []]
    for step in range(20):
        live = [True, step < 4, step >= 6]
        table.block_table[:] = 2**31 - 1
        for row, here in enumerate(live):
            if here:
                used = blocks[row][: len(past[row]) // 16 + 1]
                table.block_table[row, : len(used)] = torch.tensor(used, dtype=torch.int32)
            table.lengths[row] = len(past[row]) + 1 if here else 0
        query, key, value = torch.randn(3, 2, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16)
        backend.begin_table(table)
        output = backend.attend(1, query, key, value, options)
        assert bool(output.isfinite().all())
        for row in (row for row in range(3) if live[row]):
            past[row].append((key[row], value[row]))
            keys, values = (torch.stack(part) for part in zip(*past[row], strict=True))
            expected, _ = attend_exactly(query[row : row + 1], keys, values, len(keys) - 1, options)
            torch.testing.assert_close(output[row : row + 1].double(), expected, rtol=0.0, atol=1e-5)
    assert bool(cache[:, 0].isnan().all())  # the other layer


@pytest.mark.parametrize(("name", "kind"), [("triton", "gemma2"), ("triton_no_split", "gpt_oss")])
def test_a_model_is_served_with_the_torch_backends_logits(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKENDS.get(name), "refusal", lambda needs: None)  # otherwise refused on a CPU
    monkeypatch.setattr(choice, "_chosen", {})
    folder = make_model(kind, tmp_path, seed=1, num_hidden_layers=2)
    loaded = load_model(inspect_model("test", folder, "float32", "cpu"), "cpu")
    logits = []
    for backend in ("torch", name):
        runner = ModelRunner(loaded, allocate_cache(loaded.info.geometry(16), 6, "cpu"), backend)
        runner.forward([ForwardItem(list(range(3, 23)), 0, [5, 2])])
        logits.append(runner.forward([ForwardItem([7], 20, [5, 2]), ForwardItem([9, 8, 7], 0, [1])]))
        logits.append(runner.forward([ForwardItem([4], 21, [5, 2]), ForwardItem([6], 3, [1])]))
    torch.testing.assert_close(logits[2], logits[0], rtol=0.0, atol=1e-4)
    torch.testing.assert_close(logits[3], logits[1], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_cannot_serve_is_refused_by_name(name: str) -> None:
    needs = {"device": "cuda", "dtype": "bfloat16", "heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 16}
    backend = BACKENDS.get(name)
    assert backend.captures
    assert backend.refusal(AttentionNeeds(**needs, sliding_window=True, softcap=True, sinks=True)) is None
    for change, word in (({"block_size": 24}, "24"), ({"head_dim": 300}, "300"), ({"device": "cpu"}, "cpu")):
        assert word in str(backend.refusal(AttentionNeeds(**{**needs, **change})))


def test_tokens_other_than_those_of_begin_are_an_error() -> None:
    case = paged_case(DECODES, heads=2, kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32)
    backend = BACKENDS.get("triton")(case.cache)
    backend.begin(case.batch)
    with pytest.raises(AlignedServeError, match="2 tokens"):
        backend.attend(1, case.query[:2], case.key[:2], case.value[:2], AttentionOptions(1.0))
