"""Describes the machine of a measurement: GPU, driver, versions, commit. It changes no device setting."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "flash-attn",
    "grpcio",
    "protobuf",
    "numpy",
    "safetensors",
    "tokenizers",
    "pytest",
    "ray",
)
_ASKED = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"


def describe(device: str) -> dict[str, Any]:
    """Chip, driver, versions, commit and date."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device,
        "nvidia_smi": nvidia_smi(),
        "gpu": _gpu() if device != "cpu" else None,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": sys.version.split()[0],
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "sources_sha256": _sources(),
    }


def nvidia_smi() -> dict[str, str] | str:
    """What nvidia-smi reports, by field; the reason if it cannot be run."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return dict(zip(_ASKED.split(","), (part.strip() for part in found[0].split(",")), strict=False)) if found else ""


def _gpu() -> dict[str, Any]:
    """The GPU's properties in torch. A separate process reads them, so that this one allocates no GPU memory."""
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps({'name': p.name, "
        "'capability': f'{p.major}.{p.minor}', 'sms': p.multi_processor_count, 'memory_bytes': p.total_memory, "
        "'l2_bytes': getattr(p, 'L2_cache_size', None), 'cuda': torch.version.cuda, "
        "'nccl': torch.cuda.nccl.version()}))"
    )
    try:
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": f"{error}: {getattr(error, 'stderr', '')}"[:2000]}
    import json

    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """ "unknown" in a copy without git history; `sources_sha256` then identifies the code."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _sources() -> str:
    digest = hashlib.sha256()
    for folder in (
        "src",
        "engine",
        "transfer",
        "decode_worker",
        "prefill_worker",
        "scheduler",
        "cluster",
        "benchmarks",
    ):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
