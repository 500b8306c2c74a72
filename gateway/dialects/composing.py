"""Grammars of whole answers: reasoning, then calls, or content, or either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from alignedserve.gateway.dialects.harmony import ANALYSIS, CHANNEL, END, MESSAGE, START
from alignedserve.gateway.dialects.lark import ANY_TEXT, CallRules, Lark
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.gateway.dialects.model_dialects import ModelDialects
from alignedserve.request import GrammarKind, GrammarSpec

_BREAKS = r"/\n{0,2}/"  # between reasoning and the rest
_FINAL = f"{CHANNEL}final{MESSAGE}"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer must be. `answer`: a grammar of its content; None: any text.

    `tools`: calls are possible, `forced`: it is calls, at most `most`. `begun`: it begins within reasoning.
    """

    answer: GrammarSpec | None = None
    tools: Sequence[Tool] = ()
    forced: bool = False
    most: int | None = None
    begun: bool = False


def grammar_of(form: AnswerForm, dialects: ModelDialects) -> GrammarSpec:
    """Raises GrammarError for a tool whose schema the dialect cannot express."""
    lark = Lark(dialects.special)
    harmony = "harmony" in (
        dialects.reasoning and dialects.reasoning.name, dialects.tools and form.tools and dialects.tools.name
    )  # fmt: skip
    choices = []
    rules = dialects.tools.calls(lark, form.tools) if form.tools and dialects.tools is not None else None
    if rules is not None:
        choices.append(_calls(lark, rules, form.most))
    if not form.forced and form.answer is not None:
        choices.append(f"{lark.literal(_FINAL)} @answer" if harmony else "@answer")
    elif not form.forced:
        choices += _free(lark, rules, form.most, harmony=harmony)
    start = f"{_thought(lark, dialects, form, harmony=harmony)} ({' | '.join(choices)})"
    answer = None if form.answer is None or form.forced else list(form.answer)
    return GrammarSpec(GrammarKind.COMPOSED, orjson.dumps({"lark": lark.text(start), "answer": answer}).decode())


def _calls(lark: Lark, rules: CallRules, most: int | None) -> str:
    trigger = lark.literal(rules.trigger) if rules.trigger else ""
    return f"{trigger} {rules.expression(most)}"


def _free(lark: Lark, rules: CallRules | None, most: int | None, *, harmony: bool) -> list[str]:
    """Any text, and any text before calls."""
    if harmony:
        return [f"{lark.literal(_FINAL)} {lark.rule(ANY_TEXT)}"]
    if rules is None:
        return [lark.rule(ANY_TEXT)]
    if not rules.trigger:
        return [lark.rule(rf"/\s*([^\s{_in_regex(rules.openers)}](?s:.*))?/")]
    if lark.is_special(rules.trigger):
        return [lark.rule(ANY_TEXT), f"{lark.rule(ANY_TEXT)} {lark.literal(rules.trigger)} {rules.expression(most)}"]
    without = lark.terminal(f"{ANY_TEXT} & ~/(?s:.*){_in_regex(rules.trigger)}(?s:.*)/")
    return [without, f"{lark.text_until(rules.trigger)} {rules.expression(most)}"]


def _thought(lark: Lark, dialects: ModelDialects, form: AnswerForm, *, harmony: bool) -> str:
    """Reasoning: it must come to its end if it has begun, and may come otherwise."""
    if harmony:
        thought = f"{lark.text_until(END)} {lark.literal(START)} {lark.literal('assistant')}"
        return thought if form.begun else f"({lark.literal(ANALYSIS)} {thought})?"
    if dialects.reasoning is None:
        return ""
    thought = f"{lark.text_until(dialects.reasoning.close)} {_BREAKS}"
    return thought if form.begun else f"({lark.literal(dialects.reasoning.open)} {thought})?"


def _in_regex(text: str) -> str:
    return "".join(f"\\{character}" if character in r"\/.^$|?*+()[]{}" else character for character in text)
