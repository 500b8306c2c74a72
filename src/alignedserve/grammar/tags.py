"""Structural tags as clients write them: text in which some parts follow a grammar. Both forms become one.

The older form is `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, the newer one, of xgrammar,
`{"type": "structural_tag", "format": {"type": ..., ...}}`.
"""

from __future__ import annotations

from typing import Any

from alignedserve.errors import GrammarError
from alignedserve.grammar.schema import parsed_schema
from alignedserve.request import GrammarSpec

Format = dict[str, Any]

_OLDER = '{"structures": [{"begin": …, "schema": …, "end": …}], "triggers": [the beginnings of "begin"]}'
_NEWER = '{"type": "structural_tag", "format": {"type": …}}'


def format_of(spec: GrammarSpec) -> Format:
    """The newer form's `format`. Raises GrammarError if the spec is of neither form."""
    tag = parsed_schema(spec.text, spec.kind)
    if not isinstance(tag, dict):
        raise GrammarError(f"structural_tag: must be {_NEWER} or {_OLDER}")
    newer = tag.get("format")
    if isinstance(newer, dict):
        return newer
    structures, triggers = tag.get("structures"), tag.get("triggers")
    texts = isinstance(triggers, list) and all(isinstance(trigger, str) and trigger for trigger in triggers)
    if not structures or not triggers or not texts or not isinstance(structures, list):
        raise GrammarError(f"structural_tag: must be {_NEWER} or {_OLDER}")
    tags = []
    for place, one in enumerate(structures):
        known = isinstance(one, dict) and isinstance(one.get("begin"), str) and isinstance(one.get("end"), str)
        if not known:
            raise GrammarError(f"structural_tag: /structures/{place} must have the texts begin and end, and a schema")
        content = {"type": "json_schema", "json_schema": one.get("schema", {})}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def texts_of(node: Format, key: str, place: str, *, empty: bool = False) -> list[str]:
    """A list of strings, or one. Raises GrammarError."""
    value = node.get(key)
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise GrammarError(f"structural_tag: {place}/{key} must be a text, or a list of texts")
    if not empty and "" in found:
        raise GrammarError(f"structural_tag: {place}/{key} must not be empty")
    return found


def nodes_of(node: Format, key: str, place: str) -> list[tuple[str, Any]]:
    """A list of formats, not empty, each with its place. Raises GrammarError."""
    found = node.get(key)
    if not isinstance(found, list) or not found:
        raise GrammarError(f"structural_tag: {place}/{key} must be a list of formats, not empty")
    return [(f"{place}/{key}/{index}", child) for index, child in enumerate(found)]


def check_triggers(node: Format, place: str) -> dict[str, list[tuple[str, Format]]]:
    """Each trigger's tags, of `triggered_tags`. Raises GrammarError unless each tag begins with exactly one of them."""
    triggers = texts_of(node, "triggers", place)
    for one in triggers:
        if any(one != other and one in other for other in triggers):
            raise GrammarError(f"structural_tag: {place}/triggers: {one!r} is part of another trigger")
    found: dict[str, list[tuple[str, Format]]] = {trigger: [] for trigger in triggers}
    for where, tag in nodes_of(node, "tags", place):
        begin = tag.get("begin") if isinstance(tag, dict) else None
        matching = [trigger for trigger in found if isinstance(begin, str) and begin.startswith(trigger)]
        if len(matching) != 1:
            raise GrammarError(f"structural_tag: {where}/begin must begin with exactly one of the triggers")
        found[matching[0]].append((where, tag))
    return found
