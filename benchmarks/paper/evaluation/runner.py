"""Executes runs in parallel. Each result is stored at once, so that an interrupted evaluation can continue."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from evaluation.runs import Outcome, Run, code_digest, digest, execute
from evaluation.workloads import Source


class Runner:
    """`folder`: where results are stored; None: nowhere.

    `commit`: named in reports. `code`: what a stored result must have been made by (`code_digest`).
    """

    def __init__(self, folder: Path | None, jobs: int, commit: str, quiet: bool = False, code: str = "") -> None:
        self.commit = commit
        self.executed = self.read = 0
        self._code = code or code_digest()
        self._folder = folder
        self._cpu_s: dict[Source, list[float]] = {}  # of the runs of each workload
        self._jobs = jobs
        self._quiet = quiet
        self._known: dict[Run, Outcome] = {}
        self._pool: ProcessPoolExecutor | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def outcomes(self, runs: Iterable[Run]) -> dict[Run, Outcome]:
        """The outcome of each run, from memory or its file, or by executing it."""
        wanted = list(dict.fromkeys(runs))
        files = self._files(wanted)
        missing = [run for run in wanted if run not in self._known]
        begun_s = time.monotonic()
        for number, (run, outcome, cpu_s) in enumerate(self._execute(missing), 1):
            self._known[run] = outcome
            self._cpu_s.setdefault(run.source, []).append(cpu_s)
            self.executed += 1
            if run in files:
                _write(*files[run], outcome, cpu_s)
            took_s = time.monotonic() - begun_s
            left_min = took_s * (len(missing) / number - 1) / 60
            self._say(f"[{number}/{len(missing)}] {took_s:.0f} s, about {left_min:.0f} min left: {run}")
        return {run: self._known[run] for run in wanted}

    def estimate(self, runs: Iterable[Run]) -> tuple[int, float]:
        """How many of these runs are not stored yet, and the seconds that they take: as runs of the workload took."""
        wanted = list(dict.fromkeys(runs))
        self._files(wanted)
        missing = [run for run in wanted if run not in self._known]
        cpu_s = sum(statistics.fmean(self._cpu_s.get(run.source, [0.0])) for run in missing)
        return len(missing), cpu_s / self._jobs

    def _files(self, wanted: Iterable[Run]) -> dict[Run, tuple[Path, dict[str, Any]]]:
        """The files of runs that are not known, with their configurations. Stored ones are known afterwards."""
        files: dict[Run, tuple[Path, dict[str, Any]]] = {}
        for run in wanted:
            if run not in self._known and self._folder is not None:
                configuration = run.configuration(self._code)
                files[run] = self._folder / f"{digest(configuration)}.json", configuration
                self._read(run, *files[run])
        return files

    def _execute(self, runs: list[Run]) -> Iterator[tuple[Run, Outcome, float]]:
        if self._jobs == 1 or len(runs) < 2:
            yield from ((run, *_timed(run)) for run in runs)
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._jobs, multiprocessing.get_context("spawn"))
        futures = {self._pool.submit(_timed, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], *future.result()

    def _read(self, run: Run, file: Path, configuration: Mapping[str, Any]) -> None:
        if not file.is_file():
            return
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["configuration"] == configuration:
            self._known[run] = Outcome(kept["metrics"], tuple(kept["iterations_s"]))
            self._cpu_s.setdefault(run.source, []).append(kept["cpu_s"])
            self.read += 1

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)


def _timed(run: Run) -> tuple[Outcome, float]:
    """The outcome, and the processor seconds that it took."""
    begun_s = time.process_time()
    return execute(run), time.process_time() - begun_s


def _write(file: Path, configuration: Mapping[str, Any], outcome: Outcome, cpu_s: float) -> None:
    """Write the file atomically."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"configuration": configuration, "cpu_s": cpu_s, **asdict(outcome)}), encoding="utf-8")
    part.replace(file)
