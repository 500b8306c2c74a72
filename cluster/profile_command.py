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

from alignedserve.cluster.environment import role_environment
from alignedserve.cluster.gpus import count_gpus
from alignedserve.cluster.plan import resolve_device
from alignedserve.cluster.runtime_dir import new_token
from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import ConfigError

LEAST_S = 0.1  # what is below leaves no time for one pass of each kind


def run_profile(config: Config, out: str, limit_s: float) -> int:
    """Writes the file whole or not at all. Raises ConfigError where that, or the measuring, cannot be; ModelError."""
    if not (math.isfinite(limit_s) and limit_s >= LEAST_S):
        raise ConfigError(f"--seconds must be at least {LEAST_S:g}, not {limit_s:g}")
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {out}: give a file in a folder that exists and can be written")
    device = resolve_device(config, count_gpus())
    print(f"measuring {config.model.path} for about {limit_s:g} s", file=sys.stderr)
    with environment_of_a_worker(config):
        content = _measure(config, device, limit_s)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
    fit = content["fit"]
    if not fit["quiet"]:
        print(
            f"warning: other work took {fit['other_work_share']:.0%} of the processors meanwhile: times on the wall "
            "clock are too long, and these errors say little; profile again on a quiet machine",
            file=sys.stderr,
        )
    for what, errors in fit.items():
        if isinstance(errors, dict) and "mean" in errors:
            print(f"{what}: mean error {errors['mean']:.1%}, P90 {errors['p90']:.1%} of {errors['rows']} passes")
    print(f"wrote {out}; use it with --cost-model {out}")
    return 0


def _measure(config: Config, device: str, limit_s: float) -> dict[str, Any]:
    from alignedserve.control.echo import measure_message_s
    from alignedserve.decode_worker.loop_overhead import loop_overhead_s
    from alignedserve.engine.profiler import profile

    content = profile(config, device, limit_s, loop_overhead_s)
    content["hardware"]["message_s"] = round(asyncio.run(measure_message_s(new_token())), 9)
    return content


@contextlib.contextmanager
def environment_of_a_worker(config: Config) -> Iterator[None]:
    """What a worker's process is started with, for the libraries that are loaded within: threads wait as there."""
    settings = RoleSettings(role="decode", id="profile", config=to_tree(config), cluster_id="", token="")
    before = dict(os.environ)
    os.environ.update(role_environment(settings))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
