"""Writes results.json and table.md. Both are rewritten while groups run, so that a later failure loses nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_suite.record import read_records
from gpu_suite.rows import ROWS, Row

NOT_MEASURED = "not measured"


def write_results(
    out: Path, work: Path, machine: Mapping[str, Any], command: Sequence[str], groups: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Write both files to `out` from the records in `work`, and return the results. `groups`: how each ended."""
    records = {name: read_records(records_file(work, name)) for name in groups}
    results = {
        "machine": dict(machine),
        "command": list(command),
        "measured_on_gpu": machine["device"] != "cpu",
        "rows": [_row(row, groups.get(row.group), records.get(row.group, []), machine) for row in ROWS],
        "groups": {name: {**ended, "records": records[name]} for name, ended in groups.items()},
    }
    _write(out / "results.json", json.dumps(results, indent=1, default=str) + "\n")
    _write(out / "table.md", table(results))
    return results


def records_file(work: Path, group: str) -> Path:
    return work / f"{group}.jsonl"


def table(results: Mapping[str, Any]) -> str:
    """The issue's table, filled in."""
    machine = results["machine"]
    gpu = machine.get("gpu") or {}
    lines = ["# What issue 6 wants shown on a GPU", ""]
    if results["measured_on_gpu"]:
        driver = machine["nvidia_smi"].get("driver_version", "?") if isinstance(machine["nvidia_smi"], dict) else "?"
        versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
        lines += [
            f"{gpu.get('name', 'unknown GPU')}, driver {driver}, CUDA {gpu.get('cuda', '?')}, Python "
            f"{machine['python']}; {versions}; commit {machine['commit']}; {machine['date']}. Ratios are of one run."
        ]
    else:
        lines += ["Run on a CPU, at toy size, to prove the code: there are no figures of a GPU here."]
    lines += ["", "| what | bound | measured | met |", "|---|---|---|---|"]
    lines += [f"| {row['what']} | {row['bound']} | {row['measured']} | {row['met']} |" for row in results["rows"]]
    ended = {name: group for name, group in results["groups"].items() if group["status"] != "ok"}
    if ended:
        lines += ["", "Groups that did not run through:", ""]
        lines += [f"- `{name}`: {group['status']}: {group['reason']}" for name, group in ended.items()]
    return "\n".join(lines) + "\n"


def _row(
    row: Row, ended: Mapping[str, Any] | None, records: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]
) -> dict[str, Any]:
    found = [record for record in records if record.get("row") == row.key and "figure" in record]
    failed = [record for record in records if record.get("row") == row.key and "error" in record]
    cells = {"key": row.key, "what": row.what, "bound": row.bound, "command": row.command}
    if machine["device"] == "cpu":
        return {**cells, "measured": NOT_MEASURED, "met": NOT_MEASURED}
    if not found:
        reason = "" if ended is None else f": {failed[0]['error'] if failed else ended['reason'] or 'no figure'}"
        return {**cells, "measured": NOT_MEASURED + _cell(reason), "met": NOT_MEASURED}
    figures = "; ".join(f"{record['figure']}: {_value(record)}" for record in found)
    if failed:
        figures += f"; failed: {failed[0]['case']} ({failed[0]['error']})"
    judged = [record["met"] for record in found if record["met"] is not None]
    met = "reported" if not judged else "yes" if all(judged) and not failed else "no"
    return {**cells, "measured": _cell(figures), "met": met}


def _value(record: Mapping[str, Any]) -> str:
    value, unit = record["value"], record["unit"]
    shown = f"{value:.4g}" if isinstance(value, int | float) else str(value)
    return f"{shown} {unit}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:1500]


def _write(file: Path, text: str) -> None:
    beside = file.with_suffix(file.suffix + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)
