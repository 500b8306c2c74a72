"""Builds pieces of Markdown for the generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTICE = "<!-- Generated from the code by tools/docs/ when the site is built. -->"


def cell(text: str) -> str:
    """Text escaped for a table cell. A bar within `code` is not a border."""
    parts = text.replace("\n", " ").split("`")
    parts[::2] = [part.replace("|", "\\|") for part in parts[::2]]
    return "`".join(parts)


def plain(text: str) -> str:
    """Text from the code, with `*`, `_` and `<` escaped outside of `code`."""
    parts = text.split("`")
    outside = [part.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_") for part in parts[::2]]
    inside = [f"`{part}`" for part in parts[1::2]]
    return "".join(part for pair in zip(outside, [*inside, ""], strict=False) for part in pair)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table without its empty columns, followed by an empty line."""
    rows = [tuple(row) for row in rows]
    used = [number for number in range(len(head)) if any(row[number] for row in rows)]
    head, rows = [head[number] for number in used], [tuple(row[number] for number in used) for row in rows]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return [*lines, ""]
