"""Backends that call a flash-attention library: what they refuse, and how they call it. On a CPU, the library is
replaced by exact attention over the strided views; tests marked gpu use the real ones."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.engine.backends import flash_attn_backend, varlen_backend
from alignedserve.engine.backends.base import AttentionBackend, AttentionNeeds, AttentionOptions
from alignedserve.engine.backends.flash_attn_backend import FlashAttnBackend
from alignedserve.engine.backends.flash_rows import key_value_views
from alignedserve.engine.backends.varlen_backend import VarlenBackend
from alignedserve.engine.batch import DecodeTable
from alignedserve.errors import UnsupportedModelError
from alignedserve.testing.attention import TOLERANCE, PagedCase, attend_exactly, paged_case

NEEDS = AttentionNeeds("cuda", "bfloat16", heads=8, kv_heads=2, head_dim=128, block_size=256)
SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16, "dtype": torch.float32}
MIXED = [(1, 20), (6, 0), (1, 0), (9, 30), (1, 35)]
BACKENDS: list[type[AttentionBackend]] = [FlashAttnBackend, VarlenBackend]


class Library:
    """Exact attention with the signatures of both libraries. It records the memory of its keys."""

    def __init__(self) -> None:
        self.pointers: set[int] = set()

    def paged(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: list[int],
        lengths: list[int],
        table: torch.Tensor,
        scale: float,
        window: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor:
        assert keys.stride(-1) == values.stride(-1) == 1
        assert table.dtype == torch.int32
        self.pointers.add(keys.untyped_storage().data_ptr())
        window_size = None if window[0] == -1 else window[0] + 1
        options = AttentionOptions(scale, window_size, softcap or None)
        parts = []
        for index, length in enumerate(lengths):
            rows = query[starts[index] : starts[index + 1]]
            used = table[index, : -(-length // keys.shape[1])].long()
            key, value = (side[used].flatten(0, 1)[:length] for side in (keys, values))
            parts.append(attend_exactly(rows, key, value, length - len(rows), options)[0])
        return torch.cat(parts).to(query.dtype)

    def flash_attn_with_kvcache(self, q: Any, k_cache: Any, v_cache: Any, **given: Any) -> torch.Tensor:
        assert given["causal"]
        starts = list(range(len(q) + 1))
        lengths = given["cache_seqlens"].tolist()
        options = (given["block_table"], given["softmax_scale"], given["window_size"], given["softcap"])
        return self.paged(q[:, 0], k_cache, v_cache, starts, lengths, *options)[:, None]

    def flash_attn_varlen_func(
        self, q: Any, k: Any, v: Any, starts: Any, kv_starts: Any, most_q: int, most_k: int, **given: Any
    ) -> torch.Tensor:
        assert given["causal"]
        assert (most_q, most_k) == (int(starts.diff().max()), int(kv_starts.diff().max()))
        options = (given["block_table"], given["softmax_scale"], given["window_size"], given["softcap"])
        return self.paged(q, k, v, starts.tolist(), kv_starts.diff().tolist(), *options)

    def varlen_attn(
        self, q: Any, k: Any, v: Any, starts: Any, kv_starts: None, most_q: int, most_k: int, **given: Any
    ) -> torch.Tensor:
        lengths = given["seqused_k"].tolist()
        assert most_q == int(starts.diff().max())
        assert most_k >= max(lengths)
        assert given["enable_gqa"] == (q.shape[1] != k.shape[2])
        assert given["window_size"][1] == 0  # causal
        return self.paged(
            q, k, v, starts.tolist(), lengths, given["block_table"], given["scale"], given["window_size"], 0.0
        )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    module = types.ModuleType("flash_attn")
    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
        setattr(module, name, getattr(library, name))
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(varlen_backend, "varlen_function", lambda: library.varlen_attn)
    return library


def attend(backend: type[AttentionBackend], case: PagedCase, options: AttentionOptions) -> torch.Tensor:
    made = backend(case.cache)
    made.begin(case.batch)
    return made.attend(1, case.query, case.key, case.value, options)


@pytest.mark.parametrize("spans", [MIXED, MIXED[1::2], MIXED[::2]], ids=["mixed", "chunks", "decode"])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_equals_fp64_over_views_of_the_store(
    backend: type[AttentionBackend], window: int | None, spans: list[tuple[int, int]], library: Library
) -> None:
    case = paged_case(spans, **SHAPE)
    options = AttentionOptions(0.3, window)
    found = attend(backend, case, options)
    torch.testing.assert_close(found.double(), case.expected(options)[0], rtol=0.0, atol=TOLERANCE[torch.float32])
    assert library.pointers == {case.cache.untyped_storage().data_ptr()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_that_stays_equals_fp64(backend: type[AttentionBackend], library: Library) -> None:
    case = paged_case([(1, 20), (1, 0), (1, 35)], **SHAPE)
    assert case.batch.decode is not None
    made = backend(case.cache)
    made.begin_table(DecodeTable(case.batch.decode.table.lengths, case.batch.decode.table.block_table))
    options = AttentionOptions(0.3)
    found = made.attend(1, case.query, case.key, case.value, options)
    torch.testing.assert_close(found.double(), case.expected(options)[0], rtol=0.0, atol=TOLERANCE[torch.float32])


def test_a_soft_cap_is_passed_on_where_the_library_has_it(library: Library) -> None:
    case = paged_case(MIXED, **SHAPE)
    options = AttentionOptions(0.3, softcap=2.0)
    found = attend(FlashAttnBackend, case, options)
    torch.testing.assert_close(found.double(), case.expected(options)[0], rtol=0.0, atol=TOLERANCE[torch.float32])
    with pytest.raises(UnsupportedModelError, match="soft-cap"):
        attend(VarlenBackend, case, options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_are_never_ignored(backend: type[AttentionBackend], library: Library) -> None:
    with pytest.raises(UnsupportedModelError, match="sinks"):
        attend(backend, paged_case(MIXED, **SHAPE), AttentionOptions(0.3, sinks=torch.ones(4)))


def test_the_views_are_the_stores_own_memory() -> None:
    cache = torch.arange(3 * 2 * 2 * 2 * 4 * 8).view(3, 2, 2, 2, 4, 8)
    keys, values = key_value_views(cache, 1)
    assert keys.shape == values.shape == (3, 4, 2, 8)
    for view, kind in ((keys, 0), (values, 1)):
        assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert view[2, 3, 1].data_ptr() == cache[2, 1, 1, kind, 3].data_ptr()


def able(monkeypatch: pytest.MonkeyPatch, version: str = "2.8.3.post1") -> None:
    """Pretend that the backends' requirements are installed."""
    found, told = importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn" or found(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "flash-attn" else told(name))
    monkeypatch.setattr(varlen_backend, "active_implementation", lambda: "FA3")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device": "cpu"}, "run on a GPU"),
        ({"dtype": "float32"}, "float32"),
        ({"head_dim": 264}, "264 elements"),
        ({"head_dim": 100}, "100 elements"),
        ({"block_size": 24}, "kv_pool.block_size"),
        ({"sinks": True}, "sinks"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_library_lacks_is_refused_by_name(
    backend: type[AttentionBackend], change: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    able(monkeypatch)
    assert backend.refusal(replace(NEEDS, sliding_window=True)) is None
    assert word in str(backend.refusal(replace(NEEDS, **change)))


def test_flash_attn_takes_blocks_of_256_and_a_soft_cap_and_varlen_does_not_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    able(monkeypatch)
    assert "multiples of 256" in str(FlashAttnBackend.refusal(replace(NEEDS, block_size=16)))
    assert FlashAttnBackend.refusal(replace(NEEDS, softcap=True)) is None
    assert VarlenBackend.refusal(replace(NEEDS, block_size=16)) is None
    assert "softcap" in str(VarlenBackend.refusal(replace(NEEDS, softcap=True)))


def test_an_old_or_absent_flash_attn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(FlashAttnBackend.refusal(NEEDS))
    able(monkeypatch, version="2.7.4")
    assert "2.7.4" in str(FlashAttnBackend.refusal(NEEDS))


def without(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """`function` with these parameters removed from its signature."""

    def older(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    signature = inspect.signature(function)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in names]
    older.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return older


def test_a_torch_whose_function_takes_no_block_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    able(monkeypatch)
    current = varlen_backend.varlen_function()
    monkeypatch.setattr(varlen_backend, "varlen_function", lambda: without(current, "block_table", "enable_gqa"))
    assert "does not take enable_gqa, block_table" in str(VarlenBackend.refusal(NEEDS))


def test_torchs_own_flash_attention_2_is_refused_for_blocks() -> None:
    assert varlen_backend.active_implementation() is None
    assert "flash-attention 3 or 4" in str(VarlenBackend.refusal(NEEDS))


def test_the_installed_torch_takes_the_arguments_that_are_given() -> None:
    given = [inspect.Parameter.empty] * 7, dict.fromkeys(varlen_backend.WANTED)
    bound = inspect.signature(varlen_backend.varlen_function()).bind(*given[0], **given[1])
    assert set(varlen_backend.WANTED) <= set(bound.arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu_it_equals_fp64(backend: type[AttentionBackend], options: dict[str, Any]) -> None:
    reason = backend.refusal(replace(NEEDS, softcap="softcap" in options))
    if reason:
        pytest.skip(reason)
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 256, "dtype": torch.bfloat16, "device": "cuda"}
    case = paged_case([(1, 700), (300, 0), (1, 3), (40, 1000)], **shape)
    given = AttentionOptions(128**-0.5, **options)
    found = attend(backend, case, given)
    torch.testing.assert_close(found.double(), case.expected(given)[0], rtol=0.0, atol=TOLERANCE[torch.bfloat16])


def test_flash_attn_is_looked_for_under_the_names_that_it_installs_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distribution is flash-attn (its metadata's folder flash_attn-VERSION.dist-info), the module flash_attn."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").touch()
    metadata = tmp_path / "flash_attn-2.7.4.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.7.4\n")
    assert "flash-attn is 2.7.4" in str(flash_attn_backend.missing_package())
    metadata.write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    assert flash_attn_backend.missing_package() is None
