"""`alignedserve simulate`: reads traces, prints and writes figures."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.errors import ConfigError
from alignedserve.request import Stage
from alignedserve.scheduler.cost.load import BANDWIDTH, COLLECTIVES, KV_TOKENS, LINKS, load_rank_cost, load_step_cost
from alignedserve.scheduler.cost.load import default_hardware as hardware_of_cost
from alignedserve.scheduler.cost.measured import MeasuredCost
from alignedserve.scheduler.cost.tensor_parallel import named_degree
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.hardware_file import default_hardware, read_hardware, template, with_values
from alignedserve.simulator.options import (
    DEFAULT_COST_MODEL,
    DEFAULT_POLICY,
    degrees_of,
    placements_of,
    policies_of,
    rates_of,
    seeds_of,
    settings_of,
    stages_of,
)
from alignedserve.simulator.progress import Steps
from alignedserve.simulator.replay import ComparedPolicy, Plan
from alignedserve.simulator.report.outputs import ITERATIONS, REPORT, REQUESTS, SUMMARY, OutputFolder
from alignedserve.simulator.report.page import make_report
from alignedserve.simulator.report.plots import Drawn, check_matplotlib
from alignedserve.simulator.report.provenance import Provenance, command_of, own_commit
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.report.seeds import in_words, over_seeds
from alignedserve.simulator.report.summary import PREFIXES, WAITS_MET, Metric, Objectives, measure
from alignedserve.simulator.traces import Load, read_trace
from alignedserve.simulator.traces.save import save_trace
from alignedserve.simulator.workload import Workload

Rows = dict[str, dict[float | None, dict[int, dict[str, Metric]]]]
_SHOWN = (
    ("ttft_mean_s", "TTFT mean, s"),
    ("ttft_p99_s", "TTFT P99, s"),
    ("second_token_mean_s", "second token mean, s"),
    ("second_token_p99_s", "second token P99, s"),
    ("tpot_mean_s", "TPOT mean, s"),
    ("tpot_p99_s", "TPOT P99, s"),
    ("pool_wait_max_s", "pool wait max, s"),
    ("iteration_p99_s", "iteration P99, s"),
    ("bubble_share", "bubble share"),
    ("decode_throughput_tokens_per_s", "decode tokens/s"),
    ("goodput_requests_per_s", "goodput, req/s"),
    ("slo_attainment", "objectives met"),
    ("refused", "refused"),
    ("makespan_s", "makespan, s"),
)
_OF_RANKS = (
    ("idle_share", "idle share of ranks"),
    ("idle_share_run", "idle share, whole run"),
    ("moved_bytes", "moved between ranks, B"),
)
_IF_ANY = (
    (WAITS_MET, "wait objectives met"),
    *zip(PREFIXES, ("prompt tokens cached", "of an endless cache"), strict=True),
)
_STAGES = tuple((f"stage_{stage}_mean_s", f"{stage} mean, s") for stage in Stage)


@dataclass(frozen=True, slots=True)
class _Machine:
    """`assumed`: keys with defaults for an unknown device. Options for the cost of a folder of tables: `degree`, of
    `--cost-model` alone, and `links`.
    """

    hardware: Hardware
    assumed: Collection[str]
    degree: Mapping[str, float]
    links: Mapping[str, float]

    def cost(self, options: argparse.Namespace, source: str = "", ranks: int = 1) -> MeasuredCost:
        """That of `source`, or else of `--cost-model`. `ranks`: that share the experts of a mixture."""
        extra = {} if source else dict(self.degree)
        source = source or options.cost_model
        if Path(source).is_dir():
            extra |= self.links
        if options.block_bandwidth is not None:
            extra["block_bandwidth"] = options.block_bandwidth * 1e9
        if ranks > 1:
            return load_rank_cost(source, ranks, kernel_mode=options.kernel_mode, **extra)
        return load_step_cost(source, kernel_mode=options.kernel_mode, **extra)


def simulate_command(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the command and print the summary. Returns the exit status. `argv`: recorded arguments.

    Raises ConfigError.
    """
    machine = _machine(options)
    if options.print_hardware:
        print(template(machine.hardware, machine.assumed), end="")
        return 0
    if options.save_trace:
        plan = _plan(options, machine)
        if len(plan.rates) * len(plan.seeds) > 1:
            raise ConfigError("--save-trace takes one --rate and one seed")
        count = save_trace(plan.workload(plan.rates[0], plan.seeds[0]), Path(options.save_trace))
        print(f"{options.save_trace}: {count} requests")
        return 0
    with contextlib.redirect_stdout(sys.stderr):  # output of user-defined policies is not part of the summary
        plan, summary = _simulate(options, argv, machine)
    if options.json:
        print(json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        _print(summary, plan)
    return 0


def _simulate(options: argparse.Namespace, argv: Sequence[str], machine: _Machine) -> tuple[Plan, dict[str, Any]]:
    plan = _plan(options, machine)
    objectives = Objectives(_positive("--slo-ttft", options.slo_ttft), _positive("--slo-tpot", options.slo_tpot))
    workload = plan.workload(plan.rates[0], plan.seeds[0])  # wrong options are reported before anything runs
    plan.rehearse()
    if options.out:
        check_matplotlib()
    provenance = Provenance(
        command=command_of(argv),
        commit=own_commit(),
        configuration={**plan.describe(), "objectives": objectives.describe(), "warmup_s": options.warmup_s},
        trace=plan.trace.describe(),
        cost_model=plan.cost.describe(),
        notes=(*workload.notes, *_warnings(plan, workload, options)),
    )
    return plan, _run(plan, objectives, options, provenance)


def _warnings(plan: Plan, workload: Workload, options: argparse.Namespace) -> Iterator[str]:
    named = named_degree(Path(options.cost_model)) if options.tensor_parallel is not None else None
    if named is not None and named != options.tensor_parallel:
        yield (
            f"--tensor-parallel {options.tensor_parallel}, but the folder's name says -tp{named}: its tables count as "
            f"those of one of {options.tensor_parallel} devices"
        )
    colocated = ", ".join(one.name for one in plan.candidates if one.colocated)
    if options.prefill_cost_model and colocated:
        yield f"{colocated}: prompts are computed with --cost-model too: there are no prefill instances"
    if plan.stages != (1, 1) and colocated:
        yield f"{colocated}: computed without stages, which are of prefill and decode instances"
    if plan.load.clients > (requests := len(workload.arrivals)):
        yield f"--clients {plan.load.clients}, but only {requests} requests: they arrive at time zero"
    if any(arrival.wait_objective_s for arrival in workload.arrivals):
        deaf = [one.name for one in plan.candidates if one.colocated or one.ranks > 1]
        if deaf:
            yield f"the requests' wait objectives are not read by {', '.join(deaf)}"
    if plan.trace.timed and len(plan.seeds) > 1:
        yield "lengths and arrivals are from the trace: seeds do not change them, so ± does not cover their variation"
    if plan.trace.describe().get("measured") and options.cost_model == DEFAULT_COST_MODEL:
        yield f"pass times are those of {DEFAULT_COST_MODEL}; for the log's cluster give its own --cost-model"
    if options.config is not None:
        yield from _unread_degrees(plan, options)
    if options.ranks > 1 and options.slo_tpot is not None:
        yield "with --ranks no placement limits joins by --slo-tpot: it only counts in goodput"


def _unread_degrees(plan: Plan, options: argparse.Namespace) -> Iterator[str]:
    prefill, decode = degrees_of(options.config)
    if (prefill.tensor, decode.tensor) != (1, 1):
        yield (
            f"tensor_parallel of --config (prefill {prefill.tensor}, decode {decode.tensor}) is not read: a cost model "
            "has its degree in its times (--cost-model, --prefill-cost-model)"
        )
    if (measured := plan.cost.rounds_of) > 1 and measured != decode.stages:
        yield (
            f"pipeline_parallel of --config (decode {decode.stages}) is not read: decodes of --cost-model were "
            f"measured on {measured} stages"
        )
    if decode.experts > 1 and options.ranks == 1:
        yield f"expert_parallel of --config ({decode.experts}) is not read: give --ranks {decode.experts}"


def _run(plan: Plan, objectives: Objectives, options: argparse.Namespace, provenance: Provenance) -> dict[str, Any]:
    rows: Rows = {candidate.name: {rate: {} for rate in plan.rates} for candidate in plan.candidates}
    counters: dict[str, dict[str, float]] = {}
    drawn: list[Drawn] = []
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(OutputFolder(Path(options.out), provenance)) if options.out else None
        steps = stack.enter_context(Steps(plan.total, "run"))
        for run, rate, seed in plan.runs(steps.begin):
            measured = measure(run, objectives, options.warmup_s)
            rows[run.policy][rate][seed] = {"arrival_rate_per_s": _arrival_rate(run, rate), **measured.metrics}
            if options.warmup_s and not measured.metrics["requests"]:
                at = "" if rate is None else f" at {rate:g} requests/s"
                notes.append(
                    f"{run.policy}{at}, seed {seed}: every request arrived before --warmup-s {options.warmup_s:g}, and "
                    "none counts"
                )
            if refused := [one for one in run.requests if one.refused]:
                steps.line(
                    f"{run.policy}: {len(refused)} refused, e.g. {refused[0].arrival.request_id}: {refused[0].refused}"
                )
            if (rate, seed) == (plan.rates[-1], plan.seeds[0]):
                counters[run.policy] = dict(run.counters)
                drawn.append(Drawn.of(run, measured))
            if folder is not None:
                folder.add(run, rate, seed)
        summary = _summary(rows, counters, provenance, notes)
        if folder is not None:
            steps.line("writing the report")
            blocks = plan.hardware.nodes * (plan.hardware.pool_tokens // plan.hardware.block_size)
            folder.write_summary(summary)
            folder.write_report(
                make_report(summary, list(rows), drawn, provenance, objectives, blocks, _logged(summary, plan))
            )
            steps.line(f"{options.out} contains {REQUESTS}, {ITERATIONS}, {SUMMARY}, {REPORT}")
    return summary


def _summary(
    rows: Rows, counters: Mapping[str, Mapping[str, float]], provenance: Provenance, notes: Sequence[str]
) -> dict[str, Any]:
    """For each policy, its figures at the highest rate and, under `by_rate`, at every rate; `run`: provenance.

    `notes`: on the runs, besides those of `provenance`.
    """
    summary: dict[str, Any] = {}
    for policy, by_rate in rows.items():
        found = [{"rate_per_s": rate, **over_seeds(by_seed)} for rate, by_seed in by_rate.items()]
        summary[policy] = {**found[-1], "counters": dict(counters[policy]), "by_rate": found}
    return {**summary, "run": {**provenance.describe(), "notes": [*provenance.notes, *notes]}}


def _plan(options: argparse.Namespace, machine: _Machine) -> Plan:
    if not options.trace:
        raise ConfigError("--trace is missing: a file, or e.g. mix:short=0.95,requests=500 (see `simulate --help`)")
    for name in ("instances", "prefill", "decode"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1")
    if not 0 <= options.warmup_s < float("inf"):
        raise ConfigError("--warmup-s must be at least 0")
    candidates = _candidates(options)
    rates = rates_of(options.rate)
    if options.clients is not None and options.clients < 1:
        raise ConfigError(f"--clients must be at least 1, not {options.clients}")
    if options.clients is not None and options.ranks > 1:
        raise ConfigError("--clients is not for ranks in step: give --rate, or neither for all requests at once")
    cost = machine.cost(options)
    return Plan(
        trace=read_trace(options.trace),
        candidates=candidates,
        cost=cost,
        hardware=machine.hardware,
        load=Load(rates[0], options.cv, options.limit, options.clients or 0),
        rates=rates,
        seeds=seeds_of(options.seed, options.seeds),
        instances=options.instances,
        prefill=options.prefill,
        decode=options.decode,
        rank_cost=machine.cost(options, ranks=options.ranks) if options.ranks > 1 else None,
        prefill_cost=_prefill_cost(options, machine, cost) if options.prefill_cost_model else None,
        stages=stages_of(options, [one.name for one in candidates if one.colocated], cost.rounds_of),
    )


def _candidates(options: argparse.Namespace) -> tuple[ComparedPolicy, ...]:
    slo_tpot_s = _positive("--slo-tpot", options.slo_tpot)
    placements = placements_of(options.ranks, options.placement, options.policy)
    names = placements or policies_of(DEFAULT_POLICY if options.policy is None else options.policy)
    settings = settings_of(options.set, names)
    if placements:
        ranks = options.ranks
        return tuple(ComparedPolicy.of_placement(name, ranks, settings[name], options.config) for name in names)
    return tuple(
        ComparedPolicy.of(name, settings[name], options.config, slo_tpot_s, decode=options.decode) for name in names
    )


def _machine(options: argparse.Namespace) -> _Machine:
    """The simulated machine; a note on stderr tells an assumed KV capacity."""
    folder, degree = Path(options.cost_model).is_dir(), _degree(options)
    given = read_hardware(options.hardware) if options.hardware else {}
    told = hardware_of_cost(options.cost_model, given, **degree)
    if options.prefill_cost_model:
        fits = [KV_TOKENS] if f"prefill_{KV_TOKENS}" in given else ()
        own = hardware_of_cost(options.prefill_cost_model, fits)
        told |= {f"prefill_{name}": own[name] for name in (KV_TOKENS, *LINKS) if name in own}
    hardware = with_values(options.hardware, default_hardware(told), given)
    assumed = {KV_TOKENS, *([BANDWIDTH] if folder else [])} - {*told, *given}
    if KV_TOKENS in assumed:
        print(
            f"note: {options.cost_model} does not tell how much KV fits its machine (the GPU, or the size of the "
            f"model's weights, is unknown): {KV_TOKENS} = {hardware.kv_tokens} is assumed; give it by --hardware",
            file=sys.stderr,
            flush=True,
        )
    links = {name: getattr(hardware, name) for name in COLLECTIVES if name in given}
    return _Machine(hardware, assumed, degree, links)


def _degree(options: argparse.Namespace) -> dict[str, float]:
    if options.tensor_parallel is None:
        return {}
    if options.tensor_parallel < 1:
        raise ConfigError(f"--tensor-parallel must be at least 1, not {options.tensor_parallel}")
    if not Path(options.cost_model).is_dir():
        raise ConfigError(
            f"--tensor-parallel is for a folder of measured tables; {options.cost_model} has its degree in its times"
        )
    return {"tensor_parallel": options.tensor_parallel}


def _prefill_cost(options: argparse.Namespace, machine: _Machine, of_decode: MeasuredCost) -> MeasuredCost:
    cost = machine.cost(options, options.prefill_cost_model)
    own, other = cost.parts.shape, of_decode.parts.shape
    if (own.layers, own.head_dim) != (other.layers, other.head_dim):
        raise ConfigError(
            f"--prefill-cost-model {options.prefill_cost_model} has {own.layers} layers with heads of {own.head_dim}, "
            f"and {options.cost_model} {other.layers} with heads of {other.head_dim}: both must be of one model"
        )
    return cost


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be more than 0 seconds, not {value:g}")
    return value


def _arrival_rate(run: RunResult, asked: float | None) -> float | None:
    """The requested rate, else the mean rate of the trace; None if all requests arrive at once."""
    if asked is not None:
        return asked
    span_s = run.requests[-1].arrival.arrival_s - run.requests[0].arrival.arrival_s
    return (len(run.requests) - 1) / span_s if span_s > 0 else None


def _logged(summary: Mapping[str, Any], plan: Plan) -> Mapping[str, Any]:
    """Measured figures of the trace, if it is a log that was replayed unchanged; empty otherwise."""
    as_it_is = plan.rates == (None,) and plan.load.limit is None and not plan.load.clients
    logged: Mapping[str, Any] = summary["run"]["trace"].get("measured", {})
    return logged if as_it_is else {}


def _print(summary: Mapping[str, Any], plan: Plan) -> None:
    names = [candidate.name for candidate in plan.candidates]
    logged = _logged(summary, plan)
    wide = max(20 if len(plan.seeds) > 1 else 14, *(len(name) + 2 for name in names))
    for number, rate in enumerate(plan.rates):
        if len(plan.rates) > 1:
            print(f"{'' if number == 0 else chr(10)}{rate:g} requests/s")
        print(" " * 24 + "".join(f"{name:>{wide}}" for name in [*names, *(["in the log"] if logged else [])]))
        rows = [summary[name]["by_rate"][number] for name in names] + ([logged] if logged else [])
        some = [of for of in _IF_ANY if any(row.get(of[0]) is not None for row in rows)]
        shown = (*_SHOWN, *some, *(_OF_RANKS if plan.rank_cost else ()), *(_STAGES if logged else ()))
        for metric, label in shown:
            print(f"{label:24}" + "".join(f"{in_words(row, metric):>{wide}}" for row in rows))
    for note in summary["run"]["notes"]:
        print(f"note: {note}")
