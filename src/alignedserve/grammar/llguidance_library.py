"""Grammars of llguidance: JSON schema, regular expressions, choices, Lark and GBNF grammars, structural tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, cast

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from alignedserve.errors import GrammarError
from alignedserve.grammar import schema as rules
from alignedserve.grammar.base import Bits, Grammar, GrammarLibrary, Matcher, require_pieces
from alignedserve.grammar.client_grammars import lark_of
from alignedserve.grammar.llguidance_errors import of_pattern, of_schema, one_line
from alignedserve.grammar.llguidance_schema import json_text
from alignedserve.grammar.llguidance_tags import LarkText, tags_grammar
from alignedserve.request import GrammarKind, GrammarSpec
from alignedserve.text import Tokenizer

_LIMITS = llguidance.LLParserLimits(verbose_errors=False)  # the library's own, of each compilation and of each mask


class LlguidanceMatcher(Matcher):
    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self.inner = inner

    def accept(self, token_ids: Sequence[int]) -> None:
        if not self.inner.consume_tokens(list(token_ids)):
            raise GrammarError(f"the answer left its grammar: {one_line(self.inner.get_error())}")


class LlguidanceGrammar(Grammar):
    def __init__(self, first: llguidance.LLMatcher) -> None:
        self._first = first  # never moved on

    def matcher(self) -> Matcher:
        return LlguidanceMatcher(self._first.deep_copy())


class LlguidanceLibrary(GrammarLibrary):
    """`vocab_size`: columns of the logits, which may be more than the tokenizer has tokens. `threads`: of `fill`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, threads: int = 1) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokenizers: dict[tuple[int, ...], llguidance.LLTokenizer] = {}
        self._lock = Lock()  # of the dict
        self._executor = llguidance.LLExecutor(threads)

    def prepare(self, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_of(eos_token_ids)

    def compile(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar:
        tokenizer = self._tokenizer_of(eos_token_ids)
        if spec.kind is GrammarKind.JSON:
            return self._begun(_compiled_schema(tokenizer, spec), spec.kind)
        text = grammar_text(spec, self._tokenizer)
        matcher, error = _compiled(tokenizer, text)
        if error:
            raise GrammarError(f"{spec.kind}: {of_pattern(error) if spec.kind is GrammarKind.REGEX else error}")
        return self._begun(matcher, spec.kind)

    def _begun(self, first: llguidance.LLMatcher, kind: GrammarKind) -> Grammar:
        """The grammar, if an answer to it can begin. Raises GrammarError."""
        bits = np.zeros((1, -(-self._vocab_size // 32)), dtype=np.int32)
        matcher = first.deep_copy()
        fill_next_token_bitmask(matcher, bits)  # on this thread: a batch does not wait for it
        error = one_line(matcher.get_error()) if matcher.is_error() else ""
        if error or not bits.any():
            nothing = not error or error.startswith("NoExtension")  # llguidance's name for it
            reason = "nothing satisfies it, or this vocabulary cannot write it" if nothing else error
            raise GrammarError(f"{kind}: no answer can begin: {reason}")
        return LlguidanceGrammar(first)

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        inner = [cast(LlguidanceMatcher, matcher).inner for matcher in matchers]
        fill_next_token_bitmask_par(self._executor, [(matcher, row) for row, matcher in enumerate(inner)], bits)
        for matcher in inner:
            if matcher.is_error():
                raise GrammarError(f"the grammar cannot be followed: {one_line(matcher.get_error())}")

    def _tokenizer_of(self, eos_token_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
        if not eos_token_ids:
            raise GrammarError("structured output needs a model with an end token")
        require_pieces(self._tokenizer)
        with self._lock:
            found = self._tokenizers.get(eos_token_ids)
            if found is None:
                spelling, ends = self._tokenizer.backend.to_str(), list(eos_token_ids)
                try:
                    found = llguidance.LLTokenizer(spelling, n_vocab=self._vocab_size, eos_token=ends)
                except ValueError as error:
                    reason = one_line(str(error))
                    raise GrammarError(f"llguidance cannot use this model's tokenizer: {reason}") from error
                self._tokenizers[eos_token_ids] = found
            return found


def _compiled(tokenizer: llguidance.LLTokenizer, text: str) -> tuple[llguidance.LLMatcher, str]:
    """A matcher, and why it cannot be used; "" if it can. A warning is a keyword that would not be checked."""
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    error = matcher.get_error() if matcher.is_error() else "; ".join(matcher.get_grammar_warnings())
    return matcher, one_line(error)


def grammar_text(spec: GrammarSpec, tokenizer: Tokenizer) -> str:
    """The spec, which is no schema, in llguidance's own form. Raises GrammarError."""
    if spec.kind is GrammarKind.STRUCTURAL_TAG:
        return tags_grammar(spec, tokenizer, json_text)
    if spec.kind is GrammarKind.COMPOSED:
        return _of_composed(spec, tokenizer)
    return _FORMS[spec.kind](spec)


# ---- JSON schema


def _compiled_schema(tokenizer: llguidance.LLTokenizer, spec: GrammarSpec) -> llguidance.LLMatcher:
    def compiled(schema: Any) -> tuple[llguidance.LLMatcher, str]:
        return _compiled(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json_text(schema, spec.whitespace)))

    schema = rules.parsed_schema(spec.text, spec.kind)
    try:
        matcher, error = compiled(schema)
    except GrammarError as refused:
        raise GrammarError(f"{spec.kind}: {refused.message}") from None
    if not error:
        return matcher

    def error_of(part: Any) -> str:
        try:
            return compiled(part)[1]
        except GrammarError as other:
            return other.message

    if spec.whitespace is not None and error_of({"type": "array"}) == error:
        raise GrammarError(f"{spec.kind}: {error} (in whitespace_pattern)")
    raise GrammarError(f"{spec.kind}: {of_schema(schema, error, error_of)}")


# ---- other kinds


def _of_choice(spec: GrammarSpec) -> str:
    choices = rules.parsed_schema(spec.text, spec.kind)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("choice: must be a list of strings, not empty")
    if "" in choices:
        raise GrammarError("choice: an empty string cannot be chosen")
    # One terminal: alternatives of a rule are limited to 2,000.
    return llguidance.LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(LarkText.quoted, choices)))


def _of_regex(spec: GrammarSpec) -> str:
    if trouble := rules.pattern_trouble(spec.text, flags=True):
        raise GrammarError(f"regex: {trouble}")
    return llguidance.LLMatcher.grammar_from_regex(rules.common_classes(spec.text))


def _of_grammar(spec: GrammarSpec) -> str:
    """Lark, or GBNF, which has `::=`."""
    lark = lark_of(spec.text, spec.whitespace, json_text)
    return json.dumps({"grammars": [{"lark_grammar": lark}]})  # by itself it could be llguidance's JSON, not checked


def _of_composed(spec: GrammarSpec, tokenizer: Tokenizer) -> str:
    """Lark, and the grammar that it calls `@answer`, if any, with those that this one calls."""
    parts = json.loads(spec.text)
    grammars = [{"lark_grammar": parts["lark"]}]
    if (answer := parts.get("answer")) is not None:
        kind, text, whitespace = answer
        first, *others = _listed(GrammarSpec(GrammarKind(kind), text, whitespace), tokenizer)
        grammars += [{**first, "name": "answer"}, *others]
    return json.dumps({"grammars": grammars})


def _listed(spec: GrammarSpec, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The grammars of a spec in llguidance's own form."""
    if spec.kind is GrammarKind.JSON:
        schema = json_text(rules.parsed_schema(spec.text, spec.kind), spec.whitespace)
        text = llguidance.LLMatcher.grammar_from_json_schema(schema)
    else:
        text = grammar_text(spec, tokenizer)
    return list(json.loads(text)["grammars"]) if text.startswith("{") else [{"lark_grammar": text}]


_FORMS: dict[GrammarKind, Callable[[GrammarSpec], str]] = {
    GrammarKind.REGEX: _of_regex,
    GrammarKind.CHOICE: _of_choice,
    GrammarKind.GRAMMAR: _of_grammar,
}
