"""Triton's prefill kernel: in the interpreter against fp64, compiled for sm_90, and (marked gpu) on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from alignedserve.engine.backends.base import AttentionNeeds, AttentionOptions
from alignedserve.engine.backends.triton_prefill import PrefillAttention, Tile, choose_tile, plan_work
from alignedserve.engine.batch import Span
from alignedserve.testing.attention import (
    INTERPRETER_WARNINGS,
    OPTIONS,
    TOLERANCE,
    options_of,
    paged_case,
)

pytestmark = pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)

RAGGED = [(7, 0), (3, 45), (33, 0), (2, 13), (18, 30)]
SMALL = Tile(16, 16, 4, 1)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SHAPES: list[dict[str, Any]] = [
    {"heads": 4, "kv_heads": 4, "head_dim": 64, "block_size": 16},
    {"heads": 6, "kv_heads": 2, "head_dim": 80, "block_size": 32},
    {"heads": 10, "kv_heads": 2, "head_dim": 112, "block_size": 256},
    {"heads": 8, "kv_heads": 1, "head_dim": 256, "block_size": 48},
]


def check(
    spans: list[tuple[int, int]],
    dtype: torch.dtype,
    shape: dict[str, Any],
    values: dict[str, Any],
    tile: Tile | None = SMALL,
    programs: int | None = None,
    device: str = "cpu",
) -> None:
    """Run the kernel into NaN outputs. Rows of chunks must match, and other rows must be untouched."""
    case = paged_case([*spans, (1, 4)], **shape, dtype=dtype, device=device)
    case.write_new(1)
    options = options_of(values, shape["heads"], shape["head_dim"], device)
    attention = PrefillAttention(case.cache, tile, programs)
    attention.begin(case.batch.spans)
    out = torch.full_like(case.query, float("nan"))
    lse = torch.full(case.query.shape[:2], float("nan"), device=device)
    attention.attend(1, case.query, options, out, lse)
    expected, expected_lse = case.expected(options)
    torch.testing.assert_close(out[:-1].double(), expected[:-1], rtol=0.0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse[:-1].double(), expected_lse[:-1], rtol=1e-5, atol=TOLERANCE[dtype])
    assert bool(out[-1].isnan().all())  # the kernel must not write a decode row
    assert bool(lse[-1].isnan().all())


EACH = [*((values, BF16) for values in OPTIONS.values()), (OPTIONS["all"], FP16), (OPTIONS["all"], FP32)]


@pytest.mark.parametrize(("values", "dtype"), EACH, ids=str)
def test_ragged_chunks_on_cached_prefixes_equal_fp64(values: dict[str, Any], dtype: torch.dtype) -> None:
    check(RAGGED, dtype, {"heads": 6, "kv_heads": 2, "head_dim": 32, "block_size": 16}, values)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['head_dim']}x{shape['block_size']}")
def test_head_sizes_groups_and_block_sizes_equal_fp64(shape: dict[str, Any]) -> None:
    check([(5, 60), (20, 3)], BF16, shape, OPTIONS["all"])
    check([(5, 60), (20, 3)], FP32, shape, {}, tile=None)


@pytest.mark.parametrize("values", OPTIONS.values(), ids=OPTIONS)
def test_keys_split_over_programs_equal_fp64(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.engine.backends.triton_prefill.FEWEST_KEYS", 16)
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16}
    check([(3, 100), (17, 0), (20, 40)], FP32, shape, values, programs=24)


def test_query_and_output_are_read_and_written_through_their_strides() -> None:
    case = paged_case([(5, 9), (4, 0)], heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=FP32)
    case.write_new(1)
    options = AttentionOptions(scaling=0.25)
    attention = PrefillAttention(case.cache, SMALL)
    attention.begin(case.batch.spans)
    query = case.query.transpose(0, 1).contiguous().transpose(0, 1)  # as transformers hands it over
    wide = torch.full((9, 4, 40), -7.0)
    attention.attend(1, query, options, wide[..., 8:24])
    torch.testing.assert_close(wide[..., 8:24].double(), case.expected(options)[0], rtol=0.0, atol=1e-5)
    assert bool((wide[..., :8] == -7).all())
    assert bool((wide[..., 24:] == -7).all())


def test_a_short_chunk_on_a_long_prefix_is_spread_over_the_device() -> None:
    spans = (Span(0, 16, 32752, torch.arange(128)),)
    work = plan_work(spans, 1, None, Tile(64, 64, 4, 3), programs=132 / 8)
    assert 132 / 8 <= len(work.tiles) <= 2 * 132 / 8
    assert len(work.merges) == 1
    pieces = sorted(line[4:6] for line in work.tiles)
    assert pieces[0][0] == 0
    assert [begin for begin, _ in pieces[1:]] == [end for _, end in pieces[:-1]]
    assert pieces[-1][1] == 32768


def test_even_chunks_that_fill_the_device_are_not_split() -> None:
    spans = tuple(Span(512 * n, 512 * n + 512, 0, torch.arange(2)) for n in range(8))
    work = plan_work(spans, 1, None, Tile(128, 128, 8, 2), programs=132 / 32)
    assert len(work.tiles) == 8 * 4
    assert not work.merges


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("shared_kib", [227, 163, 99])
def test_a_tile_fits_the_shared_memory_of_smaller_chips(shared_kib: int, head_dim: int) -> None:
    for rows in (16, 4096):
        tile = choose_tile(head_dim, 2, rows, shared_kib << 10)
        padded = 1 << (head_dim - 1).bit_length()
        assert (tile.rows + 2 * tile.stages * tile.keys) * padded * 2 <= shared_kib << 10
        assert min(tile.rows, tile.keys) >= 16


def test_a_window_skips_the_keys_before_it() -> None:
    work = plan_work((Span(0, 64, 4000, torch.arange(254)),), 1, 100, Tile(64, 64, 4, 3), programs=1)
    ((*_, begin, end, _table, piece),) = work.tiles
    assert (begin, end, piece) == ((4000 - 99) // 64 * 64, 4064, -1)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"head_dim": 264}, "264"),
        ({"head_dim": 84}, "84"),
        ({"block_size": 8}, "kv_pool.block_size"),
        ({"dtype": "int8"}, "int8"),
    ],
    ids=str,
)
def test_what_it_cannot_serve_is_refused_by_name(change: dict[str, Any], word: str) -> None:
    needs = {"device": "cuda", "dtype": "bfloat16", "heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 16}
    assert PrefillAttention.refusal(AttentionNeeds(**needs)) is None
    assert word in str(PrefillAttention.refusal(AttentionNeeds(**{**needs, **change})))


COMPILES = """
import itertools, json, sys
import triton
from triton.backends.compiler import GPUTarget
from alignedserve.engine.backends.triton_prefill import choose_tile
from alignedserve.engine.backends.triton_prefill_kernels import (
    MERGE_COLUMNS, MERGE_ROWS, TILE_COLUMNS, merge_pieces, prefill_tiles,
)

def merged(head_dim, full):
    constants = {
        "kv_heads": 8, "group": 3, "head_dim": head_dim, "padded": triton.next_power_of_2(head_dim),
        "columns": MERGE_COLUMNS, "merge_rows": MERGE_ROWS,
    }
    constants |= {} if full else {"sinks": None, "lse": None}
    types = {"merges": "*i32", **dict.fromkeys(("sinks", "out"), "*bf16")}
    types |= dict.fromkeys(("lse", "pieces", "pieces_lse"), "*fp32") | dict.fromkeys(constants, "constexpr")
    names = merge_pieces.arg_names
    even = [n for n, name in enumerate(names) if types.get(name, "i32")[0] == "*" or types.get(name, "i32") == "i32"]
    source = triton.compiler.ASTSource(
        fn=merge_pieces,
        signature={name: types.get(name, "i32") for name in names},
        constexprs=constants,
        attrs={(n,): [["tt.divisibility", 16]] for n in even},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return {"shared": made.metadata.shared, "ptx": made.asm["ptx"]}

def compiled(head_dim, itemsize, rows, full):
    tile, kv = choose_tile(head_dim, itemsize, rows), {2: "*bf16", 4: "*fp32"}[itemsize]
    constants = {
        "kv_heads": 8, "group": 3, "block_stride": 32 * 8 * 2 * 16 * head_dim, "block_size": 16, "head_dim": head_dim,
        "padded": triton.next_power_of_2(head_dim), "tile_rows": tile.rows, "tile_keys": tile.keys,
        "columns": TILE_COLUMNS, "windowed": full, "capped": full, "upcast": False,
    }
    constants |= {} if full else {"sinks": None, "lse": None}
    types = {
        **dict.fromkeys(("query", "cache", "out", "sinks"), kv), "tables": "*i64", "work": "*i32", "lse": "*fp32",
        "pieces": "*fp32", "pieces_lse": "*fp32", "scale": "fp32", "softcap": "fp32",
    } | dict.fromkeys(constants, "constexpr")
    names = prefill_tiles.arg_names
    by_16 = ("token_stride", "head_stride", "layer_offset")
    even = [n for n, name in enumerate(names) if types.get(name, "i32")[0] == "*" or name.endswith(by_16)]
    source = triton.compiler.ASTSource(
        fn=prefill_tiles,
        signature={name: types.get(name, "i32") for name in names},
        constexprs=constants,
        attrs={(n,): [["tt.divisibility", 16]] for n in even},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"shared": made.metadata.shared, "ptx": made.asm["ptx"]}

tiles, merges = json.loads(sys.argv[1])
print(json.dumps([[compiled(*shape) for shape in tiles], [merged(*shape) for shape in merges]]))
"""


def test_it_compiles_for_an_h200_within_its_shared_memory() -> None:
    """In its own process: the interpreter changes Triton's language for the whole process."""
    shapes = [(128, 2, 4096, False), (256, 2, 4096, True), (80, 2, 16, False)]
    merges = [(128, False), (80, True)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILES, json.dumps([shapes, merges])]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    tiles, put_together = json.loads(done.stdout)
    for made in put_together:
        assert made["shared"] <= 48 * 1024
        assert "ld.global.v4" in made["ptx"]  # 16 bytes of a piece at a time
        assert "ld.local" not in made["ptx"]
    for shape, made in zip(shapes, tiles, strict=True):
        assert made["shared"] <= 227 * 1024, shape
        assert "wgmma.mma_async" in made["ptx"], shape
        assert "cp.async.cg.shared.global" in made["ptx"], shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("values", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['head_dim']}x{shape['block_size']}")
def test_on_a_gpu_it_equals_fp64(shape: dict[str, Any], values: dict[str, Any], dtype: torch.dtype) -> None:
    spans = [(700, 0), (3, 6000), (129, 511), (64, 64), (2, 1), (300, 1500)]
    check(spans, dtype, shape, values, tile=None, device="cuda")
