"""The plots of docs/results.md: `python tools/docs/plot_results.py` draws docs/images/ from docs/measurements/data/.

Needs matplotlib; one version of it gives the same bytes each time. Text and axes take the colours of the page.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[2] / "docs"
MIXES = [f"{share} % short" for share in (70, 75, 80, 85, 90, 95)]
OPT, LLAMA = "OPT-13B, A100", "Llama-3.1-8B, RTX PRO 6000"
TWO, WORTH_IT = ("aligned", "fcfs"), "2026-11-22-worth-it-rtxpro6000.csv"
# Colourblind-safe, legible on white and on dark. `fcfs` has open markers: `aligned` often lies on it.
STYLES: dict[str, dict[str, Any]] = {
    "fcfs": {"color": "#d55e00", "marker": "s", "ls": "--", "fillstyle": "none", "ms": 10},
    "aligned": {"color": "#2f86cc", "marker": "o", "ls": "-"},
    "fcfs + 10 ms": {"color": "#cc79a7", "marker": "D", "ls": ":"},
    "vllm": {"color": "#009e73", "marker": "^", "ls": "-."},
    "fastgen": {"color": "#b8860b", "marker": "v", "ls": (0, (5, 1, 1, 1, 1, 1))},
    "aligned, overdue": {"color": "#2f86cc", "marker": "o", "ls": "-"},
    "aligned, paper": {"color": "#cc79a7", "marker": "D", "ls": ":"},
    "aligned, rounds": {"color": "#009e73", "marker": "^", "ls": "-."},
}
WITH_OTHERS = ("fcfs", "aligned", "fcfs + 10 ms", "vllm", "fastgen")
RULES = ("fcfs", "aligned, overdue", "aligned, paper", "aligned, rounds")
SWEEP = "load-sweep*.csv"  # of benchmarks/paper/load_sweep.py, one or more
# The panels of the plots over load: title, then values of the file's columns
PANELS = (
    ("OPT-13B, A100, 95 % short, one decode instance", "a100-opt-13b", "95 % short", "2:1"),
    ("OPT-13B, A100, 80 % short, one decode instance", "a100-opt-13b", "80 % short", "2:1"),
)
PLACES = {"closed": (1.4, "closed\nloop"), "at-once": (1.5, "all at\nonce")}  # on the axis of loads
INK, LINE = "#24292f", "#6e7781"  # as in drawing.py; replaced by the page's colours
DARK = "@media (prefers-color-scheme: dark) { .d { --d-ink: #e6e6e6; --d-line: #9aa4ae; } }"
SETTINGS: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), LINE),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.titlesize", "font.size"), 11),
    "grid.alpha": 0.3,
    "svg.fonttype": "none",
}
Row = dict[str, str]


def rows(name: str, **wanted: str) -> list[Row]:
    """Rows of a CSV file with these values."""
    with (DOCS / "measurements/data" / name).open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]


def worth_it(topology: str, load: str, metric: str) -> list[Row]:
    """Rows for the RTX PRO 6000 with `split_kv`, one per mix."""
    found = rows(WORTH_IT, kernel_mode="split_kv", topology=topology, load=load, metric=metric)
    return [row for row in found if row["workload"] in MIXES]


def line(axes: Axes, found: Sequence[Row], policy: str, column: str, scale: float = 1.0, label: str = "") -> None:
    """One point per mix, with half the 95 % confidence interval."""
    shares = [float(row["workload"].split()[0]) for row in found]
    values, halves = ([scale * float(row[name]) for row in found] for name in (column, f"{column} ±"))
    axes.errorbar(shares, values, halves, capsize=3, label=label or policy, **STYLES[policy])
    axes.set_xlabel("short requests in the mix, %")


def pairs(axes: Axes, groups: Sequence[str], values: Mapping[str, Sequence[float]]) -> None:
    """A bar for `aligned` and one for `fcfs` in each group, with their values."""
    for shift, policy in zip((-0.2, 0.2), TWO, strict=True):
        places = [number + shift for number in range(len(groups))]
        look = {"color": STYLES[policy]["color"], "edgecolor": "#ffffff", "hatch": "////" if policy == "fcfs" else ""}
        drawn = axes.bar(places, values[policy], 0.38, label=policy, **look)
        axes.bar_label(drawn, [f"{value:g}" for value in values[policy]], padding=2, fontsize=9)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")
    axes.legend(loc="upper right")


def gain(left: Axes, right: Axes) -> None:
    """Decode throughput of aligned over fcfs, one decode instance, all requests at time zero"""
    labels = {"5": "5 s (default)", "3600": "1 hour: no request is overdue"}
    for axes, machine, instances in ((left, OPT, "2:1"), (right, LLAMA, "4:1")):
        for threshold, style in (("5", "fcfs"), ("3600", "aligned")):
            found, column = rows("threshold.csv", machine=machine, starvation_after_s=threshold), "aligned_over_fcfs"
            if machine == LLAMA and threshold == "5":
                found, column = worth_it("decode-bound", "0", "aligned_over"), "fcfs"
            line(axes, [row for row in found if row["workload"] in MIXES], style, column, label=labels[threshold])
        axes.axhline(1.0, color=LINE, linewidth=1)
        axes.set(title=f"{machine}, {instances}", ylim=(0.93, 1.2), ylabel="aligned / fcfs")
    left.legend(title="starvation threshold", loc="upper left")


def bubble(left: Axes, right: Axes) -> None:
    """Bubble share, one decode instance, all requests at time zero, starvation threshold of 1 hour"""
    for axes, machine in ((left, OPT), (right, LLAMA)):
        found = rows("threshold.csv", machine=machine, starvation_after_s="3600")
        values = {one: [round(100 * float(row[f"{one} bubble_share"]), 1) for row in found] for one in TWO}
        pairs(axes, [row["workload"].replace(" short", "\nshort").replace(", ", ",\n") for row in found], values)
        axes.set(title=machine, ylim=(0, 15.5), ylabel="bubble, % of the iterations' time")


def throughput(left: Axes, right: Axes) -> None:
    """Decode throughput of all policies, Llama-3.1-8B on RTX PRO 6000, all requests at time zero"""
    for axes, topology, instances in ((left, "balanced", "1 + 1"), (right, "decode-bound", "4 + 1")):
        for policy in WITH_OTHERS:
            line(axes, worth_it(topology, "0", "decode_throughput_tokens_per_s"), policy, policy, 1e-3)
        axes.set(title=f"{topology}: {instances} instances", ylim=(0, 13.7), ylabel="1,000 tokens/s")
    left.legend(loc="upper left")


def latency(left: Axes, right: Axes) -> None:
    """P99 time per output token (TPOT) near capacity"""
    found = rows("several-decode-instances.csv")
    values = {one: [round(1e3 * float(row["tpot_p99_s"])) for row in found if row["policy"] == one] for one in TWO}
    labels = [
        f"{row['machine'].split(', ')[0]}\n{row['requests_per_s']} requests/s\n({row['instances']})" for row in found
    ]
    pairs(left, labels[::2], values)
    left.set(title="four decode instances, 95 % short", ylim=(0, 235), ylabel="P99 TPOT, ms")
    for policy in WITH_OTHERS:
        line(right, worth_it("balanced", "0.9", "tpot_p99_s"), policy, policy, 1e3)
    right.set(title="Llama-3.1-8B, RTX PRO 6000, 1:1, 0.9 of capacity", ylim=(0, 85), ylabel="P99 TPOT, ms")
    right.legend(loc="upper center", ncols=3)


def sweep(panel: Sequence[str], policy: str) -> list[Row]:
    """Rows of the sweep in a panel, in order of load."""
    wanted = dict(zip(("machine", "workload", "instances"), panel[1:], strict=True))
    files = sorted((DOCS / "measurements/data").glob(SWEEP))
    found = [row for file in files for row in rows(file.name, policy=policy, kernel_mode="split_kv", **wanted)]
    return sorted(found, key=lambda row: place_of(row["load"]))


def place_of(load: str) -> float:
    return PLACES[load][0] if load in PLACES else float(load)


def over_load(left: Axes, right: Axes, metric: str, label: str, scale: float = 1.0, yscale: str = "linear") -> None:
    """A line with a 95 % confidence band for `fcfs` and each rule, and a point for other arrivals."""
    for axes, panel in ((left, PANELS[0]), (right, PANELS[1])):
        seen: list[float] = []
        for policy in RULES:
            found = [row for row in sweep(panel, policy) if row[metric]]
            places = [place_of(row["load"]) for row in found]
            values, halves = ([scale * float(row[key] or 0) for row in found] for key in (metric, f"{metric} ±"))
            seen += values
            shares = sum(row["load"] not in PLACES for row in found)
            lows, highs = ([v + sign * h for v, h in zip(values, halves, strict=True)] for sign in (-1, 1))
            band = {"color": STYLES[policy]["color"], "alpha": 0.15, "linewidth": 0}
            axes.plot(places[:shares], values[:shares], label=policy, **STYLES[policy])
            axes.fill_between(places[:shares], lows[:shares], highs[:shares], **band)
            beside = {**STYLES[policy], "ls": "none", "capsize": 3}
            axes.errorbar(places[shares:], values[shares:], halves[shares:], **beside)
        axes.set(title=panel[0], xlabel="load, share of capacity", ylabel=label, yscale=yscale if seen else "linear")
        if seen:  # a wide band is cut, so that the lines remain legible
            axes.set_ylim(0.6 * min(seen), 1.6 * max(seen) if yscale == "log" else 1.1 * max(seen))
        ticks = [0.8, 0.9, 1.0, 1.1, 1.2, 1.3]
        axes.set_xticks([*ticks, *(place for place, _ in PLACES.values())])
        axes.set_xticklabels([*(f"{tick:g}" for tick in ticks), *(name for _, name in PLACES.values())])
    left.legend(loc="upper left")


def load_throughput(left: Axes, right: Axes) -> None:
    """Decode throughput over load"""
    over_load(left, right, "decode_throughput_tokens_per_s", "tokens/s")


def load_tpot(left: Axes, right: Axes) -> None:
    """P99 time per output token (TPOT) over load"""
    over_load(left, right, "tpot_p99_s", "P99 TPOT, ms", 1e3, yscale="log")


def load_second_token(left: Axes, right: Axes) -> None:
    """P99 time to second token over load"""
    over_load(left, right, "second_token_p99_s", "P99 time to second token, s", yscale="log")


def trade(left: Axes, right: Axes) -> None:
    """Decode throughput and longest wait of each rule over fcfs, at capacity and more"""
    for axes, panel in ((left, PANELS[0]), (right, PANELS[1])):
        for policy in RULES[1:]:
            found = [row for row in sweep(panel, policy) if place_of(row["load"]) >= 1]
            columns = "pool_wait_max_s / fcfs", "decode_throughput_tokens_per_s / fcfs"
            waits, gains = ([float(row[column]) for row in found] for column in columns)
            axes.plot(waits, gains, label=policy, **{**STYLES[policy], "ls": "none"})
        axes.axhline(1.0, color=LINE, linewidth=1)
        axes.axvline(1.0, color=LINE, linewidth=1)
        axes.set(title=panel[0], xlabel="longest wait / fcfs", ylabel="decode throughput / fcfs")
    left.legend(loc="upper left")


OVER_LOAD = (load_throughput, load_tpot, load_second_token, trade)
PLOTS = {f"plot-{draw.__name__.replace('_', '-')}": draw for draw in (gain, bubble, throughput, latency, *OVER_LOAD)}


def svg(name: str) -> str:
    return drawn(name, PLOTS[name])


def drawn(name: str, draw: Callable[[Axes, Axes], None]) -> str:
    """The SVG that `draw` makes of two panels; its docstring is the title."""
    title = str(draw.__doc__)
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        figure.suptitle(title, fontsize=13)
        draw(*figure.subplots(1, 2))
        to = io.StringIO()
        figure.savefig(to, format="svg", transparent=True)
    text = to.getvalue().replace(INK, f"var(--md-typeset-color, var(--d-ink, {INK}))")
    text = text.replace(LINE, f"var(--md-default-fg-color--light, var(--d-line, {LINE}))")
    text = re.sub(r"<(metadata|style).*?</\1>", "", text, flags=re.DOTALL)  # the style would apply to all of a page
    used = set(re.findall(r'#([\w-]+)["\)]', text))
    text = re.sub(r' id="([\w-]+)"', lambda match: match[0] if match[1] in used else "", text)
    text = re.sub(r"font-family: [^;]+", "font-family: Roboto, Helvetica, Arial, sans-serif", text)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)
    text = re.sub(r"\s*\n\s*", "\n", re.sub(r" *\n(?=[LMCz\"])", " ", text))
    head = f'<svg class="d" role="img" \\1>\n<title>{title}</title>\n<style>{DARK}</style>'
    return re.sub(r".*?<svg ([^>]*)>", head, text, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    measured = any((DOCS / "measurements/data").glob(SWEEP))
    for name in [name for name, draw in PLOTS.items() if measured or draw not in OVER_LOAD]:
        (DOCS / f"images/{name}.svg").write_text(svg(name), encoding="utf-8")
