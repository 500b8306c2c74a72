"""The scripts of benchmarks/paper on small data: running them, and reading what they print."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from alignedserve.scheduler.cost.load import default_hardware as hardware_of_cost
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.simulator.hardware_file import default_hardware
from alignedserve.simulator.replay import ComparedPolicy, Plan
from alignedserve.simulator.report.summary import Objectives, measure
from alignedserve.simulator.traces import Load, read_trace

RTX = "rtxpro6000-llama-3.1-8b"


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def small_data(within: Path) -> Path:
    """A data folder for the scripts, with a few rows in each file."""
    rng = random.Random(1)
    folder = within / "data"
    (folder / "lengths").mkdir(parents=True)
    (folder / "traces").mkdir()
    for name in ("sharegpt_8k_lengths", "arxiv_summarization_4k_lengths"):
        rows = "".join(f"{rng.randint(10, 4000)},{rng.randint(2, 40)}\n" for _ in range(30))
        (folder / f"lengths/{name}.csv").write_text(f"num_prefill_tokens,num_decode_tokens\n{rows}")
    for name in ("code", "conv"):
        rows = "".join(
            f"2023-11-16 18:15:{number:02d}.0,{rng.randint(3, 4000)},{rng.randint(2, 30)}\n" for number in range(30)
        )
        file = folder / f"traces/AzureLLMInferenceTrace_{name}.csv"
        file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    lines = (
        {"timestamp": 100 * number, "input_length": rng.randint(600, 9000), "output_length": 9, "hash_ids": [number]}
        for number in range(30)
    )
    (folder / "traces/mooncake_synthetic_trace.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def report(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> str:
    assert script(name).main(["--quick", "--quiet", "--jobs", "1", *arguments]) == 0
    return capsys.readouterr().out


def rows_of(text: str, first: str) -> list[dict[str, str]]:
    """Rows of the first table whose first column is headed `first`, by column name."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first}"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    head = cells[0]
    rows = []
    for line, row in zip(lines[start + 2 :], cells[2:], strict=True):
        if not line.startswith("|"):
            break
        rows.append(dict(zip(head, row, strict=True)))
    return rows


def figure(cell: str) -> float:
    """The mean of a cell."""
    return float(cell.split(" ± ", maxsplit=1)[0].replace(",", "").removesuffix(" %"))


def simulated(source: str, policy: str, prefill: int, seed: int, **mode: object) -> dict[str, float]:
    """Directly from the simulator, with all arrivals at time zero."""
    plan = Plan(
        trace=read_trace(source),
        candidates=(ComparedPolicy.of(policy, {}, None),),
        cost=load_step_cost(RTX, **mode),  # type: ignore[arg-type]
        hardware=default_hardware(hardware_of_cost(RTX)),
        load=Load(),
        rates=(None,),
        seeds=(seed,),
        instances=prefill + 1,
        prefill=prefill,
        decode=1,
    )
    ((result, _, _),) = plan.runs(lambda _: None)
    return measure(result, Objectives()).metrics  # type: ignore[return-value]
