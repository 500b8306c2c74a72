"""The kernel that reads memory with a given number of thread blocks: it reads its whole region, and compiles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from alignedserve.engine.profile.bandwidth import TILE, bandwidth_by_blocks, program_counts, stream

ON_CPU = not torch.cuda.is_available()


@pytest.mark.skipif(not ON_CPU, reason="Triton's interpreter runs where there is no GPU")
@pytest.mark.parametrize("programs", [1, 3])
def test_every_program_reads_every_element_of_its_own_region(programs: int) -> None:
    region = 2 * TILE
    source = torch.arange(3 * region, dtype=torch.float32) % 17
    expected = source.view(3, region).sum(dim=1)[:programs]
    assert torch.equal(stream(source, programs, region), expected)


def test_regions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        stream(torch.zeros(TILE), 2, TILE)
    with pytest.raises(ValueError, match="in tiles"):
        stream(torch.zeros(2 * TILE), 1, TILE + 1)


def test_thread_blocks_are_doubled_up_to_one_a_multiprocessor() -> None:
    assert program_counts(132) == [1, 2, 4, 8, 16, 32, 64, 128, 132]
    assert program_counts(64) == [1, 2, 4, 8, 16, 32, 64]
    assert program_counts(1) == [1]


COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from alignedserve.engine.profile.bandwidth import STAGES, TILE, _stream_kernel
source = triton.compiler.ASTSource(
    fn=_stream_kernel,
    signature={"source": "*fp32", "sums": "*fp32", "region": "i32", "tile": "constexpr", "stages": "constexpr"},
    constexprs={"tile": TILE, "stages": STAGES},
    attrs={(0,): [["tt.divisibility", 16]], (2,): [["tt.divisibility", 16]]},
)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"])
"""


def test_the_kernel_compiles_for_a_gpu_and_has_reads_in_flight() -> None:
    """In its own process: the interpreter changes Triton's language for the whole process."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ptx = subprocess.run([sys.executable, "-c", COMPILES], env=environment, check=True, capture_output=True, text=True)
    assert "cp.async.cg.shared.global" in ptx.stdout
    assert "cp.async.wait_group" in ptx.stdout


@pytest.mark.gpu
@pytest.mark.skipif(ON_CPU, reason="needs a CUDA device")
def test_more_thread_blocks_read_more() -> None:
    found = bandwidth_by_blocks(torch.device("cuda"))
    speeds = list(found.values())
    assert speeds[0] > 1e9
    assert speeds[-1] > 8 * speeds[0]
