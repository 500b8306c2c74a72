"""`alignedserve profile --out FILE`: measures this machine and writes a cost model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignedserve.cluster.cli.profile_cluster import measure_in_cluster, signals_as_exits
from alignedserve.cluster.cli.progress import for_about
from alignedserve.cluster.launch.environment import role_environment
from alignedserve.cluster.launch.gpus import count_gpus, device_with_neighbours
from alignedserve.cluster.launch.preflight import check_model
from alignedserve.cluster.runtime_dir import new_token
from alignedserve.cluster.supervisor.plan import resolve_device
from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import ConfigError

CPU_S, GPU_S = 60.0, 25.0  # default times; a GPU's profile takes less than a minute, with the start
PASSES_SHARE = 0.4  # share of the time for passes alone; the rest is for passes in a cluster
LEAST_CLUSTER_S = 15.0  # workers report once a second
LEAST_SLOWDOWN = 0.9  # a lower value is more than noise
LEAST_S = 0.1  # a shorter time does not suffice for one pass of each kind


def run_profile(config: Config, out: str, limit_s: float | None, in_cluster: bool = True) -> int:
    """Measure, and write the file whole or not at all. Returns the exit status.

    `limit_s` is the time in seconds; None: the device's default. With `in_cluster`, passes are also measured in a small
    cluster, where processes slow each other down; not on a GPU. Raises ConfigError if the time or the file cannot be
    used, and ModelError.
    """
    device = resolve_device(config, count_gpus())
    config = config.on_device(device)
    if limit_s is None:
        limit_s = CPU_S if device == "cpu" else GPU_S
    if not (math.isfinite(limit_s) and limit_s >= LEAST_S):
        raise ConfigError(f"--seconds must be at least {LEAST_S:g}, not {limit_s:g}")
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {out}: give a file in an existing, writable folder")
    check_model(config)
    in_cluster = in_cluster and device == "cpu"  # a GPU's passes share no cores with other processes
    alone_s = limit_s * (PASSES_SHARE if in_cluster else 1.0)
    text = f"measuring passes of {config.model.path} alone for about {alone_s:.3g} s"
    with for_about(alone_s, text), environment_of_a_worker(config), signals_as_exits():
        content = _measure(config, device, alone_s)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write(beside, content)
        if in_cluster:
            _add_cluster(config, content, beside, limit_s * (1.0 - PASSES_SHARE))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    fit = content["fit"]
    if not fit["quiet"]:
        print(
            f"warning: other work used {fit['other_work_share']:.0%} of the processors meanwhile: measured times are "
            "too long, and the errors below are unreliable; profile again on an idle machine",
            file=sys.stderr,
        )
    for what, errors in fit.items():
        if isinstance(errors, dict) and "mean" in errors:
            print(f"{what}: mean error {errors['mean']:.1%}, P90 {errors['p90']:.1%} of {errors['rows']} passes")
    if in_cluster:
        times = content["hardware"]
        print(
            "in a cluster on this machine: prefill passes take {prefill_slowdown:.2f} times as long, beside a decode "
            "{prefill_slowdown_beside:.2f}; decode {decode_slowdown:.2f}, beside a prefill "
            "{decode_slowdown_beside:.2f}; a message {milliseconds:.2f} ms".format(
                **times, milliseconds=times["message_s"] * 1e3
            )
        )
        if min(times["prefill_slowdown"], times["decode_slowdown"]) < LEAST_SLOWDOWN:
            print(
                "warning: passes were faster in the cluster than alone, because other work slowed the latter; profile "
                "again on an idle machine",
                file=sys.stderr,
            )
    print(f"wrote {out}; use it with --cost-model {out}")
    return 0


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _add_cluster(config: Config, content: dict[str, Any], file: Path, limit_s: float) -> None:
    """Add the times of passes in a cluster to `content` and `file`."""
    limit_s = max(limit_s, LEAST_CLUSTER_S)
    text = (
        "measuring passes in a cluster of one prefill and one decode instance, with its own configuration, for about "
        f"{limit_s:.3g} s, plus its start and end"
    )
    with for_about(limit_s, text):
        found = measure_in_cluster(config, content, file, limit_s)
    content["hardware"] |= found["hardware"]
    content["hardware_note"] += "; slowdowns and messages in a small cluster"
    content["fit"]["cluster"] = found["fit"]
    _write(file, content)


def _measure(config: Config, device: str, limit_s: float) -> dict[str, Any]:
    from alignedserve.control.echo import measure_message_s
    from alignedserve.decode_worker.loop_overhead import loop_overhead_s
    from alignedserve.engine.profile.profiler import profile

    content = profile(config, device, limit_s, loop_overhead_s, device_with_neighbours)
    content["hardware"]["message_s"] = round(asyncio.run(measure_message_s(new_token())), 9)
    return content


@contextlib.contextmanager
def environment_of_a_worker(config: Config) -> Iterator[None]:
    """Sets a worker's environment variables, so that libraries loaded within use threads as in a worker."""
    settings = RoleSettings(role="decode", id="profile", config=to_tree(config), cluster_id="", token="")
    before = dict(os.environ)
    os.environ.update(role_environment(settings))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
