"""Writes a workload as a trace in Mooncake's format, which load tools replay against a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alignedserve.errors import ConfigError
from alignedserve.simulator.workload import Workload


def save_trace(workload: Workload, file: Path) -> int:
    """Write one line per request, in order of arrival; returns how many. Raises ConfigError.

    `hash_ids` number the blocks of the prompts in order of first appearance: the names in a request log stay there.
    `block_tokens`, a key of ours, is their size, which Mooncake fixes at 512.
    """
    if workload.clients:
        raise ConfigError("--save-trace excludes --clients: in a closed loop requests have no arrival times")
    numbers: dict[int, int] = {}
    lines = []
    for arrival in workload.arrivals:
        line: dict[str, Any] = {
            "timestamp": round(1e3 * arrival.arrival_s),
            "input_length": arrival.input_tokens,
            "output_length": arrival.output_tokens,
        }
        if arrival.blocks:
            line["hash_ids"] = [numbers.setdefault(block, len(numbers)) for block in arrival.blocks]
            line["block_tokens"] = workload.block_tokens
        lines.append(json.dumps(line) + "\n")
    try:
        file.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save-trace: {file} cannot be written: {error.strerror}") from error
    return len(lines)
