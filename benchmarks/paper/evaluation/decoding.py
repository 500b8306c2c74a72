"""Times of decode iterations over given prefix lengths, from cost models or the engine (figures 1 and 3)."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from alignedserve.cluster.cli.profile_command import environment_of_a_worker
from alignedserve.config import Config
from alignedserve.errors import AlignedServeError, ConfigError
from alignedserve.simulator.report.provenance import own_commit
from evaluation.figures import Row, add_csv
from evaluation.options import RTX_PRO_6000
from evaluation.runs import Machine

Batch = tuple[int, ...]
"""KV tokens of each request before the iteration."""


class Decoding(ABC):
    """Iteration times of one machine. `name` is its name in tables, `machine` its cost model, or the engine's model."""

    name: str
    machine: str

    def place(self) -> Row:
        """The columns of the CSV file that say what a time is of."""
        return {"machine": self.machine, "kernel_mode": self.name}

    @abstractmethod
    def describe(self) -> list[str]:
        """Lines for the report's head. For an engine, call it after the measurements."""

    @abstractmethod
    def iterations_s(self, batches: Sequence[Batch]) -> list[float]:
        """Seconds of one iteration of each batch."""

    @abstractmethod
    def means_s(self, batches: Sequence[Batch], tokens: int) -> list[float]:
        """Mean seconds of an iteration of each batch while every request generates `tokens` tokens."""


class ByCostModel(Decoding):
    """The predictions of a cost model."""

    def __init__(self, machine: Machine) -> None:
        self._cost = machine.cost()
        self.name = machine.mode
        self.machine = Path(machine.cost_model).name

    def describe(self) -> list[str]:
        cost = self._cost.describe()
        source = cost["source"]
        device = source.get("device") or source.get("gpu") or "a device that it does not name"
        return [f"{self.name}: cost model {cost['name']} ({source.get('model', 'model not named')} on {device})"]

    def iterations_s(self, batches: Sequence[Batch]) -> list[float]:
        return [self._cost.step_s((), batch) for batch in batches]

    def means_s(self, batches: Sequence[Batch], tokens: int) -> list[float]:
        return [statistics.fmean(self._cost.run_s(batch, tokens)) for batch in batches]


class OnEngine(Decoding):
    """Measures the real runner and sampler. The cache holds random values, which do not affect the time.

    An iteration's time is the median of `repeats` rounds over all batches. A mean is over `points` evenly spaced
    iterations.
    """

    def __init__(self, model: str, device: str, threads: int, repeats: int, points: int, longest: int) -> None:
        """Raises ModelError, or ConfigError if the model has fewer than `longest` positions."""
        with environment_of_a_worker(Config()):  # libraries read it when they are imported
            import torch

            from alignedserve.engine.model.inspect import inspect_model
            from alignedserve.engine.model.loader import load_model
            from alignedserve.model import resolve_model

        torch.set_num_threads(threads)
        self._info = inspect_model(Path(model).name, resolve_model(model), "auto", device)
        if self._info.max_positions < longest:
            raise ConfigError(
                f"{self._info.name} has {self._info.max_positions} positions, and {longest} are asked for: "
                "give shorter prompts or fewer generated tokens"
            )
        self._loaded = load_model(self._info, device)
        self._threads = torch.get_num_threads()
        self._repeats, self._points = repeats, points
        self._clocks: set[str] = set()
        self.name = f"engine, {device}"
        self.machine = self._info.name

    def describe(self) -> list[str]:
        clocks = " or ".join(sorted(self._clocks))
        threads = f", {self._threads} threads at most" if self._loaded.device.type == "cpu" else ""
        return [
            f"{self.name}: {self._info.name} ({self._info.layers} layers, {self._info.kv_heads} KV heads of "
            f"{self._info.head_dim}, {self._info.dtype}) on {self._loaded.device.type}{threads}; its attention kernel "
            f"is torch's; median of {self._repeats} iterations, by {clocks}; means of {self._points} points"
        ]

    def iterations_s(self, batches: Sequence[Batch]) -> list[float]:
        from alignedserve.engine.profile.passes import Measurement, PassBench, PassShape

        plan = [Measurement(PassShape(lengths=batch), "decode") for batch in batches]
        bench = PassBench(self._loaded, plan)
        for number in range(self._repeats + 1):
            for measurement in plan:
                seconds = bench.run(measurement.shape)
                if number:  # the first of each warms up
                    measurement.seconds.append(seconds)
        self._clocks |= set(bench.clocks)
        return [measurement.median_s for measurement in plan]

    def means_s(self, batches: Sequence[Batch], tokens: int) -> list[float]:
        generated = [int((number + 0.5) * tokens / self._points) for number in range(self._points)]
        by_point = [self.iterations_s([grown(batch, count) for batch in batches]) for count in generated]
        return [statistics.fmean(found) for found in zip(*by_point, strict=True)]


def grown(batch: Batch, tokens: int) -> Batch:
    """The batch after every request has generated `tokens` tokens."""
    return tuple(length + tokens for length in batch)


def parser(doc: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--cost-model", default=RTX_PRO_6000, help="a name that ships, a profile or a folder of tables (%(default)s)")
    add("--kernel-modes", default="split_kv,no_split:25", metavar="A,B,…", help="split_kv, no_split:GB/S (%(default)s)")
    add("--engine", action="store_true", help="measure the engine instead, on this machine")
    add("--model", default="tiny", help="with --engine: the shipped model, or a folder (%(default)s)")
    add("--device", default="cpu", metavar="cpu|cuda:N", help="with --engine (%(default)s)")
    add("--threads", type=int, default=1, help="with --engine on a CPU; one is timed by processor time (default 1)")
    add("--repeats", type=int, default=5, help="with --engine: iterations of which the median counts (%(default)s)")
    add("--points", type=int, default=3, help="with --engine: iterations of a mean (%(default)s)")
    add_csv(found)
    return found


def run(
    found: argparse.ArgumentParser,
    title: str,
    longest: Callable[[argparse.Namespace], int],
    report: Callable[[argparse.Namespace, Sequence[Decoding]], str],
    argv: Sequence[str] | None,
) -> int:
    """Parse the options, measure, print the report. `longest`: number of positions that the options need."""
    options = found.parse_args(argv)
    if min(options.repeats, options.points, options.threads) < 1:
        found.error("--repeats, --points and --threads are at least 1")
    try:
        decodings = _decodings(options, longest(options))
        text = report(options, decodings)
    except (AlignedServeError, ValueError) as error:
        found.error(str(error))
    given = sys.argv[1:] if argv is None else argv
    words = shlex.join("FILE" if text == str(options.csv) else text for text in given)
    described = [line for decoding in decodings for line in decoding.describe()]
    paper = "the paper ran Llama-7B (Llama2-7B in figure 3) on vLLM on an H100"
    command = f"python benchmarks/paper/{Path(found.prog).name} {words}".rstrip()
    lines = (f"command: `{command}`", f"commit: {own_commit()}", paper)
    print("\n".join([f"# {title}", "", *(f"- {line}" for line in (*lines, *described)), "", text]))
    return 0


def _decodings(options: argparse.Namespace, longest: int) -> list[Decoding]:
    if options.engine:
        return [OnEngine(options.model, options.device, options.threads, options.repeats, options.points, longest)]
    return [ByCostModel(Machine.parse(options.cost_model, text)) for text in options.kernel_modes.split(",")]


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
