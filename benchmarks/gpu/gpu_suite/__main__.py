"""Runs each group in its own process with a time limit, and updates results.json and table.md while groups run.

The output is few files, because some machines return only a limited number: results.json holds the records of all
groups, logs.txt the end of each group's output.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.cluster.launch.gpus import count_gpus
from gpu_suite import machine, report
from gpu_suite.groups import BY_NAME, GROUPS, MOST_S, Group, on_device, patience, planned_s
from gpu_suite.record import read_records

HERE = Path(__file__).resolve().parents[1]
NEEDED = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "pytest": "pytest",
}
"""Required modules and their packages. CuPy is optional: without it only NCCL is not measured."""
KEPT_LOG_BYTES = 400_000  # of each group
WRITE_EVERY_S = 3.0


@dataclass(slots=True)
class _Running:
    group: Group
    process: subprocess.Popen[bytes]
    begun_s: float
    ends_s: float


class Suite:
    """Runs groups. `ended`: the status ("ok", "failed", "out of time", "not run"), reason and seconds of each."""

    def __init__(
        self,
        args: argparse.Namespace,
        groups: Sequence[Group],
        work: Path,
        command_of: Callable[[Group, argparse.Namespace, Path, float], list[str]] | None = None,
    ) -> None:
        """`work`: a folder for temporary files. `command_of`: builds the command of a group; by default `run_group`."""
        self._args = args
        self._command_of = command_of or _command
        self._work = work
        self._groups = groups
        self._begun_s = time.monotonic()
        self._machine = machine.describe(args.device)
        self.ended: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        """Run untimed groups in parallel, then timed ones one by one. Time that a batch leaves goes to the next."""
        self._write()
        planned_s = 0.0
        together = [group for group in self._groups if not group.timed]
        for batch in ([together] if together else []) + [[group] for group in self._groups if group.timed]:
            left_over_s = max(0.0, planned_s - (time.monotonic() - self._begun_s))
            planned_s += max(group.budget_s for group in batch)
            running = [started for group in batch if (started := self._start(group, left_over_s)) is not None]
            written_s = time.monotonic()
            while running:
                time.sleep(0.05)
                over = [one for one in running if self._over(one)]
                running = [one for one in running if one not in over]
                if over or time.monotonic() - written_s > WRITE_EVERY_S:
                    self._write()
                    written_s = time.monotonic()

    def _start(self, group: Group, left_over_s: float) -> _Running | None:
        left_s = self._args.limit_s - (time.monotonic() - self._begun_s)
        limit_s = min(group.budget_s + left_over_s, left_s)
        if left_s < 5.0:
            self._end(group, "not run", "the time for all groups was over", 0.0)
            return None
        environment = dict(os.environ)
        if self._args.device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        with self._log(group.name).open("wb") as log:
            process = subprocess.Popen(
                self._command_of(group, self._args, self._work, limit_s),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        now_s = time.monotonic()
        self.ended[group.name] = {"status": "running", "reason": "it had not ended yet", "seconds": 0.0}
        print(f"{group.name}: started, at most {limit_s:.0f} s", flush=True)
        return _Running(group, process, now_s, now_s + limit_s)

    def _over(self, one: _Running) -> bool:
        status, now_s = one.process.poll(), time.monotonic()
        if status is None and now_s < one.ends_s:
            return False
        end_session(one.process)
        seconds = now_s - one.begun_s
        failures = [r for r in read_records(report.records_file(self._work, one.group.name)) if "error" in r]
        if status is None:
            self._end(one.group, "out of time", f"ended after {seconds:.0f} s; see logs.txt", seconds)
        elif status:
            said = failures[-1]["error"] if failures else f"status {status}"
            self._end(one.group, "failed", f"{said}; see logs.txt", seconds)
        elif failures:
            reason = "; ".join(f"{record['case']}: {record['error']}" for record in failures)
            self._end(one.group, "failed", reason[:2000], seconds)
        else:
            self._end(one.group, "ok", "", seconds)
        return True

    def _end(self, group: Group, status: str, reason: str, seconds: float) -> None:
        self.ended[group.name] = {"status": status, "reason": reason, "seconds": round(seconds, 1)}
        print(f"{group.name}: {status} after {seconds:.1f} s {reason[:300]}", flush=True)

    def _write(self) -> None:
        order = {group.name: self.ended[group.name] for group in self._groups if group.name in self.ended}
        report.write_results(self._args.out, self._work, self._machine, sys.argv, order)
        logs = []
        for name in order:
            if self._log(name).is_file():
                end = self._log(name).read_bytes()[-KEPT_LOG_BYTES:].decode(errors="replace")
                logs.append(f"==== {name}\n{end}\n")
        (self._args.out / "logs.txt").write_text("".join(logs), encoding="utf-8")

    def _log(self, group: str) -> Path:
        return self._work / f"{group}.log"


def _command(group: Group, args: argparse.Namespace, work: Path, limit_s: float) -> list[str]:
    command = [sys.executable, "-m", "gpu_suite.run_group", group.name, "--limit-s", f"{limit_s:.1f}"]
    command += ["--device", args.device, "--work", str(work), "--out", str(args.out)]
    return [*command, "--quick"] if args.quick else command


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the group and every process that it started: each group has its own session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def chosen(only: str) -> list[Group]:
    """The groups to run. Raises SystemExit with the known names if one is unknown."""
    if not only:
        return [group for group in GROUPS if not group.extra]
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in BY_NAME]:
        raise SystemExit(f"no such group: {', '.join(unknown)}; there are: {', '.join(BY_NAME)}")
    return [group for group in GROUPS if group.name in names]


def require_packages() -> None:
    """Raises SystemExit with the names of the packages that this interpreter lacks."""
    if missing := [package for module, package in NEEDED.items() if not _found(module)]:
        raise SystemExit(
            f"{sys.executable} has no {', '.join(missing)}: install that, or name another interpreter with PYTHON"
        )


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def require_gpu() -> None:
    """Raises SystemExit if this machine has no NVIDIA GPU: otherwise each group would fail with its own error."""
    if count_gpus():
        return
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no NVIDIA GPU here; --device cpu proves the code at toy size, and measures nothing")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh", description=__doc__)
    parser.add_argument("--only", default="", metavar="GROUP[,GROUP]", help="these groups (default: all that fit)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE / "results"), metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: toy sizes, to prove the code")
    parser.add_argument("--limit-s", type=float, default=0.0, help="of all groups (default: what they are planned for)")
    parser.add_argument("--list", action="store_true", help="the groups and their time limits")
    args = parser.parse_args()
    groups = chosen(args.only)
    if args.list:
        for group in GROUPS:
            print(f"{group.name:<12} {group.budget_s:>4.0f} s  {group.what}{' (only with --only)' * group.extra}")
        print(f"together at most {planned_s():g} s")
        return 0
    require_packages()
    if args.device == "cuda":
        require_gpu()
    groups = on_device(groups, args.device)
    most_s = MOST_S * patience(args.device)
    args.limit_s = args.limit_s or max(most_s, sum(group.budget_s for group in groups if args.only))
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="alignedserve-gpu-", ignore_cleanup_errors=True) as work:
        suite = Suite(args, groups, Path(work))
        suite.run()
    print((args.out / "table.md").read_text(encoding="utf-8"))
    return 0 if all(ended["status"] == "ok" for ended in suite.ended.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
