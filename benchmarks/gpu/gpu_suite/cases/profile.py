"""Runs `alignedserve profile`, and checks that the scheduler's cost model and the simulator can read its file."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from gpu_suite.record import Context
from gpu_suite.serving import medium_model

FILE = "profile.json"
PROFILE_S = 75.0  # longer than its bound: `policies` can use a late file


def run(context: Context) -> None:
    with context.record.case("alignedserve profile", row="profile"):
        _profile(context)
    with context.record.case("read by the simulator", row="profile"):
        _simulate(context)
    with context.record.case("alignedserve profile of several ranks", row="profile"):
        _profile_ranks(context)


def _profile(context: Context) -> None:
    from alignedserve.scheduler.cost.load import load_step_cost

    folder, out = medium_model(context), context.out / FILE
    out.unlink(missing_ok=True)
    device = "cuda" if context.on_gpu else "cpu"
    command = ["profile", "--model", str(folder), "--device", device, "--out", str(out)]
    command += ["--seconds", "2"] if context.small else []
    command += [] if context.on_gpu else ["--no-cluster"]
    begun_s = time.monotonic()
    _run(command, PROFILE_S)
    seconds = time.monotonic() - begun_s
    content = json.loads(out.read_text(encoding="utf-8"))
    cost = load_step_cost(out)
    context.record.figure(
        "alignedserve profile", seconds, "s", row="profile", cost=type(cost).__name__, content=content
    )


def _simulate(context: Context) -> None:
    """Only checks that the simulator accepts the file: its output is not a measurement of the GPU."""
    trace = context.work / "profile-trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,64,8\n0.1,300,8\n", encoding="utf-8")
    command = ["simulate", "--trace", str(trace), "--cost-model", str(context.out / FILE)]
    context.record.note("simulate", said=_run(command, 30.0)[-1500:])


def _profile_ranks(context: Context) -> None:
    """Prompts on one rank, decodes on two stages, of a small model. They share GPUs if there are too few."""
    out = context.out / "profile-ranks.json"
    out.unlink(missing_ok=True)
    seconds = "1" if context.small else "5"
    command = [
        "profile",
        "--model",
        "tiny",
        "--decode-pp",
        "2",
        "--seconds",
        seconds,
        "--no-cluster",
        "--out",
        str(out),
    ]
    command += ["--device", "cuda", "--set", "cluster.share_gpu=true"] if context.on_gpu else ["--device", "cpu"]
    _run(command, PROFILE_S)
    content = json.loads(out.read_text(encoding="utf-8"))
    context.record.note("profile of two stages", degrees=content["degrees"], fit=content["fit"])


def _run(words: list[str], limit_s: float) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "alignedserve.cluster.cli.main", *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if ran.returncode:
        raise RuntimeError(f"alignedserve {words[0]} ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-1500:]}")
    return ran.stdout
