"""The plots of docs/measurements/paper-figures.md: `python tools/docs/plot_paper.py` draws docs/images/.

It reads docs/measurements/data/paper-figure-NN.csv, which the scripts of benchmarks/paper write; intervals are there.
What the paper's text states is drawn as stars. Needs matplotlib, as plot_results.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plot_results
from matplotlib.axes import Axes
from plot_results import INK, LINE, LLAMA, OPT, STYLES, Row, drawn

MACHINES = {"a100-opt-13b": OPT, "rtxpro6000-llama-3.1-8b": LLAMA}
A100, RTX = MACHINES
OTHERS = ("fcfs", "fcfs + 10 ms", "vllm", "fastgen")
SYSTEMS = ("fcfs", "aligned", "vllm", "fastgen")
APPLICATIONS = {
    "ShareGPT-8k": "ShareGPT-8k",
    "arXiv summarization": "arXiv",
    "Azure code": "Azure\ncode",
    "Azure conversation": "Azure\nconversation",
    "Mooncake": "Mooncake",
}
TICKS = (0.7, 1, 1.5, 2, 3, 5, 10)  # of logarithmic gains
STAR: dict[str, Any] = {"marker": "*", "ms": 15, "ls": "none"}
STATED = "stated in the paper"
FILE = "paper-figure-{}.csv"


def ours(figure: str, **wanted: str) -> list[Row]:
    """Rows of our values with these values of columns. Raises ValueError if there is none."""
    return _rows(figure, is_stated=False, wanted=wanted)


def stated(figure: str, **wanted: str) -> list[Row]:
    """As `ours`, of what the paper's text states."""
    return _rows(figure, is_stated=True, wanted=wanted)


def _rows(figure: str, *, is_stated: bool, wanted: Mapping[str, str]) -> list[Row]:
    name = FILE.format(figure)
    found = [row for row in plot_results.rows(name, **wanted) if bool(row["stated"]) is is_stated]
    if not found:
        raise ValueError(f"{name} has no row {wanted}: run the figure's script with --csv, then this one")
    return found


def values(found: Sequence[Row]) -> list[float]:
    return [float(row["value"]) for row in found]


def line(axes: Axes, places: Sequence[float], found: Sequence[Row], label: str, style: str) -> None:
    axes.plot(places, values(found), label=label, **STYLES[style])


def bars(axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[Row]], looks: Mapping[str, str]) -> None:
    """A bar of each series in each group; `looks`: their colours."""
    width = 0.8 / len(series)
    for number, (label, found) in enumerate(series.items()):
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(places, values(found), 0.92 * width, label=label, color=looks[label])
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")


def one_is_equal(axes: Axes) -> None:
    axes.axhline(1.0, color=LINE, linewidth=1)


def figure_01(left: Axes, right: Axes) -> None:
    """Figure 1: iteration latency of 64 requests, of which a few have 4,096 tokens"""
    for axes, machine in ((left, A100), (right, RTX)):
        found = ours("01", machine=machine, kernel_mode="split_kv")
        for batch, style in zip(dict.fromkeys(row["system"] for row in found), SYSTEMS, strict=True):
            of = [row for row in found if row["system"] == batch]
            line(axes, [float(row["x"]) for row in of], of, batch, style)
        axes.axvline(600, color=LINE, linewidth=1, ls=":")
        axes.set(title=MACHINES[machine], xlabel="generated tokens", ylabel="ms", ylim=(0, None))
    left.legend(title="short + long", loc="lower right", ncols=2)


def figure_03(left: Axes, right: Axes) -> None:
    """Figure 3: mean TPOT of batches of equal lengths, and of one of 64 different lengths"""
    for axes, machine in ((left, A100), (right, RTX)):
        found = [row for row in ours("03", machine=machine, kernel_mode="split_kv", system="aligned") if row["x"]]
        axes.plot([float(row["x"]) for row in found], values(found), label="aligned", color=STYLES["aligned"]["color"])
        for system, style in (("aligned, mean of all batches", "vllm"), ("mixed", "fcfs")):
            (row,) = ours("03", machine=machine, kernel_mode="split_kv", system=system)
            look = {"color": STYLES[style]["color"], "ls": STYLES[style]["ls"]}
            axes.axhline(float(row["value"]), label=f"{system}: {float(row['value']):.3g} ms", **look)
        axes.set(title=MACHINES[machine], xlabel="prompt tokens", ylabel="ms", ylim=(0, None))
        axes.legend(loc="lower right")


def gains_on_mixes(axes: Axes, figure: str, machine: str) -> None:
    """How many times better `aligned` is than each other system, by the share of short requests."""
    for other in OTHERS:
        found = ours(figure, machine=machine, topology="1:1", load="at-once", system=other, quantity="gain")
        line(axes, [float(row["workload"].split()[0]) for row in found], found, f"over {other}", other)
    one_is_equal(axes)
    axes.set(title=MACHINES[machine], xlabel="short requests in the mix, %")


def figure_07(left: Axes, right: Axes) -> None:
    """Figure 7: decode throughput of aligned over each other system, all at time zero"""
    for axes, machine in ((left, A100), (right, RTX)):
        gains_on_mixes(axes, "07", machine)
        for other in OTHERS[1:]:  # DistServe is `fcfs + 10 ms`
            (row,) = stated("07", system=other)
            share = float(row["workload"].split()[0])
            label = f"{STATED}, OPT-2.7B" if other == "vllm" else None
            axes.plot([share + 0.6], values([row]), label=label, color=STYLES[other]["color"], **STAR)
        axes.set(ylim=(0.7, 1.95), ylabel="aligned / other")
    left.legend(loc="upper left", ncols=2)


def figure_09(left: Axes, right: Axes) -> None:
    """Figure 9: P99 TPOT over iterations of each other system over that of aligned, all at time zero"""
    ends = values([*stated("09", quantity="least gain"), *stated("09", quantity="largest gain")])
    for axes, machine in ((left, A100), (right, RTX)):
        gains_on_mixes(axes, "09", machine)
        axes.axhspan(*ends, color=LINE, alpha=0.15, linewidth=0, label=f"{STATED}, all models")
        axes.set(yscale="log", ylim=(0.7, 12), ylabel="other / aligned")
        axes.set_yticks(TICKS, map(str, TICKS))
    left.legend(loc="upper left", ncols=2)


def gains_on_applications(axes: Axes, figure: str) -> list[str]:
    """As `gains_on_mixes`, as bars. Returns the workloads."""
    wanted = {"machine": RTX, "topology": "balanced", "load": "at-once", "quantity": "gain"}
    series = {f"over {other}": ours(figure, **wanted, system=other) for other in OTHERS}
    names = [row["workload"] for row in next(iter(series.values()))]
    looks = {f"over {other}": STYLES[other]["color"] for other in OTHERS}
    bars(axes, [APPLICATIONS[name] for name in names], series, looks)
    one_is_equal(axes)
    return names


def figure_08_10(left: Axes, right: Axes) -> None:
    """Figures 8 and 10: applications, Llama-3.1-8B on RTX PRO 6000, all at time zero"""
    names = gains_on_applications(left, "08")
    known = [row for row in stated("08") if row["workload"] in names]
    places = [names.index(row["workload"]) for row in known]
    left.plot(places, values(known), label=STATED, color=INK, **STAR)
    left.set(title="decode throughput", ylim=(0, 2.9), ylabel="aligned / other")
    left.legend(loc="upper left", ncols=2)
    gains_on_applications(right, "10")
    right.set(title="P99 TPOT over iterations", yscale="log", ylim=(0.7, 12), ylabel="other / aligned")
    right.set_yticks(TICKS, map(str, TICKS))


def distributions(axes: Axes, figure: str, quantity: str, **wanted: str) -> None:
    """The quantiles of each system as a distribution in percent."""
    found = ours(figure, quantity=quantity, **wanted)
    for system, style in zip(dict.fromkeys(row["system"] for row in found), ("aligned", "fcfs", "vllm"), strict=False):
        of = [row for row in found if row["system"] == system]
        axes.plot(values(of), [100 * float(row["x"]) for row in of], label=system, **STYLES[style])
    axes.set(title=wanted["workload"], ylim=(0, 105), ylabel="iterations, %")


def figure_11(left: Axes, right: Axes) -> None:
    """Figure 11: time to schedule an iteration: ours the decision alone, the paper's the whole gap"""
    for axes, workload in ((left, "ShareGPT-8k"), (right, "arXiv summarization")):
        distributions(axes, "11", "decision", workload=workload)
        for row in stated("11"):
            look = {**STAR, "color": STYLES[row["system"]]["color"]}
            name = "more than" if row["system"] == "aligned" else "DistServe: less than"
            axes.plot([float(row["x"])], [100 * float(row["value"])], label=f"{STATED}, {name}", **look)
        axes.set(xscale="log", xlabel="ms")
    left.legend(loc="lower right")


def figure_12(left: Axes, right: Axes) -> None:
    """Figure 12: mean forward latency against the length of the long requests, OPT-13B on an A100"""
    for axes, reading in ((left, "95 % long, as printed"), (right, "95 % short")):
        for system in SYSTEMS:
            found = ours("12", machine=A100, workload=reading, system=system)
            line(axes, [float(row["x"]) for row in found], found, system, system)
        axes.set(title=reading, xlabel="tokens of the long requests", ylabel="ms", ylim=(0, None))
    left.legend(loc="lower right", ncols=2)


def figure_13(left: Axes, right: Axes) -> None:
    """Figure 13: distribution of the forward time, OPT-13B on an A100, all at time zero"""
    for axes, workload in ((left, "ShareGPT-8k"), (right, "arXiv summarization")):
        of = {"machine": A100, "kernel_mode": "split_kv", "load": "at-once", "workload": workload}
        distributions(axes, "13", "forward", **of)
        for row in stated("13"):
            name = "more than" if row["system"] == "aligned" else "less than"
            look = {**STAR, "color": STYLES[row["system"]]["color"]}
            axes.plot([30], [100 * float(row["value"])], label=f"paper: {name}", **look)
        scaled = next(row["x"] for row in ours("13", quantity="share within", **of) if "bandwidth" in row["x"])
        axes.axvline(float(scaled.split()[0]), color=LINE, linewidth=1, ls=":", label="30 ms by bandwidth")
        axes.set(xlabel="ms", xlim=(0, None))
    left.legend(loc="center left", fontsize=9)


def figure_14(left: Axes, right: Axes) -> None:
    """Figure 14: throughput lost without prefetching and alignment (Azure code); switch iterations"""
    looks = {STATED: LINE, OPT: STYLES["aligned"]["color"], LLAMA: STYLES["fcfs"]["color"]}
    for axes, quantity, key in ((left, "throughput lost", "system"), (right, "switch iterations", "workload")):
        paper = stated("14", quantity=quantity)
        names = [row[key] for row in paper]
        series = {STATED: paper}
        for machine, label in MACHINES.items():
            found = {row[key]: row for row in ours("14", machine=machine, quantity=quantity)}
            series[label] = [found[name] for name in names]
        shown = {label: [in_percent(row) for row in found] for label, found in series.items()}
        bars(axes, [name.replace(" as well: ", "\nas well: ") for name in names], shown, looks)
        axes.set(title=quantity, ylabel="%")
        axes.axhline(0, color=LINE, linewidth=1)
    left.set_ylim(-12, 40)
    right.set_ylim(0, 100)
    left.legend(loc="upper left")


def in_percent(row: Row) -> Row:
    return {**row, "value": f"{100 * float(row['value'])}"}


def figure_15(left: Axes, right: Axes) -> None:
    """Figure 15: time to second token, Llama-3.1-8B on RTX PRO 6000: mean (lines) and largest (open)"""
    for axes, workload in ((left, "ShareGPT-8k"), (right, "arXiv summarization")):
        disabled = stated("15", workload=workload)[0]["system"]
        for system, style in ((disabled, "vllm"), ("aligned", "aligned"), ("fcfs", "fcfs")):
            found = ours("15", machine=RTX, workload=workload, system=system)
            mean, most = ([row for row in found if row["quantity"] == quantity] for quantity in ("mean", "largest"))
            places = range(len(mean))
            axes.plot(places, values(mean), label=system, **STYLES[style])
            axes.plot(places, values(most), **{**STYLES[style], "ls": "none", "fillstyle": "none"})
        known = stated("15", workload=workload)
        for row in known:
            label = f"{STATED}, at a rate that it does not state" if row is known[0] else None
            axes.axhline(float(row["value"]), color=LINE, ls=":", linewidth=1)
            axes.plot([0], values([row]), label=label, color=INK, **STAR)
        axes.set_xticks(places, [row["load"].replace("at-once", "all at once") for row in mean])
        axes.set(title=workload, xlabel="load, share of capacity", ylabel="s", yscale="log", ylim=(0.1, 5000))
    left.legend(loc="upper left", fontsize=9)


FIGURES: tuple[Callable[[Axes, Axes], None], ...] = (
    *(figure_01, figure_03, figure_07, figure_08_10, figure_09),
    *(figure_11, figure_12, figure_13, figure_14, figure_15),
)
PLOTS = {f"paper-{draw.__name__.replace('_', '-')}": draw for draw in FIGURES}


def svg(name: str) -> str:
    return drawn(name, PLOTS[name])


if __name__ == "__main__":
    for name in PLOTS:
        (plot_results.DOCS / f"images/{name}.svg").write_text(svg(name), encoding="utf-8")
