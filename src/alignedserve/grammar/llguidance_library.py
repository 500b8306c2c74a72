"""Grammars of llguidance: JSON schema, regular expressions, choices, Lark and GBNF grammars, structural tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import llguidance
from llguidance.numpy import fill_next_token_bitmask_par

from alignedserve.errors import GrammarError
from alignedserve.grammar.base import Bits, Grammar, GrammarLibrary, Matcher
from alignedserve.request import GrammarKind, GrammarSpec
from alignedserve.text import Tokenizer

ONE_SPACE = " ?"  # between the tokens of JSON: whitespace without limit would let a model go on for ever
MOST_CHARACTERS = 1 << 20  # of a spec


class LlguidanceMatcher(Matcher):
    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self.inner = inner

    def accept(self, token_ids: Sequence[int]) -> None:
        if not self.inner.consume_tokens(list(token_ids)):
            raise GrammarError(f"the answer left its grammar: {_line(self.inner.get_error())}")


class LlguidanceGrammar(Grammar):
    def __init__(self, first: llguidance.LLMatcher) -> None:
        self._first = first  # never moved on

    def matcher(self) -> Matcher:
        return LlguidanceMatcher(self._first.deep_copy())


class LlguidanceLibrary(GrammarLibrary):
    """`vocab_size`: columns of the logits, which may be more than the tokenizer has tokens. `threads`: of `fill`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, threads: int = 1) -> None:
        self._spelling = tokenizer.backend.to_str()
        self._vocab_size = vocab_size
        self._tokenizers: dict[tuple[int, ...], llguidance.LLTokenizer] = {}
        self._executor = llguidance.LLExecutor(threads)

    def compile(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar:
        text = grammar_text(spec)
        tokenizer = self._tokenizer(eos_token_ids)
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, tokenizer)
        if failed or messages:  # a warning is a keyword that would not be checked
            raise GrammarError(f"{spec.kind}: {_line('; '.join(messages))}")
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"{spec.kind}: {_line(matcher.get_error())}")
        return LlguidanceGrammar(matcher)

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        inner = [cast(LlguidanceMatcher, matcher).inner for matcher in matchers]
        fill_next_token_bitmask_par(self._executor, [(matcher, row) for row, matcher in enumerate(inner)], bits)
        for matcher in inner:
            if matcher.is_error():
                raise GrammarError(f"the grammar cannot be followed: {_line(matcher.get_error())}")

    def _tokenizer(self, eos_token_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
        if not eos_token_ids:
            raise GrammarError("structured output needs a model with an end token")
        found = self._tokenizers.get(eos_token_ids)
        if found is None:
            ends = list(eos_token_ids)
            found = llguidance.LLTokenizer(self._spelling, n_vocab=self._vocab_size, eos_token=ends)
            self._tokenizers[eos_token_ids] = found
        return found


def grammar_text(spec: GrammarSpec) -> str:
    """The spec in llguidance's own form. Raises GrammarError."""
    if len(spec.text) > MOST_CHARACTERS:
        raise GrammarError(f"{spec.kind}: {len(spec.text)} characters are more than {MOST_CHARACTERS}")
    return _FORMS[spec.kind](spec)


def _of_schema(spec: GrammarSpec) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(_with_whitespace(_parsed(spec), spec))


def _with_whitespace(schema: Any, spec: GrammarSpec) -> dict[str, Any]:
    """The schema with our options for the compiler in place of the client's. Raises GrammarError."""
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"{spec.kind}: a schema is an object, true or false, not {json.dumps(schema)[:50]}")
    if schema is False:
        raise GrammarError(f"{spec.kind}: no value satisfies the schema false")
    options = {"whitespace_pattern": ONE_SPACE if spec.whitespace is None else spec.whitespace}
    return {**({} if schema is True else schema), "x-guidance": options}


def _of_choice(spec: GrammarSpec) -> str:
    choices = _parsed(spec)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("choice: must be a list of strings, not empty")
    if "" in choices:
        raise GrammarError("choice: an empty string cannot be chosen")
    return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _of_regex(spec: GrammarSpec) -> str:
    return llguidance.LLMatcher.grammar_from_regex(spec.text)


def _of_grammar(spec: GrammarSpec) -> str:
    """Lark, or GBNF, which has `::=`."""
    text = spec.text
    if "::=" in text:
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

        try:
            text = gbnf_to_lark(text)
        except GbnfToLarkError as error:
            raise GrammarError(f"grammar: {_line(str(error))}") from error
    return llguidance.LLMatcher.grammar_from_lark(text)


def _of_tags(spec: GrammarSpec) -> str:
    tags = _parsed(spec)
    try:
        structures, triggers = tags["structures"], tags["triggers"]
        found = []
        for tag in structures:
            (trigger,) = [one for one in triggers if tag["begin"].startswith(one)][:1]
            schema = _with_whitespace(tag.get("schema", {}), spec)
            found.append(llguidance.StructTag(trigger=trigger, begin=tag["begin"], grammar=schema, end=tag["end"]))
        text = llguidance.StructTag.to_grammar(found)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        wanted = '{"structures": [{"begin": …, "schema": …, "end": …}], "triggers": [the beginnings of "begin"]}'
        raise GrammarError(f"structural_tag: must be {wanted}") from error
    return text


def _of_composed(spec: GrammarSpec) -> str:
    """Lark, and the grammar that it calls `@answer`, if any."""
    parts = _parsed(spec)
    grammars = [{"lark_grammar": parts["lark"]}]
    if (answer := parts.get("answer")) is not None:
        kind, text, whitespace = answer
        own = grammar_text(GrammarSpec(GrammarKind(kind), text, whitespace))
        listed = json.loads(own)["grammars"] if own.startswith("{") else [{"lark_grammar": own}]
        if len(listed) != 1:
            raise GrammarError(f"{kind}: it must be one grammar")
        grammars.append({**listed[0], "name": "answer"})
    return json.dumps({"grammars": grammars})


def _parsed(spec: GrammarSpec) -> Any:
    try:
        return json.loads(spec.text)
    except ValueError as error:
        raise GrammarError(f"{spec.kind}: it is not JSON: {error}") from error


_FORMS: dict[GrammarKind, Callable[[GrammarSpec], str]] = {
    GrammarKind.JSON: _of_schema,
    GrammarKind.REGEX: _of_regex,
    GrammarKind.CHOICE: _of_choice,
    GrammarKind.GRAMMAR: _of_grammar,
    GrammarKind.STRUCTURAL_TAG: _of_tags,
    GrammarKind.COMPOSED: _of_composed,
}


def _line(message: str) -> str:
    return " ".join(message.split())[:500]
