"""How much memory and how many cores the machine has, or the container if that is less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Limit:
    """The limit of one control group, and the memory in use there that cannot be reclaimed."""

    limit_bytes: int
    used_bytes: int


def total_memory_bytes(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that this process may use at most: the machine's memory, or the lowest limit of its control groups."""
    return min([_meminfo(proc)["MemTotal"], *(group.limit_bytes for group in _limits(proc, cgroup))])


def available_memory_bytes(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that this process can still allocate without swapping or exceeding its control group's limit."""
    remaining = [max(0, group.limit_bytes - group.used_bytes) for group in _limits(proc, cgroup)]
    return min([_meminfo(proc)["MemAvailable"], *remaining])


def describe_bytes(count: int) -> str:
    """A readable size: `1.50 GiB`, `12.0 MiB`, `512 bytes`."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count} bytes"


def _meminfo(proc: Path) -> dict[str, int]:
    """`/proc/meminfo` in bytes."""
    fields = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    # Kernels before 3.14 do not have MemAvailable.
    fields.setdefault("MemAvailable", fields["MemFree"] + fields.get("Cached", 0))
    return fields


def _limits(proc: Path, cgroup: Path) -> Iterator[_Limit]:
    """Limits of this process's memory control group and of its parent groups. All of them apply."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _walk(cgroup, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _walk(
                cgroup / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _walk(root: Path, path: str, limit_name: str, used_name: str, reclaimable_name: str) -> Iterator[_Limit]:
    """Limits from the group up to the root. Groups that a container cannot see are skipped."""
    group = root / path.strip("/")
    for folder in [group, *group.parents]:
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            yield _Limit(limit, max(0, used - _reclaimable(folder / "memory.stat", reclaimable_name)))
        if folder == root:
            return


def _number(path: Path) -> int | None:
    """The number in a control file; None if there is no file or no limit ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(stat: Path, name: str) -> int:
    """Bytes of page cache that the kernel reclaims first, without shared memory (memfd)."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity, or its control group's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores
