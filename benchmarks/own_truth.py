"""Compares this machine with its simulation: it profiles the machine, loads a cluster, and replays the request log.

`alignedserve profile` measures the machine: passes alone, and passes in a loaded small cluster. Then a prefill and a
decode instance serve mixed lengths, with Poisson arrivals at a share of the capacity, which similar requests, sent all
at once, measure first. `alignedserve simulate` replays the requests of `--request-log`, with the profile and with the
store sizes that the cluster reports. Nothing is fitted to that run. On a quiet machine:

    python benchmarks/own_truth.py --requests 300 --json own_truth.json

Each worker computes with `--threads` of the cores (half of them by default). Gateway, proxy, scheduler and this load
share them, as the profile's slowdowns account for. A client that uses more or less CPU than this load slows passes by
more or less. Time to first token is measured from the submission to the scheduler to the token's arrival at
the gateway. So the profile's time of two messages is added to the simulated one.

A probe shows how much the machine's own speed changed: fixed work on every core, before the profile, before the load
and after it. `drift` is the speed before and after the load over that before the profile. Nothing is corrected by it.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mixed_load import MixedLoad

from alignedserve.cluster.cli.open_loop import Load, Outcome, drive_apart
from alignedserve.cluster.cli.profile_command import LEAST_S
from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.cluster.launch.preflight import check_model
from alignedserve.config_sources import load, value_of
from alignedserve.control.samples import samples
from alignedserve.engine.profile.other_work import QUIET_SHARE, OtherWork
from alignedserve.errors import AlignedServeError, ConfigError
from alignedserve.memory import usable_cores
from alignedserve.scheduler.cost.load import default_hardware as hardware_of_cost
from alignedserve.scheduler.systems import served_settings, unread
from alignedserve.simulator.hardware_file import default_hardware
from alignedserve.simulator.replay import has_effect

AIM = 0.05
PROBE_S = 3.0
PROBE_SIZE = 192  # of its matrices: 144 KiB each
LISTEN_S = 3.0
STAGES = ("queue", "prefill", "pool", "prefetch", "handover", "decode")
STORES = {  # configuration key -> first part of the store's name in the metrics
    "decode.cache_blocks": "decode-0/cache",
    "prefill.cache_blocks": "prefill-0/cache",
    "prefill.batch_buffer_blocks": "prefill-0/batch",
    "prefill.requests_buffer_blocks": "prefill-0/requests",
    "pool": "kv_pool-0",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's times in seconds. `tpot_s` is None if it has one token. `stages_s` is by stage name."""

    ttft_s: float
    tpot_s: float | None
    stages_s: Mapping[str, float]


def command(*words: str) -> None:
    """Run an `alignedserve` command, with its output on stderr. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "alignedserve.cluster.cli.main", *words], check=True, stdout=sys.stderr)


def lengths(options: argparse.Namespace, requests: int, seed: int) -> list[tuple[int, int]]:
    short, long, answer = ((low, high) for low, high in (options.short, options.long, options.answer))
    load = MixedLoad(requests, options.short_share, short, long, answer, seed)
    return [(len(prompt), new_tokens) for prompt, new_tokens in load.draw()]


def offer(server: ServeProcess, drawn: list[tuple[int, int]], rate: float, seed: int) -> Outcome:
    """Send the requests, all at once with `rate` 0. Raises RuntimeError if a request is not answered."""
    load = Load(server.port, rate, 0.0, seed=seed, model="bench", lengths=drawn, at_once=not rate, drain_s=900.0)
    outcome = asyncio.run(drive_apart(load))
    if len(outcome.served) != len(drawn):
        raise RuntimeError(f"{len(outcome.served)} of {len(drawn)} requests were answered: {outcome.errors}")
    return outcome


def measure(log: Path, trace: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the cluster. Log lines of the measured load go to `trace`. Returns the load and the stores' blocks."""
    serve = ("--model", options.model, "--served-model-name", "bench", "--request-log", str(log))
    patient = ("--set", "scheduler.refuse_for_load=false", "--set", "kv_pool.size_gib=1")
    with ServeProcess(*serve, *patient, "--policy", options.policy, *each("--set", options.set)) as server:
        offer(server, lengths(options, options.warm_up, options.seed + 2), 0.0, 0)
        crowd = offer(server, lengths(options, options.crowd, options.seed + 1), 0.0, 0)
        capacity = options.crowd / crowd.wall_s
        begun_unix_s = time.time()
        outcome = offer(
            server, lengths(options, options.requests, options.seed), options.share * capacity, options.seed
        )
        metrics = server.metrics()
    lines = log.read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if json.loads(line)["arrival_unix_s"] >= begun_unix_s]
    trace.write_text("".join(f"{line}\n" for line in wanted), encoding="utf-8")
    return {
        "capacity_requests_per_s": round(capacity, 3),
        "offered_requests_per_s": round(options.share * capacity, 3),
        "late_s": round(outcome.late_s, 4),
        "client_cpu_share": round(outcome.cpu_s / outcome.wall_s, 3),
        "blocks": {key: capacity_blocks(metrics, store) for key, store in STORES.items()},
    }


def capacity_blocks(metrics: str, store: str) -> int:
    """The blocks of the one store whose name begins with the prefix. Raises RuntimeError if there is none."""
    for sample in samples(metrics, "alignedserve_kv_capacity_blocks"):
        if sample.labels["store"].startswith(store):
            return int(sample.value)
    raise RuntimeError(f"the cluster reports no store {store}")


def simulate(trace: Path, profile: Path, blocks: Mapping[str, int], options: argparse.Namespace, out: Path) -> None:
    """Simulate the trace on stores of the cluster's size, and write the results to the folder `out`."""
    machine_of_profile = default_hardware(hardware_of_cost(profile))
    block_size = machine_of_profile.block_size
    hardware = replace(
        machine_of_profile,
        kv_tokens=blocks["decode.cache_blocks"] * block_size,
        pool_tokens=blocks["pool"] * block_size,
    )
    machine = out.with_suffix(".hardware.json")
    machine.write_text(json.dumps(asdict(hardware)), encoding="utf-8")
    given = [setting for setting in options.set if has_effect(setting.partition("=")[0])]
    settings = [f"{key}={count}" for key, count in blocks.items() if "." in key] + given
    own = each("--set", (f"{options.policy}.{setting}" for setting in settings))
    model = ("--cost-model", str(profile), "--hardware", str(machine))
    command("simulate", "--trace", str(trace), "--policy", options.policy, *model, *own, "--out", str(out))


def other_work_share() -> float:
    """The share of the CPUs that other processes use. Above a tenth, a warning goes to stderr."""
    others = OtherWork()
    time.sleep(LISTEN_S)
    share = others.share()
    if share > QUIET_SHARE:
        print(f"warning: other work takes {share:.0%} of the processors: this run says little", file=sys.stderr)
    return round(share, 3)


def probe() -> float:
    """Units of fixed work per second (a matrix product, a copy, a loop of Python), all cores at once."""
    cores = usable_cores()
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        return round(sum(pool.map(_units_per_s, [PROBE_S] * cores, chunksize=1)), 1)


def _units_per_s(seconds: float) -> float:
    torch.set_num_threads(1)
    matrix, large = torch.rand(PROBE_SIZE, PROBE_SIZE), torch.rand(1 << 18)
    units, begun_s = 0, time.perf_counter()
    while (now_s := time.perf_counter()) < begun_s + seconds:
        matrix @ matrix
        large.clone()
        sum(range(2000))
        units += 1
    return units / (now_s - begun_s)


def each(flag: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def real_answers(trace: Path) -> list[Answer]:
    answers = []
    for line in trace.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        first_s, gaps = entry["first_token_unix_s"], entry["output_tokens"] - 1
        tpot_s = (entry["last_token_unix_s"] - first_s) / gaps if gaps else None
        stages_s = {stage: entry.get(f"{stage}_s", 0.0) for stage in STAGES}
        answers.append(Answer(first_s - entry["queue_unix_s"], tpot_s, stages_s))
    return answers


def simulated_answers(folder: Path, messages_s: float) -> list[Answer]:
    """`messages_s`: the time of a request's message to the scheduler and of its first token to the gateway."""
    with (folder / "requests.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    if refused := sum(bool(row["refused"]) for row in rows):
        raise RuntimeError(f"the simulation refused {refused} requests that the cluster served")
    return [
        Answer(
            float(row["ttft_s"]) + messages_s,
            float(row["tpot_s"]) if row["tpot_s"] else None,
            json.loads(row["stages_s"]),
        )
        for row in rows
    ]


def figures(answers: Iterable[Answer]) -> dict[str, float]:
    """The means of TTFT, TPOT and the time in each stage, in milliseconds."""
    answers = list(answers)
    means = {
        "ttft": statistics.mean(answer.ttft_s for answer in answers),
        "tpot": statistics.mean(answer.tpot_s for answer in answers if answer.tpot_s is not None),
        **{stage: statistics.mean(answer.stages_s.get(stage, 0.0) for answer in answers) for stage in STAGES},
    }
    return {name: round(mean * 1e3, 3) for name, mean in means.items()}


def benchmark(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    speeds = [probe()]
    profile = options.profile
    if profile is None:
        profile = folder / "profile.json"
        words = ("--model", options.model, "--out", str(profile), "--seconds", str(options.profile_s))
        command("profile", *words, *each("--set", options.set))
    busy = other_work_share()
    speeds.append(probe())
    log, trace, out = folder / "requests.jsonl", folder / "trace.jsonl", folder / "simulated"
    run = measure(log, trace, options)
    speeds.append(probe())
    simulate(trace, profile, run["blocks"], options, out)
    messages_s = 2 * default_hardware(hardware_of_cost(profile)).message_s
    real, ours = figures(real_answers(trace)), figures(simulated_answers(out, messages_s))
    errors = {name: round(ours[name] / real[name] - 1, 4) for name in ("ttft", "tpot")}
    return {
        "model": options.model,
        "policy": options.policy,
        "requests": options.requests,
        "share_of_capacity": options.share,
        "other_work_share_before": busy,
        "probe_units_per_s": speeds,
        "drift": [round(speed / speeds[0] - 1, 4) for speed in speeds[1:]],
        "profile_quiet": json.loads(profile.read_text(encoding="utf-8"))["fit"].get("quiet"),
        **run,
        "real_mean_ms": real,
        "simulated_mean_ms": ours,
        "simulated_less_real_ms": {name: round(ours[name] - real[name], 3) for name in real},
        "relative_error": errors,
        "met": all(abs(error) <= AIM for error in errors.values()),
    }


def pair(text: str) -> tuple[int, int]:
    low, high = (int(part) for part in text.split(":"))
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"takes LOW:HIGH, LOW at least 1 and no more than HIGH, not {text!r}")
    return low, high


def check(options: argparse.Namespace) -> None:
    """Raises AlignedServeError for what the profile, the cluster or the simulation would refuse later."""
    for name in ("threads", "requests", "crowd"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(options, name)}")
    if options.warm_up < 0 or not 0 <= options.short_share <= 1 or not 0 < options.share < math.inf:
        raise ConfigError("--warm-up is at least 0, --short-share from 0 to 1, --share above 0")
    if options.profile is None and not LEAST_S <= options.profile_s < math.inf:
        raise ConfigError(f"--profile-s must be at least {LEAST_S:g}, not {options.profile_s:g}")
    if options.profile is not None:
        hardware_of_cost(options.profile)
    if options.json is not None and not os.access(options.json.parent, os.W_OK):
        raise ConfigError(f"--json {options.json}: give a file in an existing, writable folder")
    settings = dict(setting.partition("=")[::2] for setting in options.set)
    typed = {key: value_of(key, text, "--set") for key, text in settings.items()}
    flags = {"model.path": options.model, "scheduler.policy": options.policy}
    served_settings(options.policy)
    config = load(None, environ={}, flags={**flags, **typed})
    for key, reader in unread(config.scheduler, config.cluster.decode).items():
        if key in typed:
            raise ConfigError(f"--set {key} has no effect here: {reader}")
    check_model(config)


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Exits with a message if an option is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--policy", default="aligned")
    own_cores = max(1, usable_cores() // 2)
    parser.add_argument("--threads", type=int, default=own_cores, help="of each worker (default: half of the cores)")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.5, help="of the capacity (default 0.5)")
    parser.add_argument("--crowd", type=int, default=100, help="requests at once that measure the capacity")
    parser.add_argument("--warm-up", type=int, default=20, help="requests before that")
    parser.add_argument("--short-share", type=float, default=0.8)
    parser.add_argument("--short", type=pair, default=(16, 128), metavar="LOW:HIGH", help="prompt tokens (16:128)")
    parser.add_argument("--long", type=pair, default=(256, 1024), metavar="LOW:HIGH", help="prompt tokens (256:1024)")
    parser.add_argument("--answer", type=pair, default=(16, 128), metavar="LOW:HIGH", help="tokens (16:128)")
    parser.add_argument("--profile", type=Path, help="what `alignedserve profile` wrote, instead of a new one")
    parser.add_argument("--profile-s", type=float, default=90.0, help="seconds of profiling (default 90)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help=(
        "a configuration key for profile, cluster, and simulation if that reads it (cluster.threads=1); repeatable"
    ))  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep profile, log and simulation in this folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    options.set.append(f"cluster.threads={options.threads}")
    try:
        check(options)
    except AlignedServeError as error:
        parser.error(error.message)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    with tempfile.TemporaryDirectory() as own:
        folder = options.keep or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        result = benchmark(options, folder)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
