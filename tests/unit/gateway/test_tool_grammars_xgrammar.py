"""Grammars of tool calls and reasoning with xgrammar: the tests of `test_tool_grammars.py`, and what is translated."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignedserve.errors import GrammarError
from alignedserve.gateway.dialects.composing import AnswerForm, grammar_of
from alignedserve.gateway.dialects.families import REASONING, TOOLS
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.grammar import compiled
from alignedserve.grammar.xgrammar_composed import text_until
from alignedserve.request import GrammarKind, GrammarSpec
from alignedserve.text import Tokenizer
from support.grammars import EOS, VOCAB_SIZE, allows, tiny_grammars, tiny_tokenizer

GRAMMAR, TAG = GrammarKind.GRAMMAR, GrammarKind.STRUCTURAL_TAG


def _shared() -> Any:
    path = Path(__file__).with_name("test_tool_grammars.py")
    spec = importlib.util.spec_from_file_location("shared_tool_grammars", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shared = _shared()


@pytest.fixture(autouse=True)
def with_xgrammar(monkeypatch: pytest.MonkeyPatch) -> None:
    own = compiled.grammar_library

    def library(_: str, tokenizer: Tokenizer, vocab_size: int) -> compiled.GrammarLibrary:
        return own("xgrammar", tokenizer, vocab_size)

    monkeypatch.setattr(compiled, "grammar_library", library)


@pytest.mark.parametrize("special", [True, False])
def test_a_forced_call(special: bool) -> None:
    shared.test_a_forced_call_is_a_call_that_its_schema_allows("hermes", special)


def test_content_calls_and_reasoning() -> None:
    shared.test_an_answer_under_a_grammar_begins_after_the_reasoning("qwen3", True)
    shared.test_reasoning_comes_before_calls_too()
    shared.test_content_of_a_form_or_calls()
    shared.test_the_number_of_calls_of_an_answer_is_bounded()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "special"), shared.both(TOOLS))
def test_every_dialect(name: str, special: bool) -> None:
    shared.test_a_forced_call_is_a_call_that_its_schema_allows(name, special)
    shared.test_with_a_strict_tool_an_answer_is_text_or_calls_that_the_schema_allows(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "special"), shared.both(REASONING))
def test_every_format_of_reasoning(name: str, special: bool) -> None:
    shared.test_an_answer_under_a_grammar_begins_after_the_reasoning(name, special)


@pytest.mark.parametrize("end", ["a", "ab", "aab", "aaa", "abab", "abcabd"])
def test_text_up_to_a_marker_ends_at_the_first_one(end: str) -> None:
    grammars, letters = tiny_grammars("xgrammar"), [*sorted(set(end)), "\n"]
    until, without = (GrammarSpec(GRAMMAR, text_until(end, without=absent)) for absent in (False, True))
    texts = ["".join(text) for size in range(5) for text in itertools.product(letters, repeat=size)][::3]
    for text in [*texts, end, f"{end[:-1]}{end}", f"é{end}", f"{end}\n", f"{end}{end}"]:
        assert allows(grammars, until, text) is (end in text and text.index(end) == len(text) - len(end)), text
        assert allows(grammars, without, text) is (end not in text), text


def test_a_schema_that_xgrammar_does_not_check_is_refused_within_a_call() -> None:
    dialects, known = shared.dialects_of("hermes", "", special=False)
    pair = Tool("f", {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}}}, True)
    grammars = compiled.Grammars.of(known, shared.VOCAB_SIZE)
    assert grammars is not None
    with pytest.raises(GrammarError, match="oneOf at /properties/a: xgrammar cannot follow"):
        grammars.compile(grammar_of(AnswerForm(None, (pair,), True), dialects), (EOS,))


def first_mask(form: dict[str, Any], before: str) -> set[int]:
    """The special tokens that may follow."""
    matcher = tiny_grammars("xgrammar").compile(GrammarSpec(TAG, json.dumps({"format": form})), (EOS,)).matcher()
    matcher.accept(tiny_tokenizer().encode(before, special_tokens=False))
    bits = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)
    tiny_grammars("xgrammar").library.fill([matcher], bits)
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return set(allowed.tolist()) & set(tiny_tokenizer().special_ids)


def test_special_tokens_are_allowed_where_they_are_named_and_nowhere_else() -> None:
    one = {"type": "const_string", "value": "1"}
    tag = {"type": "tag", "begin": "<f>", "content": one, "end": "</f>"}
    assert first_mask({"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}, "hi") == {EOS}
    assert first_mask({"type": "any_text"}, "hi") == {EOS}
    token = {"type": "token", "token": 5}
    assert first_mask({"type": "sequence", "elements": [{"type": "any_text"}, token, one]}, "hi") == {5}
    named = {"type": "tag", "begin": token, "content": one, "end": {"type": "token", "token": 4}}
    assert first_mask(named, "") == {5}
