"""Executes runs in parallel. Each result is stored at once, so that an interrupted evaluation can continue."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from evaluation.runs import Outcome, Run, digest, execute


class Runner:
    """`folder`: where results are stored; None: nowhere.

    `commit`: the code's commit. If it is unknown or has uncommitted changes ("-dirty"), stored results are not read,
    since they may be from other code.
    """

    def __init__(self, folder: Path | None, jobs: int, commit: str, quiet: bool = False) -> None:
        self.commit = commit
        self.executed = self.read = 0
        self._folder = folder
        self._reuse = folder is not None and commit != "unknown" and not commit.endswith("-dirty")
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
        files: dict[Run, tuple[Path, dict[str, Any]]] = {}
        for run in wanted:
            if run not in self._known and self._folder is not None:
                configuration = run.configuration(self.commit)
                files[run] = self._folder / f"{digest(configuration)}.json", configuration
                self._read(run, *files[run])
        missing = [run for run in wanted if run not in self._known]
        begun_s = time.monotonic()
        for number, (run, outcome) in enumerate(self._execute(missing), 1):
            self._known[run] = outcome
            self.executed += 1
            if run in files:
                _write(*files[run], outcome)
            self._say(f"[{number}/{len(missing)}] {time.monotonic() - begun_s:.0f} s: {run}")
        return {run: self._known[run] for run in wanted}

    def _execute(self, runs: list[Run]) -> Iterator[tuple[Run, Outcome]]:
        if self._jobs == 1 or len(runs) < 2:
            yield from ((run, execute(run)) for run in runs)
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._jobs, multiprocessing.get_context("spawn"))
        futures = {self._pool.submit(execute, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()

    def _read(self, run: Run, file: Path, configuration: Mapping[str, Any]) -> None:
        if not (self._reuse and file.is_file()):
            return
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["configuration"] == configuration:
            self._known[run] = Outcome(kept["metrics"], tuple(kept["iterations_s"]))
            self.read += 1

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)


def _write(file: Path, configuration: Mapping[str, Any], outcome: Outcome) -> None:
    """Write the file atomically."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"configuration": configuration, **asdict(outcome)}), encoding="utf-8")
    part.replace(file)
