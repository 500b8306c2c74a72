"""`alignedserve profile --out FILE`: measures this machine and writes a cost model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from alignedserve.cluster.gpus import count_gpus
from alignedserve.cluster.plan import resolve_device
from alignedserve.config import Config
from alignedserve.errors import ConfigError


def run_profile(config: Config, out: str, limit_s: float) -> int:
    """Writes the file whole or not at all. Raises ConfigError where it cannot be written, ModelError."""
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {out}: give a file in a folder that exists and can be written")
    from alignedserve.engine.profiler import profile

    print(f"measuring {config.model.path} for about {limit_s:g} s", file=sys.stderr)
    content = profile(config, resolve_device(config, count_gpus()), limit_s)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
    for what, errors in content["fit"].items():
        if isinstance(errors, dict):
            print(f"{what}: mean error {errors['mean']:.1%}, P90 {errors['p90']:.1%} of {errors['rows']} passes")
    print(f"wrote {out}; use it with --cost-model {out}")
    return 0
