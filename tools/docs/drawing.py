"""Draws diagrams as SVG that uses the site's light or dark colours."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

STYLE = """\
.d { font-family: Roboto, Helvetica, Arial, sans-serif; }
.d text { fill: var(--md-typeset-color, var(--d-ink, #24292f)); font-size: 13px; }
.d .small { font-size: 11.5px; }
.d .large { font-size: 15px; font-weight: 600; }
.d .bold { font-weight: 600; }
.d .frame { fill: none; stroke: var(--md-default-fg-color--light, var(--d-line, #6e7781)); stroke-dasharray: 5 4; }
.d .plain { fill: var(--md-code-bg-color, var(--d-box, #f5f5f5)); }
.d .plain, .d .rule { stroke: var(--md-default-fg-color--light, var(--d-line, #6e7781)); }
.d .blue { fill: #4c8dd6; fill-opacity: .22; stroke: #4c8dd6; }
.d .green { fill: #2f9e6e; fill-opacity: .22; stroke: #2f9e6e; }
.d .amber { fill: #d18f16; fill-opacity: .25; stroke: #d18f16; }
.d .red { fill: #d0524f; fill-opacity: .22; stroke: #d0524f; }
.d .line { fill: none; stroke-width: 1.6; }
.d .thick { stroke-width: 3.2; }
.d .thin { stroke-width: .6; }
.d .dashed { stroke-dasharray: 5 4; }
.d .line.ink { stroke: var(--md-default-fg-color--light, var(--d-line, #6e7781)); }
.d .line.blue, .d .line.green, .d .line.amber, .d .line.red { fill: none; }
.d .badge { fill: #3f51b5; }
.d .badge-text { fill: #fff; font-size: 12px; font-weight: 600; }
@media (prefers-color-scheme: dark) { .d { --d-ink: #e6e6e6; --d-line: #9aa4ae; --d-box: #2b3036; } }"""
INKS = {"ink": "#8a93a0", "blue": "#4c8dd6", "green": "#2f9e6e", "amber": "#d18f16", "red": "#d0524f"}


class Drawing:
    """Elements in drawing order. Lengths are in units of the view box, x to the right, y down."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._width, self._height = width, height
        self._title, self._description = title, description
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, lines: Sequence[str] = (), kind: str = "plain"
    ) -> None:
        """A box with centred text; the first line is bold."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>')
        top = y + height / 2 - 8 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * number, line, "bold" if number == 0 else "small", "middle")

    def frame(
        self, x: float, y: float, width: float, height: float, label: str, at: tuple[float, float] = (12, 20)
    ) -> None:
        """A dashed frame with a label at its upper left corner, or at the offset `at` from there."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" class="frame"/>')
        self.text(x + at[0], y + at[1], label, "large")

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(
        self, points: Sequence[tuple[float, float]], ink: str = "ink", kind: str = "", *, both: bool = False
    ) -> None:
        """A line through the points with an arrowhead at its end, or at both ends."""
        path = " ".join(f"{'L' if number else 'M'}{x:g},{y:g}" for number, (x, y) in enumerate(points))
        start = f' marker-start="url(#d-{ink})"' if both else ""
        self._parts.append(f'<path d="{path}" class="line {ink} {kind}" marker-end="url(#d-{ink})"{start}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line ink") -> None:
        self._parts.append(f'<path d="M{x1:g},{y1:g} L{x2:g},{y2:g}" class="{kind}"/>')

    def dot(self, x: float, y: float, radius: float, kind: str) -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{kind}"/>')

    def badge(self, x: float, y: float, number: int) -> None:
        """A step number in a disc."""
        self.dot(x, y, 10, "badge")
        self._parts.append(f'<text x="{x:g}" y="{y + 4:g}" class="badge-text" text-anchor="middle">{number}</text>')

    def svg(self) -> str:
        heads = "\n".join(
            f'<marker id="d-{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
            f'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            f'<path d="M0,0 L10,5 L0,10 z" fill="{colour}"/></marker>'
            for name, colour in INKS.items()
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="d" role="img" viewBox="0 0 {self._width} {self._height}">'
        )
        words = f"<title>{escape(self._title)}</title>\n<desc>{escape(self._description)}</desc>"
        return "\n".join(
            [head, words, f"<style>\n{STYLE}\n</style>", f"<defs>\n{heads}\n</defs>", *self._parts, "</svg>\n"]
        )
