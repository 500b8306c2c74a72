"""The graph's sampling kernel against the Sampler, batch sizes, and what a batch sends to the device."""

from __future__ import annotations

import io
import math
import os
import random
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from alignedserve.cluster.cli.console import Console
from alignedserve.config import Config, DecodeConfig
from alignedserve.engine.decoding import DecodeItem
from alignedserve.engine.graphs.buffers import Column, StepBuffers
from alignedserve.engine.graphs.drawing import DrawColumns, draw
from alignedserve.engine.sampling.noise import row_keys
from alignedserve.engine.sampling.sampler import Sampler, SampleRow
from alignedserve.engine.step_progress import StepProgress
from alignedserve.errors import ConfigError
from alignedserve.graph_sizes import graph_sizes, size_for
from alignedserve.request import SamplingParams
from support.graph_twins import TwinDevice

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def columns(samplings: list[SamplingParams], positions: list[int], device: str) -> DrawColumns:
    keys = [row_keys(sampling.seed, position) for sampling, position in zip(samplings, positions, strict=True)]

    def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return DrawColumns(
        temperature=column([0.0 if s.greedy else s.temperature for s in samplings], torch.float32),
        min_p=column([math.log(s.min_p) if s.min_p else -math.inf for s in samplings], torch.float32),
        top_p=column([s.top_p for s in samplings], torch.float64),
        top_k=column([s.top_k for s in samplings], torch.int32),
        first_key=column([first for first, _ in keys], torch.int32),
        second_key=column([second for _, second in keys], torch.int32),
    )


def logits_of(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    random_ones = 3.0 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    if kind == "bfloat16":  # many ties
        return random_ones.to(torch.bfloat16).float()
    if kind == "few":
        return random_ones.round().clamp(-1.0, 1.0)
    random_ones[:, ::3] = -math.inf
    return random_ones


def check_draws(kind: str, rows: int, vocab_size: int, device: str = "cpu") -> None:
    choose = random.Random(vocab_size)
    samplings = [
        SamplingParams(
            temperature=choose.choice([0.0, 0.3, 1.0, 1.7]),
            top_k=choose.choice([0, 0, 2, 5, 50, 5 * vocab_size]),
            top_p=choose.choice([1.0, 0.3, 0.9, 0.999]),
            min_p=choose.choice([0.0, 0.0, 0.05]),
            seed=choose.randrange(1 << 63),
        )
        for _ in range(rows)
    ]
    positions = [choose.randrange(1000) for _ in samplings]
    logits = logits_of(kind, rows, vocab_size).to(device)
    rows_of = [SampleRow(sampling, [], []) for sampling in samplings]
    expected = [token.token_id for token in Sampler().sample(logits, rows_of, positions)]
    top, chosen = logits.max(dim=-1)
    draw(logits, top, columns(samplings, positions, device), chosen)
    assert chosen.tolist() == expected


@pytest.mark.parametrize(("kind", "vocab_size"), [("holes", 13), ("bfloat16", 300), ("few", 300), ("holes", 5000)])
def test_the_kernel_draws_the_samplers_tokens(kind: str, vocab_size: int) -> None:
    check_draws(kind, 16 if vocab_size < 1000 else 8, vocab_size)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("vocab_size", [300, 32000, 151936])
@pytest.mark.parametrize("kind", ["holes", "bfloat16", "few"])
def test_the_kernel_draws_the_samplers_tokens_on_a_gpu(kind: str, vocab_size: int) -> None:
    check_draws(kind, 128, vocab_size, "cuda")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from alignedserve.engine.graphs.drawing_kernel import draw_kernel
types = dict(logits="*fp32", row_stride="i32", vocab_size="i32", tops="*fp32", temperatures="*fp32", min_ps="*fp32",
             top_ps="*fp64", top_ks="*i32", first_keys="*i32", second_keys="*i32", chosen="*i64", block="constexpr")
source = triton.compiler.ASTSource(draw_kernel, types, constexprs={"block": 4096})
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
assert "lg2.approx.ftz.f64" not in ptx and ".f64" in ptx and "div.rn.f32" in ptx
"""


def test_the_kernel_compiles_for_a_gpu() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    compiled = subprocess.run([sys.executable, "-c", COMPILE], env=environ, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr


def test_sizes_cover_every_batch_and_pad_it_little() -> None:
    assert graph_sizes("", 20) == (1, 2, 4, 8, 16, 20)
    sizes = graph_sizes("", 256)
    assert sizes[-1] == 256
    for rows in range(9, 257):
        size = size_for(sizes, rows)
        assert size is not None
        assert rows <= size < rows + max(8, size // 4 if rows > 256 else 16)
    assert graph_sizes("", 60000)[-1] == 1024
    assert size_for(sizes, 257) is None
    assert graph_sizes("8, 1,8", 4) == (1, 8)


@pytest.mark.parametrize("configured", ["0,1", "one", ",", "1;2", "70000"])
def test_what_are_no_sizes_is_refused(configured: str) -> None:
    with pytest.raises(ConfigError, match=r"decode\.graph_sizes"):
        graph_sizes(configured, 4)


class Batches:
    """Buffers with a growing batch, and the number of block ids sent in each iteration."""

    def __init__(self, capacity: int) -> None:
        self.buffers = StepBuffers(TwinDevice(), torch.device("cpu"), capacity, width=40, row_width=8, blocks=5000)
        self.sent: list[int] = []

    def send(self, items: list[DecodeItem]) -> None:
        table = self.buffers.table(self.buffers.capacity).block_table
        table_before = table.clone()
        with torch.inference_mode():
            self.buffers.send(items, 4, self.buffers.staging[len(self.sent) % 2])
        self.sent.append(int((table != table_before).sum()))
        for row, item in enumerate(items):
            needed = item.kv_tokens // 4 + 1
            assert table[row, :needed].tolist() == list(item.block_ids[:needed])


def item(row: SampleRow, kv_tokens: int, blocks: list[int], **chained: Any) -> DecodeItem:
    given: dict[str, Any] = {"token_id": 7, "previous": 0, "position": 3, **chained}
    return DecodeItem(row, given["token_id"], given["previous"], kv_tokens, blocks, given["position"])


def test_a_row_that_stays_sends_its_new_blocks_only() -> None:
    batches = Batches(5)
    rows = [SampleRow(SamplingParams(temperature=0.0), [], []) for _ in range(5)]
    blocks = [list(range(100 + 1000 * row, 140 + 1000 * row)) for row in range(5)]
    for step in range(12):
        batches.send([item(row, 10 * index + step, blocks[index]) for index, row in enumerate(rows)])
    assert batches.sent[0] == sum(10 * index // 4 + 1 for index in range(5))
    assert sum(batches.sent[1:]) == sum((10 * index + 11) // 4 - 10 * index // 4 for index in range(5))
    batches.send([item(rows[4], 60, blocks[4]), item(rows[1], 30, blocks[1])])  # a row moves, the others are padding
    lengths = batches.buffers.column(Column.LENGTH, 6)
    assert lengths.tolist() == [61, 31, 0, 0, 0, 0]


def test_a_row_that_comes_back_is_sent_whole_though_its_ends_are_where_they_were() -> None:
    batches = Batches(2)
    row = SampleRow(SamplingParams(temperature=0.0), [], [])
    batches.send([item(row, 10, [1, 2, 3])])
    batches.send([item(row, 11, [1, 7, 3])])  # it was evicted meanwhile, and no other request used its row
    assert batches.sent == [3, 1]


def test_every_way_to_draw_reaches_its_row_and_padding_draws_nothing() -> None:
    batches = Batches(4)
    hot = SampleRow(SamplingParams(temperature=1.5, top_p=0.7, top_k=3, min_p=0.25, seed=9), [], [])
    cold = SampleRow(SamplingParams(temperature=0.0), [], [])
    for order in ([cold, cold, cold, hot], [cold, hot]):
        batches.send([item(row, 5, [1, 2], token_id=None, previous=2, position=6) for row in order])
        drawn = batches.buffers.draw_columns(4)
        where = order.index(hot)
        assert drawn.temperature.tolist() == [1.5 if row == where else 0.0 for row in range(4)]
        assert (drawn.top_p[where], drawn.top_k[where]) == (0.7, 3)
        assert drawn.min_p[where] == pytest.approx(math.log(0.25))
        assert (int(drawn.first_key[where]), int(drawn.second_key[where])) == row_keys(9, 6)
    assert batches.buffers.column(Column.PREVIOUS, 4).tolist() == [2, 2, -1, -1]


def test_progress_is_a_bar_until_all_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    starting = StepProgress("decode-0", lambda: now_s)
    progress = starting.of("CUDA graphs", "batch sizes")
    texts = []
    with caplog.at_level("INFO"):
        for done in range(1, 9):
            now_s += 0.5
            progress(done, 8)
            texts.append(starting.text)
    assert texts[1] == "CUDA graphs [######------------------] 2 of 8 batch sizes"
    assert texts[-1] == ""
    assert [record.getMessage().split()[-5] for record in caplog.records] == ["4", "8"]


def test_states_on_their_way_share_a_line_on_a_terminal_and_are_rare_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replaced = "\r\x1b[2K"
    for terminal, expected in (
        (True, f"[time] one{replaced}[time] two{replaced}end\n"),
        (False, "[time] one\nend\n"),
    ):
        written = io.StringIO()
        monkeypatch.setattr(written, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stdout", written)
        console = Console()
        console.passing("one")
        console.passing("two")
        console.line("end")
        assert re.sub(r"\[ *[0-9.]+ s\]", "[time]", written.getvalue()) == expected


def test_sizes_that_are_none_are_found_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"decode\.graph_sizes"):
        Config(decode=DecodeConfig(graph_sizes="many"))
