"""The figures of one run. Units are in the names.

Figures that a run does not have (no token, no objective) are None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from alignedserve.request import BATCH_PRIORITY, Stage
from alignedserve.simulator.report.results import Barriers, RequestResult, RunResult, StepColumns
from alignedserve.simulator.report.tokens import Floats, TokenTimes, token_times

Metric = float | int | None
_PERCENTILES = (50, 90, 99)
WAITS_MET = "wait_objective_attainment"
PREFIXES = {"prefix_hit_share": "prefix_hit_tokens", "prefix_ideal_share": "prefix_ideal_tokens"}


@dataclass(frozen=True, slots=True)
class Objectives:
    """The objectives that a request must meet to count for goodput, in seconds; None: no objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def any(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def describe(self) -> dict[str, float | None]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Passes with decode requests, one row each. `bubble`: predicted time minus that of equal lengths."""

    seconds: Floats
    bubble: Floats
    gap: Floats
    decodes: Floats
    start: Floats
    switching: Floats


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's figures, and the columns from which its plots are drawn, both without the warm-up."""

    metrics: dict[str, Metric]
    tokens: TokenTimes
    passes: PassTimes


def measure(run: RunResult, objectives: Objectives, warmup_s: float = 0.0) -> Measured:
    """The figures of a run.

    Requests that arrived, tokens that came and passes that began before `warmup_s` are excluded from every figure but
    `makespan_s`. Beside others, requests that only take what these leave (priority from BATCH_PRIORITY on) count for
    throughput and iterations only.
    """
    counted = [request for request in run.requests if request.arrival.arrival_s >= warmup_s]
    behind = [request for request in counted if request.arrival.priority >= BATCH_PRIORITY]
    if len(behind) < len(counted):
        counted = [request for request in counted if request.arrival.priority < BATCH_PRIORITY]
    else:
        behind = []
    tokens = token_times(counted)
    passes = _passes(run.steps, warmup_s)
    first_s = min((request.arrival.arrival_s for request in run.requests), default=0.0)
    last_s = max((request.token_s[-1] for request in run.requests if len(request.token_s)), default=first_s)
    span_s = last_s - max(first_s, warmup_s)
    refused = sum(bool(request.refused) for request in counted)
    batch_completed = sum(bool(request.token_s) for request in behind)
    metrics: dict[str, Metric] = {
        "requests": len(counted),
        "completed": len(tokens.ttft),
        "refused": refused,
        "preemptions": sum(request.preemptions for request in counted),
        "makespan_s": last_s - first_s,
        **_latencies(tokens),
        **_stages(counted),
        **_iterations(passes),
        **_throughput(run, warmup_s, span_s, passes, len(tokens.ttft) + batch_completed),
        **_attainment(tokens, objectives, len(counted), span_s),
        **({"batch_requests": len(behind), "batch_completed": batch_completed} if behind else {}),
        WAITS_MET: _per(sum(one.objective_waits_met for one in counted), sum(one.objective_waits for one in counted)),
        **_prefixes(run),
        **({} if run.barriers is None else _barriers(run.barriers, passes, warmup_s)),
    }
    return Measured(metrics, tokens, passes)


def _prefixes(run: RunResult) -> dict[str, Metric]:
    """Shares of all prompt tokens of the run, the warm-up included; None without a prefix cache."""
    queried = run.counters.get("prefix_queried_tokens", 0)
    found = {share: run.counters.get(counter, 0) for share, counter in PREFIXES.items()}
    return {share: tokens / queried if queried else None for share, tokens in found.items()}


def _latencies(tokens: TokenTimes) -> dict[str, Metric]:
    return {
        **spread("ttft", tokens.ttft),
        **spread("second_token", tokens.second_token),
        **spread("tpot", tokens.tpot),
        **spread("tpot_without_pool_wait", tokens.tpot_without_pool_wait),
        **spread("tpot_longest_tenth", tokens.longest_tenth),
        **spread("tpot_p99_gap", tokens.gap_p99),
        **spread("itl", tokens.gaps),
        **spread("pool_wait", tokens.pool_wait),
        **spread("latency", tokens.last - tokens.arrival),
    }


def _stages(requests: Sequence[RequestResult]) -> dict[str, Metric]:
    """Mean time in each stage over served requests, including repetitions; 0 for a stage that none of them entered."""
    served = [request.stages_s for request in requests if len(request.token_s)]
    return {f"stage_{stage}_mean_s": _mean(np.array([of.get(stage, 0.0) for of in served])) for stage in Stage}


def _iterations(passes: PassTimes) -> dict[str, Metric]:
    busy_s = float(passes.seconds.sum())
    return {
        "iterations": len(passes.seconds),
        **spread("iteration", passes.seconds),
        **spread("iteration_bubble", passes.bubble),
        **spread("iteration_gap", passes.gap),
        "bubble_share": float(passes.bubble.sum()) / busy_s if busy_s else None,
        "batch_mean_requests": _mean(passes.decodes),
        "switch_iteration_share": _mean(passes.switching),
    }


def _throughput(run: RunResult, warmup_s: float, span_s: float, passes: PassTimes, completed: int) -> dict[str, Metric]:
    """Throughput from the end of the warm-up to the last token. Decode throughput: over the time of decode passes."""
    outputs = decoded = 0
    for request in run.requests:
        stamps = np.frombuffer(request.token_s)
        outputs += (later := int(len(stamps) - np.searchsorted(stamps, warmup_s)))
        decoded += min(later, max(len(stamps) - 1, 0))
    inputs = sum(
        request.arrival.input_tokens
        for request in run.requests
        if len(request.token_s) and request.token_s[0] >= warmup_s
    )
    decoding_s = float((passes.start + passes.seconds).max() - passes.start.min()) if len(passes.start) else 0.0
    return {
        "throughput_requests_per_s": _per(completed, span_s),
        "throughput_tokens_per_s": _per(inputs + outputs, span_s),
        "output_throughput_tokens_per_s": _per(outputs, span_s),
        "decode_throughput_tokens_per_s": _per(decoded, decoding_s),
    }


def _attainment(tokens: TokenTimes, objectives: Objectives, arrived: int, span_s: float) -> dict[str, Metric]:
    """Shares of all requests that arrived, including refused ones.

    A request with one token cannot miss a TPOT objective.
    """
    early = tokens.ttft <= (np.inf if objectives.ttft_s is None else objectives.ttft_s)
    steady = ~(tokens.tpot > (np.inf if objectives.tpot_s is None else objectives.tpot_s))
    good = int((early & steady).sum())
    asked_ttft, asked_tpot = objectives.ttft_s is not None, objectives.tpot_s is not None
    return {
        "slo_ttft_attainment": _per(int(early.sum()), arrived) if asked_ttft else None,
        "slo_tpot_attainment": _per(int(steady.sum()), arrived) if asked_tpot else None,
        "slo_attainment": _per(good, arrived) if objectives.any else None,
        "goodput_requests_per_s": _per(good, span_s) if objectives.any else None,
    }


def _barriers(barriers: Barriers, passes: PassTimes, warmup_s: float) -> dict[str, Metric]:
    """What ranks lose by waiting for each other. `filled`: while requests began to decode, the ranks were kept full."""
    start, seconds, own = (np.frombuffer(getattr(barriers, name)) for name in ("start_s", "seconds", "own_s"))
    counted = start >= warmup_s
    shares: list[Metric] = []
    for some in (counted & (start <= barriers.last_join_s), counted):
        whole = float(seconds[some].sum()) * barriers.ranks
        shares.append(1.0 - float(own[some].sum()) / whole if whole else None)
    filled = passes.start <= barriers.last_join_s
    span_s = float((passes.start + passes.seconds)[filled].max() - passes.start[filled].min()) if filled.any() else 0.0
    return {
        "idle_share": shares[0],
        "idle_share_run": shares[1],
        "filled_tokens_per_s": _per(float(passes.decodes[filled].sum()), span_s),
        "moved_bytes": barriers.moved_bytes,
        "joined_bytes": barriers.joined_bytes,
        "evicted_bytes": barriers.evicted_bytes,
    }


def _passes(steps: StepColumns, warmup_s: float) -> PassTimes:
    start, seconds = np.frombuffer(steps.start_s), np.frombuffer(steps.seconds)
    decodes = _integers(steps, "decodes")
    counted = (decodes > 0) & (start >= warmup_s)
    return PassTimes(
        seconds=seconds[counted],
        bubble=(seconds - np.frombuffer(steps.balanced_s))[counted],
        gap=np.frombuffer(steps.gap_s)[counted],
        decodes=decodes[counted].astype(np.float64),
        start=start[counted],
        switching=_integers(steps, "switching")[counted].astype(np.float64),
    )


def _integers(steps: StepColumns, name: str) -> NDArray[np.int64]:
    return np.array(getattr(steps, name), dtype=np.int64)


def spread(name: str, values: Floats) -> dict[str, Metric]:
    """Mean, percentiles (linear between ranks) and maximum, in seconds."""
    values = values[~np.isnan(values)]
    found: dict[str, Metric] = {f"{name}_mean_s": _mean(values)}
    levels = np.percentile(values, _PERCENTILES) if len(values) else [None] * len(_PERCENTILES)
    for percent, level in zip(_PERCENTILES, levels, strict=True):
        found[f"{name}_p{percent}_s"] = None if level is None else float(level)
    found[f"{name}_max_s"] = float(values.max()) if len(values) else None
    return found


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _per(count: float, whole: float) -> float | None:
    return count / whole if whole > 0 else None
