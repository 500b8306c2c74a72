"""Triton's decode kernel: in the interpreter against fp64, compiled for sm_90, and (marked gpu) on a GPU."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch

from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.backends.triton_decode import NO_WINDOW, PagedDecode
from alignedserve.engine.backends.triton_decode_kernels import plan_kernel
from alignedserve.engine.backends.triton_tuning import (
    DecodeSetting,
    decode_candidates,
    decode_setting,
    padded_group,
    shared_bytes,
)
from alignedserve.engine.backends.triton_write import PagedWrite
from alignedserve.engine.batch import DecodeTable
from alignedserve.testing.attention import (
    INTERPRETER_WARNINGS,
    OPTIONS,
    TOLERANCE,
    PagedCase,
    options_of,
    paged_case,
)

pytestmark = pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = [1, 16, 17, 90, 2, 32, 31]
SMALL = DecodeSetting(tile=16, warps=4, stages=3, programs_per_sm=2)
SHAPE = {"heads": 6, "kv_heads": 2, "head_dim": 32, "block_size": 16}
SHAPES: list[dict[str, Any]] = [
    {"heads": 2, "kv_heads": 2, "head_dim": 64, "block_size": 16},
    {"heads": 6, "kv_heads": 2, "head_dim": 80, "block_size": 32},
    {"heads": 5, "kv_heads": 1, "head_dim": 96, "block_size": 48},
    {"heads": 20, "kv_heads": 1, "head_dim": 112, "block_size": 256},
    {"heads": 2, "kv_heads": 1, "head_dim": 256, "block_size": 16},
]


def decode_case(lengths: list[int], dtype: torch.dtype, shape: dict[str, Any], device: str = "cpu") -> PagedCase:
    """Requests of these lengths with all KV written. The unused ends of their table rows are out of range."""
    case = paged_case([(1, length - 1) for length in lengths], **shape, dtype=dtype, device=device)
    case.write_new(1)
    assert case.batch.decode is not None
    table = case.batch.decode.table
    used = -(-table.lengths // shape["block_size"])
    unused = torch.arange(table.block_table.shape[1], device=device) >= used[:, None]
    table.block_table.masked_fill_(unused, 2**31 - 1)
    return case


def table_of(case: PagedCase) -> DecodeTable:
    assert case.batch.decode is not None
    return case.batch.decode.table


def run(
    decode: PagedDecode, case: PagedCase, options: AttentionOptions, query: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, in memory that held NaN."""
    query = case.query if query is None else query
    out = torch.full_like(query, float("nan"))
    lse = torch.full(query.shape[:2], float("nan"), device=query.device)
    decode.attend(1, query, options, out, lse)
    return out, lse


def check(
    lengths: list[int],
    dtype: torch.dtype,
    shape: dict[str, Any],
    values: dict[str, Any],
    device: str = "cpu",
    **how: Any,
) -> None:
    case = decode_case(lengths, dtype, shape, device)
    options = options_of(values, shape["heads"], shape["head_dim"], device)
    decode = PagedDecode(case.cache, **how)
    decode.begin(table_of(case))
    out, lse = run(decode, case, options)
    expected, expected_lse = case.expected(options)
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "name"),
    [*((FP32, name) for name in OPTIONS), *((dtype, name) for dtype in (BF16, FP16) for name in ("plain", "all"))],
    ids=str,
)
def test_ragged_rows_equal_fp64(dtype: torch.dtype, name: str) -> None:
    check(RAGGED, dtype, SHAPE, OPTIONS[name], setting=SMALL)


@pytest.mark.parametrize("values", [{}, OPTIONS["all"]], ids=["plain", "all"])
def test_rows_that_are_not_split_equal_fp64(values: dict[str, Any]) -> None:
    check(RAGGED, FP16, SHAPE, values, setting=SMALL, split=False)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['head_dim']}x{shape['block_size']}")
def test_head_sizes_groups_and_block_sizes_equal_fp64(shape: dict[str, Any]) -> None:
    check([70, 1, 258], BF16, shape, OPTIONS["all"])
    check([70, 1, 258], FP32, shape, {})


@pytest.mark.parametrize(
    ("lengths", "programs"),
    [([500], 30), ([3] * 12 + [300], 7), ([40, 40], 1), ([5], 64), ([64, 16, 80], 10)],
    ids=["one_in_many_parts", "one_long", "one_program", "idle_programs", "shares_end_with_rows"],
)
def test_any_number_of_programs_gives_the_same(lengths: list[int], programs: int) -> None:
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 16, "block_size": 16}
    check(lengths, FP32, shape, {"sinks": 2.0}, setting=SMALL, programs=programs)


def test_padding_gives_zeros_and_leaves_the_others_as_they_are() -> None:
    case = decode_case([20, 50], FP32, SHAPE)
    table = table_of(case)
    lengths = torch.tensor([0, 20, 0, 50, 0], dtype=torch.int32)
    padded = torch.full((5, table.block_table.shape[1]), 2**31 - 1, dtype=torch.int32)
    padded[[1, 3]] = table.block_table
    query = torch.randn(5, 6, 32)
    query[[1, 3]] = case.query
    options = options_of(OPTIONS["all"], SHAPE["heads"], SHAPE["head_dim"])
    for split in (True, False):
        decode = PagedDecode(case.cache, setting=SMALL, split=split)
        decode.begin(DecodeTable(lengths, padded))
        out, _ = run(decode, case, options, query)
        torch.testing.assert_close(out[[1, 3]].double(), case.expected(options)[0], rtol=0.0, atol=1e-5)
        assert bool((out[[0, 2, 4]] == 0).all())


def test_rows_of_a_mixed_batch_are_found_by_their_packed_position() -> None:
    case = decode_case([20, 50], FP32, SHAPE)
    query = torch.randn(7, 6, 32).transpose(0, 1).contiguous().transpose(0, 1)  # as transformers hands it over
    query[[5, 2]] = case.query
    options = options_of({}, SHAPE["heads"], SHAPE["head_dim"])
    decode = PagedDecode(case.cache, setting=SMALL)
    decode.begin(table_of(case), torch.tensor([5, 2]))
    out, lse = torch.full((7, 6, 32), float("nan")), torch.full((7, 6), float("nan"))
    decode.attend(1, query, options, out, lse)
    expected, expected_lse = case.expected(options)
    torch.testing.assert_close(out[[5, 2]].double(), expected, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(lse[[5, 2]].double(), expected_lse, rtol=0.0, atol=1e-5)
    assert bool(out[[0, 1, 3, 4, 6]].isnan().all())  # the kernel must not write the rows of a prefill chunk


def tiles_of(length: int, window: int, tile: int) -> int:
    return max(1, -(-length // tile) - max(0, length - window) // tile)


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_equal_and_begin_where_the_one_before_ends(seed: int) -> None:
    """Compared with a walk over all tiles; seed 0 has more rows than the kernel reads at a time."""
    draw = random.Random(seed)
    rows, programs, kv_heads = (600, 3, 2) if seed == 0 else (draw.randint(1, 20), draw.randint(1, 40), 3)
    lengths = [draw.choice((0, 1, 15, 16, 17, draw.randint(1, 200))) for _ in range(rows)]
    window = draw.choice((NO_WINDOW, 1, 16, 33))
    plan = torch.full((programs + 1, 4), -1, dtype=torch.int32)
    counted = torch.tensor(lengths, dtype=torch.int32)
    plan_kernel[(programs + 1,)](counted, plan, rows, window, programs, kv_heads=kv_heads, tile=16)
    walk = [
        (request, head, at)
        for request, length in enumerate(lengths)
        for head in range(kv_heads)
        for at in range(tiles_of(length, window, 16))
    ]
    begins = plan[:, 0].tolist()
    assert (begins[0], begins[-1]) == (0, len(walk))
    shares = [end - begin for begin, end in pairwise(begins)]
    assert max(shares) - min(shares) <= 1
    for begin, request, head, at in plan.tolist():
        assert (request, head, at) == (walk[begin] if begin < len(walk) else (rows, 0, 0))


def test_the_store_may_have_more_elements_than_32_bits_count() -> None:
    """Only a few blocks at its end are touched, so that the memory is not allocated."""
    blocks = 2**31 // 2048 + 4
    cache = torch.empty(blocks, 1, 1, 2, 16, 64, dtype=FP16)
    assert cache.numel() > 2**31
    table = DecodeTable(
        torch.tensor([17], dtype=torch.int32), torch.tensor([[blocks - 1, blocks - 3]], dtype=torch.int32)
    )
    key, value = torch.randn(17, 1, 64).to(FP16), torch.randn(17, 1, 64).to(FP16)
    write = PagedWrite(cache)
    write.begin(torch.tensor([blocks - 1] * 16 + [blocks - 3]), torch.arange(17) % 16)
    write.write(0, key, value)
    assert bool((cache[-1, 0, 0, 0] == key[:16, 0]).all())
    decode = PagedDecode(cache, setting=SMALL)
    decode.begin(table)
    query, out = torch.randn(1, 1, 64).to(FP16), torch.empty(1, 1, 64, dtype=FP16)
    decode.attend(0, query, AttentionOptions(scaling=0.1), out)
    weights = torch.softmax(key[:, 0].double() @ query[0, 0].double() * 0.1, dim=0)
    torch.testing.assert_close(out[0, 0].double(), weights @ value[:, 0].double(), rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("from_table", [False, True], ids=["slots", "table"])
def test_new_tokens_are_written_to_their_slots_and_nowhere_else(from_table: bool) -> None:
    torch.manual_seed(0)
    cache = torch.full((6, 3, 5, 2, 16, 24), 7.0)
    wide = torch.randn(3, 5, 48)
    key, value = wide[..., :24], wide[..., 24:].transpose(0, 1).contiguous().transpose(0, 1)
    lengths = torch.tensor([17, 0, 5], dtype=torch.int32)
    places = [(4, 0), None, (1, 4)] if from_table else [(4, 0), (3, 15), (1, 4)]
    write = PagedWrite(cache)
    if from_table:
        table = torch.tensor([[0, 4], [2**31 - 1, 2**31 - 1], [1, 2**31 - 1]], dtype=torch.int32)
        write.begin_table(DecodeTable(lengths, table))
    else:
        write.begin(torch.tensor([4, 3, 1]), torch.tensor([0, 15, 4]))
    write.write(2, key, value)
    expected = torch.full_like(cache, 7.0)
    for token, place in enumerate(places):
        if place is not None:
            expected[place[0], 2, :, 0, place[1]] = key[token]
            expected[place[0], 2, :, 1, place[1]] = value[token]
    assert bool((cache == expected).all())


@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (128, 8), (192, 16), (256, 4)])
def test_a_sweep_tries_the_setting_in_use_and_others(head_dim: int, group: int) -> None:
    rows = padded_group(group, 1)
    tried = list(decode_candidates(head_dim, 2, rows))
    assert tried[0] == decode_setting(head_dim, 2, rows)
    assert len(tried) == len(set(tried)) > 3


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_what_is_served_with_fits_an_sm_where_groups_are_no_wider_than_64(element_bytes: int) -> None:
    for head_dim in (64, 80, 96, 112, 128, 192, 256):
        for group in (1, 4, 8, 16, 32, 64):
            rows = padded_group(group, 1)
            setting = decode_setting(head_dim, element_bytes, rows)
            assert setting.programs_per_sm * shared_bytes(setting, head_dim, element_bytes, rows) <= 227 << 10


COMPILES = """
import json, re, subprocess, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from alignedserve.engine.backends import triton_decode, triton_write
from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.batch import DecodeTable

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "int64": "*i64"}
made = []

class Compiled:
    '''Compiles what a launch is given, as the launch would.'''
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return self.compile
    def compile(self, *args, num_warps, num_stages=3, **constants):
        names = self.kernel.arg_names
        given = dict(zip(names, args)) | constants
        fixed = {name: given[name] for name in names if given[name] is None or name in constants}
        free = {name: value for name, value in given.items() if name not in fixed}
        kind = lambda v: POINTERS[str(v.dtype)[6:]] if torch.is_tensor(v) else "fp32" if type(v) is float else "i32"
        even = [n for n in free if torch.is_tensor(free[n]) or n.endswith("stride") and free[n] % 16 == 0]
        source = triton.compiler.ASTSource(
            fn=self.kernel,
            signature={name: kind(free[name]) if name in free else "constexpr" for name in names},
            constexprs={(names.index(name),): value for name, value in fixed.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
        )
        options = {"num_warps": num_warps, "num_stages": num_stages}
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        shared, ptx = kernel.metadata.shared, kernel.asm["ptx"]
        made.append({"name": names[0], "shared": shared, "ptx": ptx, "usage": usage(kernel)})

def usage(kernel):
    with open(sys.argv[2], "wb") as file:
        file.write(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, "-res-usage", sys.argv[2]], capture_output=True, text=True, check=True).stdout

for module in (triton_decode, triton_write):
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        setattr(module, name, Compiled(getattr(module, name)))
for dtype, heads, kv_heads, head_dim, block_size, full, split in json.loads(sys.argv[1]):
    meta = {"device": "meta", "dtype": getattr(torch, dtype)}
    cache = torch.empty(8, 3, kv_heads, 2, block_size, head_dim, **meta)
    table = DecodeTable(*(torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((5,), (5, 9))))
    query, rows = torch.empty(9, heads, head_dim, **meta), torch.empty(5, dtype=torch.int64, device="meta")
    sinks, lse = torch.empty(heads, **meta), torch.empty(9, heads, dtype=torch.float32, device="meta")
    options = AttentionOptions(0.1, 100 if full else None, 5.0 if full else None, sinks if full else None)
    decode = triton_decode.PagedDecode(cache, split=split, programs=264)
    decode.begin(table, rows if full else None)
    decode.attend(1, query, options, torch.empty_like(query), lse if full else None)
    write, new = triton_write.PagedWrite(cache), torch.empty(5, kv_heads, head_dim, **meta)
    write.begin(rows, rows) if full else write.begin_table(table)
    write.write(1, new, new)
print(json.dumps(made))
"""


def test_it_compiles_for_an_h200_without_spills_and_reads_16_bytes_at_a_time(tmp_path: Any) -> None:
    """In its own process: the interpreter changes Triton's language for the whole process."""
    cases = [
        ("bfloat16", 32, 32, 128, 16, False, True),
        ("float16", 32, 8, 80, 32, True, True),
        ("bfloat16", 8, 4, 256, 256, True, False),
        ("float32", 4, 2, 128, 16, True, True),
    ]
    command = [sys.executable, "-c", COMPILES, json.dumps(cases), str(tmp_path / "cubin")]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert len(made) == 4 * len(cases) - 2  # one case is not split: no plan and no combine kernel
    for kernel in made:
        assert kernel["shared"] <= 227 << 10
        assert "STACK:0 " in kernel["usage"], kernel["name"]
        assert "LOCAL:0 " in kernel["usage"], kernel["name"]
    decodes = [kernel["ptx"] for kernel in made if "mma.sync" in kernel["ptx"]]
    assert len(decodes) == 3
    for ptx in decodes:
        assert "cp.async.cg.shared.global" in ptx  # 16 bytes each: `cg` has no other size
        assert "cp.async.ca" not in ptx


ON_A_GPU = [
    *((shape, "all", dtype, True) for shape in SHAPES for dtype in (BF16, FP16, FP32)),
    *((shape, "all", BF16, False) for shape in SHAPES),
    *((SHAPES[0], name, BF16, True) for name in OPTIONS if name != "all"),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("shape", "name", "dtype", "split"),
    ON_A_GPU,
    ids=lambda part: f"{part['head_dim']}x{part['block_size']}" if isinstance(part, dict) else str(part),
)
def test_on_a_gpu_it_equals_fp64(shape: dict[str, Any], name: str, dtype: torch.dtype, split: bool) -> None:
    check([1, 16, 17, 4000, *range(100, 140), 9000], dtype, shape, OPTIONS[name], device="cuda", split=split)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replayed_graph_shares_out_what_the_lengths_are_then() -> None:
    case = decode_case([300, 17, 4000, 64], BF16, SHAPES[0], "cuda")
    table = table_of(case)
    decode = PagedDecode(case.cache)
    options = options_of({}, SHAPES[0]["heads"], SHAPES[0]["head_dim"], "cuda")
    still = DecodeTable(torch.ones_like(table.lengths), table.block_table.clone())
    out = torch.empty_like(case.query)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiled before the capture
        decode.begin(still)
        decode.attend(1, case.query, options, out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.begin(still)
        decode.attend(1, case.query, options, out)
    still.lengths.copy_(table.lengths)
    out.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(out.double(), case.expected(options)[0], rtol=0.0, atol=TOLERANCE[BF16])
