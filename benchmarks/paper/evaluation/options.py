"""The command line of the evaluation scripts, and the head of their reports."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignedserve.errors import ConfigError
from alignedserve.scheduler.systems import Topology as Kind
from alignedserve.scheduler.systems import resolve
from alignedserve.simulator.options import settings_of
from alignedserve.simulator.report.provenance import own_commit
from evaluation.grid import BALANCED, CLOSED, DECODE_BOUND, MOST_PREFILL, Case, Grid
from evaluation.runner import Runner
from evaluation.runs import Machine, Variant, code_digest
from evaluation.workloads import Application, Source, applications

RTX_PRO_6000 = "rtxpro6000-llama-3.1-8b"
A100 = "a100-opt-13b"
LOAD = 0.9
QUICK_REQUESTS, QUICK_SEEDS, QUICK_PREFILL = 40, 2, 2


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A parsed command line. `machines`: one for each kernel mode."""

    machines: tuple[Machine, ...]
    topologies: tuple[str, ...]
    loads: tuple[float | None, ...]
    seeds: tuple[int, ...]
    scale: float
    limit: int | None
    data: Path | None
    decode: int
    most_prefill: int
    settings: tuple[str, ...]
    out: Path | None
    jobs: int
    quick: bool
    command: str
    given: argparse.Namespace

    def runner(self) -> Runner:
        return Runner(self.out, self.jobs, own_commit(), quiet=self.given.quiet)

    def grid(self, runner: Runner) -> Grid:
        return Grid(runner, self.seeds, self.decode, self.most_prefill)

    def limited(self, sources: Iterable[Source]) -> list[Source]:
        return [source.sized(self.scale, self.limit) for source in sources]

    def applications(self, wanted: tuple[Application, ...]) -> tuple[list[Source], list[str]]:
        found, left_out = applications(self.data, wanted)
        return self.limited(found), left_out

    def variants(self, wanted: Iterable[Variant]) -> list[Variant]:
        """The variants with the settings of `--set`. Raises ConfigError if a setting is invalid."""
        listed = list(wanted)
        changes = settings_of(list(self.settings), tuple(dict.fromkeys(variant.policy for variant in listed)))
        found = [
            dataclasses.replace(variant, settings=(*variant.settings, *changes[variant.policy].items()))
            for variant in listed
        ]
        for variant in found:
            variant.candidate()
        return found

    def cases(self, sources: Iterable[Source]) -> list[Case]:
        listed = list(sources)
        return [
            Case(source, machine, topology, load)
            for machine in self.machines
            for topology in self.topologies
            for load in self.loads
            for source in listed
        ]


def parser(
    doc: str,
    kernel_modes: str = "split_kv,no_split:25",
    cost_model: str = RTX_PRO_6000,
    topology: str = f"{DECODE_BOUND},{BALANCED}",
    loads: str = f"at-once,{LOAD}",
    fixed: bool = False,
) -> argparse.ArgumentParser:
    """`doc` describes the script. The other arguments are the defaults of its options.

    `fixed`: the script has its own machines and topologies, and no option for them.
    """
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--data", type=Path, default=os.environ.get("ALIGNEDSERVE_DATA"), metavar="DIR", help=(
        "the data: DIR/lengths and DIR/traces, under the names that benchmarks/paper/evaluation/workloads.py lists"
    ))  # fmt: skip
    found.set_defaults(cost_model=cost_model, kernel_modes=kernel_modes, topology=topology, decode=1)
    if not fixed:
        add("--cost-model", default=cost_model, help="a name that ships, a profile or a folder of tables (%(default)s)")
        add("--kernel-modes", default=kernel_modes, metavar="A,B,…", help="split_kv, no_split:GB/S (%(default)s)")
        add("--topology", default=topology, metavar="A,B,…", help=(
            "prefill:decode instances: decode-bound, balanced (both found by measuring), or P:D (%(default)s)"
        ))  # fmt: skip
        add("--decode", type=int, default=1, help="decode instances of the first two (default 1)")
    add("--loads", default=loads, metavar="A,B,…", help="at-once, closed, or shares of the capacity (%(default)s)")
    add("--seeds", type=int, default=5, help="how many (default 5)")
    add("--scale", type=float, default=1.0, metavar="F", help="F times as many requests a run, of a file as it has")
    add("--limit", type=int, metavar="N", help="at most N requests a run")
    add("--set", action="append", default=[], metavar="POLICY.KEY=VALUE", help="as for `alignedserve simulate`")
    add("--out", type=Path, metavar="DIR", help="keep each run's figures there, and use those of the same code")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    add("--quick", action="store_true", help="a few requests, two seeds: to see that it works, for no figures")
    add("--quiet", action="store_true", help="no progress on stderr")
    return found


def evaluation(found: argparse.ArgumentParser, argv: Sequence[str] | None) -> Evaluation:
    """Parse the command line. Exits with a message if an option is invalid."""
    given = found.parse_args(argv)
    quick = given.quick
    _check_files(found, given)
    try:
        machines = tuple(Machine.parse(given.cost_model, text) for text in given.kernel_modes.split(","))
        for machine in machines:
            machine.cost()
        loads = loads_of(given.loads)
    except ConfigError as error:
        found.error(str(error))
    if min(given.seeds, given.jobs, given.decode, 1 if given.limit is None else given.limit) < 1 or given.scale <= 0:
        found.error("--seeds, --jobs, --decode and --limit are at least 1, --scale is above 0")
    for text in given.topology.split(","):
        if text not in (DECODE_BOUND, BALANCED) and not re.fullmatch(r"[1-9]\d*:[1-9]\d*", text):
            found.error(f"--topology takes {DECODE_BOUND}, {BALANCED} or P:D, not {text!r}")
    return Evaluation(
        machines=machines,
        topologies=tuple(given.topology.split(",")),
        loads=loads,
        seeds=tuple(range(min(given.seeds, QUICK_SEEDS) if quick else given.seeds)),
        scale=given.scale,
        limit=min(given.limit or QUICK_REQUESTS, QUICK_REQUESTS) if quick else given.limit,
        data=given.data,
        decode=given.decode,
        most_prefill=QUICK_PREFILL if quick else MOST_PREFILL,
        settings=tuple(given.set),
        out=given.out,
        jobs=given.jobs,
        quick=quick,
        command=_command(found.prog, sys.argv[1:] if argv is None else argv, given),
        given=given,
    )


def _check_files(found: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Exits with a message, before anything runs, if a folder does not exist or a file cannot be written."""
    if given.data is not None and not given.data.is_dir():
        found.error(f"--data {given.data}: there is no such folder")
    if given.out is not None and given.out.exists() and not given.out.is_dir():
        found.error(f"--out {given.out} is not a folder")
    file: Path | None = getattr(given, "csv", None)
    if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        found.error(f"--csv {file}: give a file in an existing, writable folder")


def loads_of(text: str) -> tuple[float | None, ...]:
    """Parse `--loads`. Raises ConfigError."""
    named = {"at-once": None, "closed": CLOSED}
    try:
        loads = tuple(named[one] if one in named else float(one) for one in text.split(","))
    except ValueError:
        loads = (math.nan,)
    if not all(load is None or load > 0 for load in loads):
        raise ConfigError(f"--loads takes shares above 0, at-once or closed, separated by commas, not {text!r}")
    return loads


def count(text: str) -> int:
    """The type of an option that takes a whole number from 1 on. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"takes a whole number from 1 on, not {text!r}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """`A,B,…` of `count`. Raises ArgumentTypeError."""
    return tuple(count(part) for part in text.split(","))


def load_name(load: float | None) -> str:
    """As `--loads` names it."""
    return "at-once" if load is None else "closed" if load == CLOSED else f"{load:g}"


def _command(program: str, argv: Sequence[str], given: argparse.Namespace) -> str:
    """The command for another machine, with placeholders for paths."""
    paths = {str(given.data): "DIR", str(given.out): "OUT", str(getattr(given, "csv", None)): "FILE"}
    return shlex.join(["python", f"benchmarks/paper/{Path(program).name}", *(paths.get(text, text) for text in argv)])


def run(found: argparse.ArgumentParser, report: Callable[[Evaluation, Runner], str], argv: Sequence[str] | None) -> int:
    """Parse the options, create the report, print it."""
    options = evaluation(found, argv)
    with options.runner() as runner:
        try:
            text = report(options, runner)
        except ConfigError as error:
            found.error(str(error))
    print(text)
    return 0


def head(title: str, options: Evaluation, runner: Runner, notes: Iterable[str] = ()) -> str:
    """The report's head: everything that its figures depend on."""
    machine = options.machines[0]
    cost, hardware = machine.cost().describe(), machine.hardware()
    source = cost["source"]
    device = source.get("device") or source.get("gpu") or "a device that the cost model does not name"
    lines = [
        f"command: `{options.command}`",
        f"commit: {runner.commit}; code that runs are made by: {code_digest()[:12]}",
        f"cost model: {cost['name']} ({source.get('model', 'model not named')} on {device}); "
        "the paper's OPT models on H100 have no public tables",
        f"kernel modes: {'; '.join(machine.mode for machine in options.machines)}",
        f"hardware: {hardware.kv_tokens:,} tokens of KV an instance, {hardware.pool_tokens:,} in the pool, "
        f"{hardware.pool_bandwidth / 1e9:g} GB/s to the pool, {hardware.peer_bandwidth / 1e9:g} GB/s between instances",
        f"seeds: {len(options.seeds)}; ± is half a 95 % confidence interval (Student's t)",
        *notes,
    ]
    if options.quick:
        lines.insert(0, "a quick run: its figures say nothing but that the script works")
    return "\n".join([f"# {title}", "", *(f"- {line}" for line in lines)])


def workloads_of(sources: Iterable[Source]) -> str:
    """A line for the head: each workload with its size."""
    sizes = {source.name: source.requests for source in sources}
    listed = ", ".join(f"{name} ({requests} requests)" for name, requests in sizes.items())
    return f"workloads: {listed or 'none'}"


def arrivals(load: float | None) -> str:
    if load is None:
        return "all at time zero"
    if load == CLOSED:
        return "a closed loop of clients, two for each place in the running batches of fcfs"
    return f"at {load:g} of capacity (Poisson; a trace's own arrivals, stretched)"


def is_colocated(variant: Variant) -> bool:
    return resolve(variant.policy).topology is Kind.COLOCATED
