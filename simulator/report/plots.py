"""The plots of a report, each an SVG element for the page: no scripts, no fonts, no network access."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from alignedserve.errors import ConfigError
from alignedserve.simulator.report.outputs import INSTALL
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.report.summary import Measured
from alignedserve.simulator.report.tokens import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEVELS = np.linspace(0.0, 1.0, 201)
_TIME_BINS, _LENGTH_BINS = 160, 48
_SALT = "alignedserve"

TPOT_DEFINITIONS = {
    "tpot": "mean gap of a request\n(DistServe)",
    "tpot_without_pool_wait": "mean gap of a request,\nwithout pool wait",
    "gap_p99": "P99 gap of a request\n(Apt-Serve)",
    "longest_tenth": "mean of the longest tenth\nof a request's gaps (Mooncake)",
    "gaps": "all gaps, pooled\n(Sarathi-Serve)",
    "seconds": "iterations\n(AlignedServe)",
}
Point = tuple[float | None, float | None]  # None: not known, and not plotted


@dataclass(frozen=True, slots=True)
class Drawn:
    """The data of a run that its curves need. `quantiles`: by name, at 201 levels from 0 to 1.

    `heat`: tokens by length and time; `edges_s`, `edges_tokens`: its bins.
    """

    policy: str
    quantiles: Mapping[str, Floats]
    heat: NDArray[np.float64]
    edges_s: Floats
    edges_tokens: Floats
    pool: tuple[tuple[float, int], ...]
    end_s: float

    @classmethod
    def of(cls, run: RunResult, measured: Measured) -> Drawn:
        tokens, passes = measured.tokens, measured.passes
        columns = {
            name: getattr(tokens, name) for name in ("ttft", "second_token", *TPOT_DEFINITIONS) if name != "seconds"
        }
        columns |= {"seconds": passes.seconds, "bubble": passes.bubble}
        quantiles = {
            name: np.quantile(some, _LEVELS)
            for name, values in columns.items()
            if len(some := values[~np.isnan(values)])
        }
        longest = float(tokens.lengths.max()) if len(tokens.lengths) else 1.0
        edges_s = np.linspace(0.0, max(run.end_s, 1e-9), _TIME_BINS + 1)
        edges_tokens = np.geomspace(8.0, max(longest, 9.0) * 1.01, _LENGTH_BINS + 1)
        heat, _, _ = np.histogram2d(np.maximum(tokens.lengths, 8), tokens.stamps, (edges_tokens, edges_s))
        return cls(run.policy, quantiles, heat, edges_s, edges_tokens, tuple(run.pool_blocks), run.end_s)


def check_matplotlib() -> None:
    """Raises ConfigError that names what to install."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--out needs matplotlib: {INSTALL} ({error})") from error


def bars(groups: Mapping[str, Mapping[str, float | None]], labels: Mapping[str, str]) -> str:
    """A panel for each metric (`labels`: its axis), a bar for each policy. `groups`: policy to metrics."""

    def draw(axes: Axes, metric: str) -> None:
        policies = list(groups)
        values = [groups[policy][metric] for policy in policies]
        colours = [f"C{number % 10}" for number in range(len(policies))]
        places = axes.bar(policies, [value or 0.0 for value in values], color=colours)
        axes.bar_label(places, ["none" if value is None else f"{value:.3g}" for value in values], fontsize=8)
        axes.margins(y=0.12)
        axes.set_ylabel(labels[metric])
        axes.tick_params(axis="x", rotation=30)

    return _panels(list(labels), draw)


def lines(
    series: Mapping[str, Sequence[tuple[float | None, float | None]]],
    xlabel: str,
    ylabel: str,
    top: float | None = None,
) -> str:
    """`series`: policy to points. `top`: upper end of the axis."""

    def draw(axes: Axes, _: str) -> None:
        for number, (policy, points) in enumerate(series.items()):
            known = [(x, y) for x, y in points if x is not None and y is not None]
            axes.plot([x for x, _ in known], [y for _, y in known], marker="o", ls=_dash(number), label=policy)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_ylim(0.0, top)
        axes.legend(fontsize=8, loc="lower left")

    return _panels([ylabel], draw, width=7.0)


def cumulative(drawn: Sequence[Drawn], curves: Mapping[str, str]) -> str:
    """A panel for each curve (name to label), a line for each policy.

    The axis in seconds is logarithmic over decades.
    """

    def draw(axes: Axes, name: str) -> None:
        found = [(one.policy, one.quantiles[name]) for one in drawn if name in one.quantiles]
        for number, (policy, values) in enumerate(found):
            axes.plot(values, _LEVELS, label=policy, linestyle=_dash(number))
        if any(values[20] > 0 and values[-1] > 20 * values[20] for _, values in found):
            axes.set_xscale("log")
        axes.set(title=curves[name], xlabel="seconds", ylabel="share")
        if found:
            axes.legend(fontsize=8, loc="lower right")

    return _panels(list(curves), draw)


def heat_maps(drawn: Sequence[Drawn]) -> str:
    """Decoded tokens by time and prefix length."""
    by_name = {one.policy: one for one in drawn}

    def draw(axes: Axes, policy: str) -> None:
        one = by_name[policy]
        shown = np.ma.masked_equal(one.heat, 0.0)
        mesh = axes.pcolormesh(one.edges_s, one.edges_tokens, shown, rasterized=True, cmap="viridis")
        axes.set_yscale("log")
        axes.set(title=policy, xlabel="seconds", ylabel="prefix, tokens")
        axes.figure.colorbar(mesh, ax=axes, label="tokens decoded")

    return _panels(list(by_name), draw, across=2)


def occupancy(drawn: Sequence[Drawn], capacity_blocks: int) -> str:
    """Blocks of the KV pool in use, over time."""

    def draw(axes: Axes, _: str) -> None:
        for number, one in enumerate(drawn):
            points = [*one.pool, (one.end_s, one.pool[-1][1])]
            seconds, blocks = zip(*points, strict=True)
            axes.step(seconds, blocks, where="post", label=one.policy, linestyle=_dash(number))
        axes.set(xlabel="seconds", ylabel=f"blocks owned, of {capacity_blocks}")
        axes.set_ylim(0.0)
        axes.legend(fontsize=8, loc="upper right")

    return _panels(["pool"], draw, width=7.0)


def _dash(number: int) -> str:
    """Line style that distinguishes overlapping lines."""
    return ("-", "--", "-.", ":")[number % 4]


def _panels(names: Sequence[str], draw: Callable[[Axes, str], None], across: int = 3, width: float = 4.2) -> str:
    """An SVG element with a panel for each name."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(across, max(len(names), 1))
    rows = -(-len(names) // columns)
    with matplotlib.rc_context({"svg.hashsalt": _SALT, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(width * columns, 3.1 * rows), layout="constrained")
        panels = np.atleast_1d(figure.subplots(rows, columns)).ravel()
        for axes, name in zip(panels, names, strict=False):
            axes.grid(alpha=0.3)
            draw(axes, name)
        for axes in panels[len(names) :]:
            axes.set_visible(False)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    """The SVG element without the file header, which does not belong in a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
