"""The files of a simulation: requests as CSV, iterations as Parquet, the summary as JSON, all with their provenance.

They are identical, byte for byte, for the same command, code and inputs: they contain no time or place of creation.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from alignedserve.errors import ConfigError
from alignedserve.simulator.report.provenance import Provenance
from alignedserve.simulator.report.results import RequestResult, RunResult
from alignedserve.simulator.report.tokens import token_times

if TYPE_CHECKING:
    import pyarrow

REQUESTS = "requests.csv"
ITERATIONS = "iterations.parquet"
SUMMARY = "summary.json"
REPORT = "report.html"
METADATA_KEY = b"alignedserve"
INSTALL = "pip install 'alignedserve[simulate]', or pip install pyarrow matplotlib"
_LATENCIES = ("ttft", "second_token", "tpot", "tpot_without_pool_wait", "gap_p99", "longest_tenth")
COLUMNS = (
    "policy",
    "rate_per_s",
    "seed",
    "request_id",
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "refused",
    "first_token_at_s",
    "last_token_at_s",
    "ttft_s",
    "second_token_s",
    "tpot_s",
    "tpot_without_pool_wait_s",
    "tpot_p99_gap_s",
    "tpot_longest_tenth_s",
    "pool_wait_s",
    "preemptions",
    "stages_s",
)


class OutputFolder:
    """Writes runs as they end and keeps none of them. A context manager that closes the files."""

    def __init__(self, folder: Path, provenance: Provenance) -> None:
        """Raises ConfigError if the folder cannot be written to, or pyarrow is not installed."""
        self._folder = folder
        arrow = _arrow()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._csv = (folder / REQUESTS).open("w", encoding="utf-8", newline="")
        except OSError as error:
            raise ConfigError(f"--out {folder}: {error.strerror}") from error
        self._rows = csv.writer(self._csv, lineterminator="\n")
        self._csv.write(f"# {provenance.json()}\n")
        self._rows.writerow(COLUMNS)
        self._schema = _schema(arrow).with_metadata({METADATA_KEY: provenance.json().encode()})
        self._iterations = arrow.parquet.ParquetWriter(folder / ITERATIONS, self._schema, compression="zstd")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._csv.close()
        self._iterations.close()

    def add(self, run: RunResult, rate_per_s: float | None, seed: int) -> None:
        head = (run.policy, "" if rate_per_s is None else rate_per_s, seed)
        self._add_requests(run, head)
        arrow = _arrow()
        columns = _iteration_columns(run, rate_per_s, seed)
        self._iterations.write_table(arrow.table(columns, schema=self._schema))

    def write_summary(self, summary: Mapping[str, object]) -> None:
        self._write(SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_report(self, html: str) -> None:
        self._write(REPORT, html)

    def _write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text, encoding="utf-8")

    def _add_requests(self, run: RunResult, head: tuple[object, ...]) -> None:
        times = token_times(run.requests)
        rows = iter(zip(*(getattr(times, name).tolist() for name in _LATENCIES), strict=True))
        for request in run.requests:
            self._rows.writerow([*head, *_request_row(request, next(rows) if len(request.token_s) else ())])


def _request_row(request: RequestResult, latencies: tuple[float, ...]) -> list[object]:
    arrival = request.arrival
    stamps = (request.token_s[0], request.token_s[-1]) if latencies else ("", "")
    shown = ["" if math.isnan(value) else value for value in latencies] or [""] * len(_LATENCIES)
    stages = json.dumps(request.stages_s) if request.stages_s else ""
    return [
        arrival.request_id,
        arrival.arrival_s,
        arrival.input_tokens,
        arrival.output_tokens,
        request.refused,
        *stamps,
        *shown,
        request.pool_wait_s,
        request.preemptions,
        stages,
    ]


def _schema(arrow: Any) -> pyarrow.Schema:
    name, real, count = arrow.dictionary(arrow.int32(), arrow.string()), arrow.float64(), arrow.uint32()
    return arrow.schema(
        [
            ("policy", name),
            ("rate_per_s", real),
            ("seed", arrow.int64()),
            ("instance", name),
            ("start_s", real),
            ("predicted_s", real),
            ("balanced_s", real),
            ("bubble_s", real),
            ("gap_s", real),
            ("decodes", count),
            ("prefill_tokens", count),
            ("shortest_tokens", count),
            ("mean_tokens", real),
            ("longest_tokens", count),
            ("total_tokens", arrow.uint64()),
            ("switching", arrow.bool_()),
        ]
    )


def _iteration_columns(run: RunResult, rate_per_s: float | None, seed: int) -> dict[str, Any]:
    arrow = _arrow()
    steps = run.steps
    count = len(steps.start_s)
    seconds, balanced = np.frombuffer(steps.seconds), np.frombuffer(steps.balanced_s)
    decodes, total = np.array(steps.decodes, dtype=np.uint32), np.array(steps.total, dtype=np.uint64)

    def names(numbers: Any, values: tuple[str, ...]) -> Any:
        texts = arrow.array(values, type=arrow.string())
        return arrow.DictionaryArray.from_arrays(arrow.array(numbers, type=arrow.int32()), texts)

    return {
        "policy": names(np.zeros(count, dtype=np.int32), (run.policy,)),
        "rate_per_s": arrow.array([rate_per_s] * count, type=arrow.float64()),
        "seed": np.full(count, seed, dtype=np.int64),
        "instance": names(np.array(steps.instance, dtype=np.int32), run.instances),
        "start_s": np.frombuffer(steps.start_s),
        "predicted_s": seconds,
        "balanced_s": balanced,
        "bubble_s": seconds - balanced,
        "gap_s": np.frombuffer(steps.gap_s),
        "decodes": decodes,
        "prefill_tokens": np.array(steps.prefill_tokens, dtype=np.uint32),
        "shortest_tokens": np.array(steps.shortest, dtype=np.uint32),
        "mean_tokens": total / np.maximum(decodes, 1),
        "longest_tokens": np.array(steps.longest, dtype=np.uint32),
        "total_tokens": total,
        "switching": np.array(steps.switching, dtype=np.bool_),
    }


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"--out needs pyarrow: {INSTALL} ({error})") from error
    return pyarrow
