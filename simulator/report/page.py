"""The report of a simulation: one self-contained HTML page."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from alignedserve.simulator.report import plots
from alignedserve.simulator.report.plots import Drawn
from alignedserve.simulator.report.provenance import Provenance
from alignedserve.simulator.report.seeds import in_words
from alignedserve.simulator.report.summary import Objectives

_SHOWN = {
    "ttft_mean_s": "TTFT, mean, s",
    "ttft_p99_s": "TTFT, P99, s",
    "second_token_mean_s": "second token, mean, s",
    "pool_wait_mean_s": "pool wait, mean, s",
    "tpot_mean_s": "TPOT, mean, s",
    "tpot_p99_s": "TPOT, P99, s",
    "tpot_without_pool_wait_p99_s": "TPOT without pool wait, P99, s",
    "itl_p99_s": "gap, pooled, P99, s",
    "iteration_p99_s": "iteration, P99, s",
    "bubble_share": "bubble, share of iteration time",
    "decode_throughput_tokens_per_s": "decode throughput, tokens/s",
    "throughput_requests_per_s": "throughput, requests/s",
    "goodput_requests_per_s": "goodput, requests/s",
    "slo_attainment": "objectives met",
    "switch_iteration_share": "iterations in a switch",
    "prefix_hit_share": "prompt tokens cached",
    "prefix_ideal_share": "of an endless cache",
    "preemptions": "preemptions",
    "refused": "refused",
    "makespan_s": "makespan, s",
}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 82rem; padding: 0 1rem; color: #1b1b1b }
h2 { margin: 2.2rem 0 .4rem } p { max-width: 60rem } svg { max-width: 100%; height: auto }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left } pre { white-space: pre-wrap; background: #f5f5f5; padding: 1rem }
"""


def make_report(
    summary: Mapping[str, Any],
    policies: Sequence[str],
    drawn: Sequence[Drawn],
    provenance: Provenance,
    objectives: Objectives,
    pool_blocks: int,
    logged: Mapping[str, Any],
) -> str:
    """The HTML report. `drawn`: each policy's first seed at the highest rate. `logged`: see `_table`."""
    chosen = {policy: summary[policy] for policy in policies}
    sections = [
        _head(provenance),
        _section(
            "Summary", _table(chosen, logged), "Means over the seeds, at the highest rate; ± half a 95 % interval."
        ),
        *_loads(chosen, objectives),
        *_curves(drawn, pool_blocks),
        _section("How this was made", f"<pre>{html.escape(json.dumps(provenance.describe(), indent=1))}</pre>"),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>AlignedServe simulation</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _head(provenance: Provenance) -> str:
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in provenance.notes)
    trace, cost = provenance.trace, provenance.cost_model
    mode = f"{cost.get('name')} ({cost.get('kernel_mode')})"
    facts = f"trace {trace.get('source')}, cost model {mode}, commit {provenance.commit}"
    return (
        f"<h1>AlignedServe simulation</h1><pre>{html.escape(provenance.command)}</pre>"
        f"<p>{html.escape(facts)}</p>" + (f"<ul>{notes}</ul>" if notes else "")
    )


def _section(title: str, body: str, text: str = "") -> str:
    explained = f"<p>{html.escape(text)}</p>" if text else ""
    return f"<h2>{html.escape(title)}</h2>{explained}{body}"


def _table(chosen: Mapping[str, Mapping[str, Any]], logged: Mapping[str, Any]) -> str:
    """`logged`: some of the same figures of the cluster whose log was replayed; empty if there is none."""
    columns = {**chosen, "in the log": logged} if logged else chosen
    head = "".join(f"<th>{html.escape(policy)}</th>" for policy in columns)
    rows = []
    for metric, label in _SHOWN.items():
        cells = "".join(f"<td>{in_words(metrics, metric)}</td>" for metrics in columns.values())
        rows.append(f"<tr><td>{html.escape(label)}</td>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _loads(chosen: Mapping[str, Mapping[str, Any]], objectives: Objectives) -> list[str]:
    """Throughput, goodput and attainment by policy and by arrival rate."""
    labels = {"throughput_tokens_per_s": "tokens/s, in and out", "decode_throughput_tokens_per_s": "decode tokens/s"}
    labels["throughput_requests_per_s"] = "requests/s"
    if objectives.any:
        labels["goodput_requests_per_s"] = "goodput, requests/s"
    sections = [_section("Throughput and goodput by policy", plots.bars(chosen, labels))]
    axis = "requests/s offered"

    def against_rate(metric: str) -> dict[str, list[plots.Point]]:
        return {
            policy: [(row["arrival_rate_per_s"], row[metric]) for row in metrics["by_rate"]]
            for policy, metrics in chosen.items()
        }

    wanted = {"TTFT": objectives.ttft_s, "TPOT": objectives.tpot_s}
    asked = [f"{name} within {value:g} s" for name, value in wanted.items() if value is not None]
    if not asked:
        text = "No objective was given; set --slo-ttft and --slo-tpot."
        return [*sections, _section("SLO attainment against rate", "", text)]
    sections.append(
        _section(
            "SLO attainment against rate",
            plots.lines(against_rate("slo_attainment"), axis, "share of requests", 1.05),
            f"Requests with {' and '.join(asked)}; refused requests count as missed.",
        )
    )
    if any(len(metrics["by_rate"]) > 1 for metrics in chosen.values()):
        goodput = plots.lines(against_rate("goodput_requests_per_s"), axis, "goodput, requests/s")
        sections.append(_section("Goodput against rate", goodput))
    return sections


def _curves(drawn: Sequence[Drawn], pool_blocks: int) -> list[str]:
    first = {"ttft": "time to first token", "second_token": "time to second token"}
    passes = {"seconds": "iteration", "bubble": "bubble of an iteration"}
    sections = [
        _section("TTFT (CDF)", plots.cumulative(drawn, first), "From arrival at the scheduler."),
        _section(
            "TPOT in every definition (CDF)",
            plots.cumulative(drawn, plots.TPOT_DEFINITIONS),
            "The wait in the pool falls between the first token and the second.",
        ),
        _section(
            "Iteration time and bubble (CDF)",
            plots.cumulative(drawn, passes),
            "Bubble: the time of an iteration less that of the same bytes at equal lengths.",
        ),
        _section("Batch lengths over time (heat map)", plots.heat_maps(drawn)),
    ]
    pooled = [one for one in drawn if one.pool]
    body = plots.occupancy(pooled, pool_blocks) if pooled else ""
    sections.append(_section("Pool occupancy", body, "" if pooled else "None of these policies has a pool."))
    return sections
