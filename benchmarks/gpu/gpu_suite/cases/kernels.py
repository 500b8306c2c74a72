"""Runs the tests marked `gpu`, and compares every attention backend with fp64 attention at real shapes."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alignedserve.engine.backends.base import AttentionBackend, AttentionNeeds, AttentionOptions
from alignedserve.engine.backends.registry import BACKENDS
from alignedserve.testing.attention import TOLERANCE, PagedCase, paged_case
from gpu_suite.machine import ROOT
from gpu_suite.record import Context, Recorder
from gpu_suite.report import records_file

TESTS_S = 70.0  # less than the group has
LAYER = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and block size of a store, and its layers' options. `sinks`: use random ones."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        extras = [f"window {self.window}"] * bool(self.window) + ["soft-cap"] * bool(self.softcap)
        extras += ["sinks"] * self.sinks
        return f"{self.heads}/{self.kv_heads} x {self.head_dim}, blocks of {self.block_size} {' '.join(extras)}".strip()


SHAPES = (
    Shape(32, 32, 128, 16),
    Shape(32, 8, 128, 32, window=512),
    Shape(16, 4, 64, 64, softcap=30.0),
    Shape(16, 2, 256, 16, sinks=True),
    Shape(32, 32, 80, 128),
    Shape(48, 8, 96, 256, window=1024, softcap=50.0, sinks=True),
)
SMALL = (Shape(4, 2, 64, 16), Shape(2, 2, 64, 16, window=24, softcap=20.0, sinks=True))
# (new tokens, cached tokens) of each request: decode rows of ragged lengths, prompts with and without a prefix.
DECODES = [(1, start) for start in (0, 1, 14, 15, 16, 17, 63, 255, 256, 1023, 1500, 2047, 4095, 33, 700, 3789)]
PREFILLS = [(1024, 0), (513, 0), (257, 1024), (17, 2047), (2, 31), (64, 63)]
BATCHES = {"decode": DECODES, "prefill": PREFILLS, "mixed": [*DECODES[4:9], *PREFILLS[2:5]]}
SMALL_BATCHES = {"decode": [(1, 0), (1, 16), (1, 40)], "mixed": [(1, 20), (9, 0), (5, 17)]}


def run(context: Context) -> None:
    tests = _start_tests(context)
    try:
        _all_kernels(context)
    finally:
        with context.record.case("tests marked gpu", row="gpu-tests"):
            _finish_tests(context, tests)


# ---- fp64


def _all_kernels(context: Context) -> None:
    """On a GPU each shape has its own process, since most of the time goes to single-threaded compilation."""
    shapes = SMALL if context.small else SHAPES
    if not context.on_gpu:
        for shape in shapes:
            _kernels_of(context, shape)
        return
    spawn, fields = multiprocessing.get_context("spawn"), (context.device, context.quick, context.work, context.out)
    running = [
        (shape, spawn.Process(target=_in_process, args=(*fields, context.seed + number, context.ends_s, shape)))
        for number, shape in enumerate(shapes)
    ]
    for _, process in running:
        process.start()
    for shape, process in running:
        process.join(max(0.0, context.time_left_s + 5.0))
        if process.exitcode != 0:
            process.kill()
            with context.record.case(str(shape), row="kernels"):
                raise RuntimeError(f"not all of {shape} was compared: its process ended with {process.exitcode}")


def _in_process(device: str, quick: bool, work: Path, out: Path, seed: int, ends_s: float, shape: Shape) -> None:
    _kernels_of(
        Context(device, quick, work, out, Recorder(records_file(work, "kernels"), "kernels"), seed, ends_s), shape
    )


def _kernels_of(context: Context, shape: Shape) -> None:
    """Compare every backend in both dtypes, and record the largest error of each."""
    left_out = []
    for dtype in (torch.bfloat16, torch.float16):
        for name in [name for name in BACKENDS.names() if name != "torch"] + ["torch"]:
            if context.time_left_s <= 0:
                left_out.append(f"{name} {dtype}")
                continue
            with context.record.case(f"{name}, {shape}, {dtype}", row="kernels"):
                _compare(context, name, shape, dtype)
    if left_out:
        with context.record.case(str(shape), row="kernels"):
            raise TimeoutError(f"no time for {shape}: {', '.join(left_out)}")


def _compare(context: Context, name: str, shape: Shape, dtype: torch.dtype) -> None:
    needs = AttentionNeeds(
        device="cuda" if context.on_gpu else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        sliding_window=shape.window is not None,
        softcap=shape.softcap is not None,
        sinks=shape.sinks,
    )
    try:
        backend_class = BACKENDS.get(name)
    except ImportError as error:
        context.record.note(f"{name} is not installed", reason=str(error))
        return
    if reason := backend_class.refusal(needs):
        context.record.note(f"{name} refuses {shape}", reason=reason)
        return
    errors = {}
    for kind, spans in (SMALL_BATCHES if context.small else BATCHES).items():
        errors[kind] = _error(context, backend_class, shape, dtype, spans)
    worst = max(errors.values(), key=lambda error: float("inf") if error != error else error)
    context.record.figure(
        f"{name}, {shape}, {str(dtype).removeprefix('torch.')}",
        worst,
        f"(≤ {TOLERANCE[dtype]:g})",
        row="kernels",
        met=worst <= TOLERANCE[dtype],
        **errors,
    )


def _error(
    context: Context,
    backend_class: type[AttentionBackend],
    shape: Shape,
    dtype: torch.dtype,
    spans: list[tuple[int, int]],
) -> float:
    """The largest absolute error against fp64. Unwritten rows and unused blocks hold NaN."""
    case = paged_case(
        spans,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        dtype=dtype,
        device=context.device,
        seed=context.draw.randrange(1 << 30),
    )
    sinks = torch.randn(shape.heads, device=context.device) if shape.sinks else None
    options = AttentionOptions(shape.head_dim**-0.5, shape.window, shape.softcap, sinks)
    _poison_free_memory(context)
    backend = backend_class(case.cache)
    backend.begin(case.batch)
    found = backend.attend(LAYER, case.query, case.key, case.value, options)
    _check_written(case)
    expected, _ = case.expected(options)
    difference = (found.double() - expected).abs()
    return float("nan") if bool(difference.isnan().any()) else float(difference.max())


def _poison_free_memory(context: Context) -> None:
    """Fill free device memory of every size with NaN, so that output that is not written is detected."""
    if context.on_gpu:
        held = [torch.full((1 << power,), float("nan"), device=context.device) for power in range(8, 27)]
        del held


def _check_written(case: PagedCase) -> None:
    """Raises ValueError unless the store holds the new tokens' exact keys and values."""
    for kind, new in enumerate((case.key, case.value)):
        stored = case.cache[case.batch.slot_block, LAYER, :, kind, case.batch.slot_offset]
        if not torch.equal(stored, new):
            raise ValueError(f"the new tokens' {'values' if kind else 'keys'} were not stored as they were given")


# ---- tests marked gpu


def gpu_test_files() -> list[str]:
    """Files with tests marked `gpu`. Others are not collected, since their imports may be missing here."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def _start_tests(context: Context) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-c", "benchmarks/gpu/pytest.ini", "--rootdir", str(ROOT), "-q"]
    command += ["-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={_report_file(context)}"]
    command += ["--continue-on-collection-errors", *gpu_test_files()]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout=45"]
    if context.on_gpu and importlib.util.find_spec("xdist"):
        command += ["-n", "4"]  # mostly they wait for a compiler
    # Set explicitly: tests/conftest.py selects the interpreter if there is no /dev/nvidia0.
    environment = {**os.environ, **({"TRITON_INTERPRET": "0"} if context.on_gpu else {})}
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=environment)


def _finish_tests(context: Context, process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(max(5.0, min(TESTS_S, context.time_left_s + 5.0)))
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    outcome = read_report(_report_file(context))
    ran = outcome["passed"] + len(outcome["failed"])
    detail = {"skipped": outcome["skipped"][:20], "failed": outcome["failed"][:40]}
    if not ran:
        context.record.note("no test marked gpu ran", status=process.returncode, **detail)
        if context.on_gpu:
            raise RuntimeError(f"no test marked gpu ran: pytest ended with {process.returncode}")
        return
    share = outcome["passed"] / ran
    context.record.figure(f"{outcome['passed']} of {ran} passed", share, "of the tests", row="gpu-tests", **detail)


def read_report(file: Path) -> dict[str, Any]:
    """The result in pytest's XML: the number of passed tests, and the failed and skipped ones with reasons."""
    passed, failed, skipped = 0, [], []
    for test in ElementTree.parse(file).iter("testcase"):
        name = f"{test.get('classname')}::{test.get('name')}"
        wrong = [child for kind in ("failure", "error") for child in test.findall(kind)]
        left_out = test.find("skipped")
        if wrong:
            failed.append(f"{name}: {wrong[0].get('message', '')[:300]}")
        elif left_out is not None:
            skipped.append(f"{name}: {left_out.get('message', '')[:200]}")
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped}


def _report_file(context: Context) -> Path:
    return context.work / "gpu-tests.xml"
