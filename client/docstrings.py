"""Descriptions of a function and its parameters from its docstring, in Google's, NumPy's or Sphinx's style."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_PARAMETERS = ("args", "arguments", "parameters", "params", "keyword args", "keyword arguments", "other parameters")
_OTHERS = "attributes example examples note notes raises references return returns see also todo warning warnings warns"
_SECTIONS = (*_PARAMETERS, *_OTHERS.replace("see also", "see_also").replace("_", " ").split(), "see also", "yields")
_FIELD = re.compile(r":(?P<kind>\w+)(?:\s+(?P<words>[^:]*))?:\s*(?P<text>.*)")
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\([^)]*(?:\([^)]*\)[^)]*)*\))?\s*:\s*(?P<text>.*)")
_NUMPY_ENTRY = re.compile(r"(?P<names>\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?")


@dataclass(slots=True)
class Docstring:
    """`summary`: the text before the first section. `parameters`: the description of each parameter that has one."""

    summary: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def parse_docstring(text: str | None) -> Docstring:
    """Never fails: what is in no known style is part of the summary."""
    lines = inspect.cleandoc(text or "").splitlines()
    found = Docstring()
    end = next((number for number in range(len(lines)) if _begins(lines, number)), len(lines))
    found.summary = _joined(lines[:end])
    number = end
    while number < len(lines):
        number = _section(lines, number, found.parameters)
    return found


def _begins(lines: Sequence[str], number: int) -> bool:
    """Whether a section, or a field of Sphinx's style, begins at this line."""
    line = lines[number]
    if _FIELD.match(line) or (line.endswith(":") and line[:-1].lower() in _SECTIONS):
        return True
    return line.lower() in _SECTIONS and _underlined(lines, number)


def _underlined(lines: Sequence[str], number: int) -> bool:
    return number + 1 < len(lines) and re.fullmatch("-{3,}", lines[number + 1].strip()) is not None


def _section(lines: Sequence[str], begin: int, parameters: dict[str, str]) -> int:
    """Reads a section. Returns the number of the line after it."""
    end = next((number for number in range(begin + 1, len(lines)) if _begins(lines, number)), len(lines))
    if match := _FIELD.match(lines[begin]):
        words = (match["words"] or "").split()
        if match["kind"] in ("param", "parameter", "arg", "argument", "keyword", "key") and words:
            parameters[words[-1].lstrip("*")] = _joined([match["text"], *lines[begin + 1 : end]])
    elif lines[begin].rstrip(":").lower() in _PARAMETERS:
        numpy = _underlined(lines, begin)
        entry = _NUMPY_ENTRY if numpy else _GOOGLE_ENTRY
        _entries(lines[begin + (2 if numpy else 1) : end], entry, parameters)
    return end


def _entries(lines: Sequence[str], entry: re.Pattern[str], parameters: dict[str, str]) -> None:
    """Entries begin at the first one's indentation; lines further in go on with the last one."""
    body = [line for line in lines if line.strip()]
    if not body:
        return
    depth = len(body[0]) - len(body[0].lstrip())
    names: list[str] = []
    texts: list[str] = []
    for line in [*lines, " " * depth + "\0"]:  # the last line ends the last entry
        indented = len(line) - len(line.lstrip())
        if not line.strip() or indented > depth:
            texts.append(line)
            continue
        for name in names:
            if described := _joined(texts):
                parameters[name] = described
        match = entry.fullmatch(line.strip())
        if match is None or indented < depth:
            names = []
        elif entry is _GOOGLE_ENTRY:
            names, texts = [match["name"]], [match["text"]]
        else:
            names, texts = [name.strip().lstrip("*") for name in match["names"].split(",")], []


def _joined(lines: Sequence[str]) -> str:
    """Paragraphs, each on one line."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line.strip())
        elif paragraphs[-1]:
            paragraphs.append([])
    return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs if paragraph)
