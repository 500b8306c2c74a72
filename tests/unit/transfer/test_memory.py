"""How much memory is available: on a machine, and in a container with a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.memory import available_memory_bytes, describe_bytes, total_memory_bytes

GIB = 1 << 30


class Machine:
    """A `/proc` and a `/sys/fs/cgroup` of 64 GiB, with 40 GiB available."""

    def __init__(self, folder: Path, cgroup_line: str) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        lines = [
            f"MemTotal: {64 << 20} kB",
            f"MemFree: {10 << 20} kB",
            f"MemAvailable: {40 << 20} kB",
            "HugePages_Total: 0",
        ]
        (self.proc / "meminfo").write_text("\n".join(lines))
        (self.proc / "self" / "cgroup").write_text(cgroup_line)

    def group(self, path: str, files: dict[str, str]) -> None:
        folder = self.cgroup / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)

    def figures(self) -> tuple[float, float]:
        total = total_memory_bytes(proc=self.proc, cgroup=self.cgroup)
        return total / GIB, available_memory_bytes(proc=self.proc, cgroup=self.cgroup) / GIB


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/user.slice/a\n")
    machine.group("user.slice/a", {"memory.max": "max\n", "memory.current": f"{GIB}\n"})
    assert machine.figures() == (64, 40)


def test_a_limit_of_the_group_or_of_one_above_it_binds(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/outer/inner\n")
    stat = f"anon 5\ninactive_file {GIB}\n"
    machine.group("outer", {"memory.max": f"{8 * GIB}", "memory.current": f"{6 * GIB}", "memory.stat": stat})
    machine.group("outer/inner", {"memory.max": f"{16 * GIB}", "memory.current": f"{2 * GIB}"})
    assert machine.figures() == (8, 3)  # 8 - 6, and 1 GiB of page cache that can be reclaimed


def test_a_container_that_sees_its_own_group_as_the_root_is_limited_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/kubepods/pod123/container\n")
    machine.group("", {"memory.max": f"{4 * GIB}", "memory.current": f"{5 * GIB}"})
    assert machine.figures() == (4, 0)


def test_the_first_version_of_control_groups_limits_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "5:cpu:/x\n4:cpuset,memory:/docker/abc\n")
    files = {"memory.limit_in_bytes": f"{8 * GIB}", "memory.usage_in_bytes": f"{3 * GIB}"}
    machine.group("memory/docker/abc", {**files, "memory.stat": f"total_inactive_file {GIB}\n"})
    machine.group("memory", {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": f"{3 * GIB}"})
    assert machine.figures() == (8, 6)


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory_bytes() <= total_memory_bytes()


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 bytes"), (3 << 20, "3.0 MiB"), (GIB * 3 // 2, "1.50 GiB"), (0, "0 bytes")]
)
def test_bytes_are_written_for_people(count: int, text: str) -> None:
    assert describe_bytes(count) == text
