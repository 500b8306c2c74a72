"""`alignedserve doctor`: what this machine offers for a configuration, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field

from alignedserve import __version__
from alignedserve.cluster.cli.doctor_channels import examine_channels
from alignedserve.cluster.cli.doctor_memory import examine_memory
from alignedserve.cluster.cli.status_command import table
from alignedserve.cluster.launch.gpus import count_gpus
from alignedserve.cluster.launch.preflight import check_api_keys, check_machine, check_model, check_ports
from alignedserve.cluster.records import read_records
from alignedserve.cluster.supervisor.plan import resolve_device
from alignedserve.config import Config
from alignedserve.errors import AlignedServeError
from alignedserve.memory import available_memory_bytes, describe_bytes, total_memory_bytes, usable_cores

REQUIRED_PACKAGES = (
    "ray",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "grpcio",
    "protobuf",
    "uvloop",
    "orjson",
)
GPU_PACKAGES = {
    "triton": "Triton kernels",
    "flash-attn": "flash attention",
    "cupy": "copies over NCCL between a prefill and a decode instance",
    "nccl": "copies between devices of several nodes",
    "cuda-bindings": "many copies between host and device in one call",
}
_ON_ITS_OWN = {"flash-attn"}  # built at installation for the CUDA version that is there
_ALIASES = {
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    "flash-attn": ("flash-attn", "flash_attn"),
}


@dataclass
class Report:
    """The findings. `missing` has a line for each problem that keeps the configuration from working."""

    alignedserve: str = __version__
    python: str = platform.python_version()
    system: str = f"{platform.system()} {platform.release()} {platform.machine()}"
    cores: int = 0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    dev_shm_bytes: int = 0
    cpu_features: list[str] = field(default_factory=list)
    gpus: list[dict[str, str]] = field(default_factory=list)
    torch_cuda: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    roles: list[dict[str, str]] = field(default_factory=list)
    channels: list[dict[str, str]] = field(default_factory=list)
    stores: list[dict[str, str]] = field(default_factory=list)
    device_memory: list[str] = field(default_factory=list)
    attention: list[dict[str, str | float | None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_doctor(config: Config, *, as_json: bool) -> int:
    """Print the report. Returns 1 if the configuration needs something that is missing, else 0."""
    report = examine(config)
    if as_json:
        json.dump(asdict(report), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print("\n".join(_lines(report)))
    return 1 if report.missing else 0


def examine(config: Config) -> Report:
    report = Report(
        cores=usable_cores(),
        memory_total_bytes=total_memory_bytes(),
        memory_available_bytes=available_memory_bytes(),
        dev_shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        cpu_features=_cpu_features(),
        gpus=_gpus(),
    )
    _examine_torch(report)
    _examine_packages(report)
    for check, problems in (
        (check_model, report.missing),
        (check_machine, report.missing),
        (check_api_keys, report.missing),
        (check_ports, report.notes),  # a running cluster of this user may have them
    ):
        try:
            check(config)
        except AlignedServeError as error:
            problems.append(error.message)
    startable = not report.missing  # a missing channel does not affect attention
    report.roles, report.channels, problems = examine_channels(config)
    report.missing += problems
    _examine_memory(report, config)
    if startable:
        _examine_attention(report, config)
    return report


def _examine_memory(report: Report, config: Config) -> None:
    """What does not fit is no problem beside a cluster of this user, which has taken the memory."""
    if "missing" in report.packages.values():
        return
    try:
        report.stores, report.device_memory = examine_memory(config)
    except AlignedServeError as error:
        if error.message not in report.missing:
            (report.notes if read_records() else report.missing).append(error.message)


def _examine_packages(report: Report) -> None:
    for name in REQUIRED_PACKAGES:
        version = _version(name)
        report.packages[name] = version or "missing"
        if not version:
            report.missing.append(f"package {name} is not installed: pip install alignedserve")
    for name, purpose in GPU_PACKAGES.items():
        version = next((found for alias in _ALIASES.get(name, (name,)) if (found := _version(alias))), "")
        report.packages[name] = version or "not installed"
        if report.gpus and not version:
            extra = f"'alignedserve[gpu-cu{report.torch_cuda.partition('.')[0] or 13}]'"
            wanted = name if name in _ON_ITS_OWN else extra
            report.notes.append(f"{name} is not installed ({purpose}): pip install {wanted}")


def _examine_torch(report: Report) -> None:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    report.torch_cuda = torch.version.cuda or ""
    if report.gpus and not torch.cuda.is_available():
        built = f"built for CUDA {report.torch_cuda}" if report.torch_cuda else "a CPU build"
        report.missing.append(f"this machine has GPUs, but torch {torch.__version__} ({built}) cannot use them")


def _examine_attention(report: Report, config: Config) -> None:
    """Report each attention backend. On a GPU it is tried and timed with the configured model's heads."""
    from alignedserve.engine.attention_report import attention_report

    try:
        found = attention_report(config, resolve_device(config, count_gpus()))
    except AlignedServeError as error:
        report.missing.append(error.message)
        return
    report.attention = [asdict(candidate) for candidate in found]
    named = next((c for c in found if c.name == config.engine.attention), None)
    if named is not None and named.refusal is not None:
        report.missing.append(f"engine.attention: {named.name} cannot serve this here: {named.refusal}")


def _lines(report: Report) -> list[str]:
    shm = f", /dev/shm {describe_bytes(report.dev_shm_bytes)}" if report.dev_shm_bytes else ", no /dev/shm"
    free = describe_bytes(report.memory_available_bytes)
    lines = [
        f"alignedserve {report.alignedserve}, Python {report.python}, {report.system}",
        f"cores: {report.cores}" + (f" ({', '.join(report.cpu_features)})" if report.cpu_features else ""),
        f"memory: {free} of {describe_bytes(report.memory_total_bytes)} available{shm}",
        f"GPUs: {len(report.gpus) or 'none'}",
        *(f"  {gpu['name']}, {gpu['memory']}, driver {gpu['driver']}" for gpu in report.gpus),
        f"torch's CUDA: {report.torch_cuda or 'none'}",
        "packages: " + ", ".join(f"{name} {version}" for name, version in report.packages.items()),
    ]
    if report.channels:
        columns = ("source", "destination", "channel", "GB/s", "GB/s back", "reason")
        lines += [
            "channels:",
            *("  " + line for line in table(columns, [[c[k] for k in columns] for c in report.channels])),
        ]
    if report.stores:
        rows = [list(store.values()) for store in report.stores]
        lines += ["stores, if it were started now:", *("  " + line for line in table(list(report.stores[0]), rows))]
    lines += report.device_memory
    if report.attention:
        lines += ["attention:", *("  " + line for line in table(("backend", "here"), _attention_rows(report)))]
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"missing: {problem}" for problem in report.missing] or ["nothing is missing"]
    return lines


def _attention_rows(report: Report) -> list[list[str]]:
    return [
        [str(found["name"]), str(found["refusal"] or "serves") + _times(found["decode_us"], found["prefill_us"])]
        for found in report.attention
    ]


def _times(decode_us: str | float | None, prefill_us: str | float | None) -> str:
    if decode_us is None or prefill_us is None:
        return ""
    return f"; time per layer: {decode_us:.0f} µs for decode passes, {prefill_us:.0f} µs for prefill passes"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_features() -> list[str]:
    """The CPU features that matter for bf16."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line.split(":", 1)[1].split() for line in file if line.startswith("flags")), [])
    except OSError:
        return []
    return [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]


def _gpus() -> list[dict[str, str]]:
    """GPUs as `nvidia-smi` reports them; without it, their names are unknown."""
    if not count_gpus():
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [{"name": "NVIDIA GPU", "memory": "unknown", "driver": "unknown"}] * count_gpus()
    rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines() if line.strip()]
    return [{"name": name, "memory": memory, "driver": driver} for name, memory, driver in rows]
