"""Structured output in the engine: what a grammar allows, how specs are refused, and what a sampler draws under it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from alignedserve.engine.live import LiveRequest
from alignedserve.engine.sampling.sampler import Sampler
from alignedserve.errors import GrammarError
from alignedserve.grammar.compiled import Grammars
from alignedserve.grammar.llguidance_library import LlguidanceLibrary
from alignedserve.request import FinishReason, GrammarKind, GrammarSpec, RequestKey, RequestSpec, SamplingParams
from alignedserve.text import Tokenizer

TINY = Path(__file__).parents[3] / "src/alignedserve/models/tiny"
VOCAB_SIZE, EOS = 2048, 0
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS = GrammarKind


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(TINY)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(LlguidanceLibrary(tokenizer, VOCAB_SIZE))


def live(
    grammars: Grammars, tokenizer: Tokenizer, spec: GrammarSpec, output: list[int] | None = None, **keys: object
) -> LiveRequest:
    values: dict[str, object] = {"temperature": 1.0, "max_tokens": 400, "eos_token_ids": (EOS,), **keys}
    sampling = SamplingParams(grammar=spec, **values)  # type: ignore[arg-type]
    request = RequestSpec(RequestKey("a"), [5, 6, 7], sampling, list(output or ()))
    return LiveRequest(request, tokenizer, grammars)


def write(request: LiveRequest, seed: int, most: int = 1000) -> FinishReason | None:
    """Draw from random logits until the request ends, or has `most` more tokens."""
    random, sampler = torch.Generator().manual_seed(seed), Sampler()
    for _ in range(most):
        logits = torch.randn(1, VOCAB_SIZE, generator=random) * 3
        (token,) = sampler.sample(logits, [request.row])
        finish = request.push(token)
        if finish is not None:
            return finish
    return None


def text(request: LiveRequest, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(request.spec.output_token_ids)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_wild_logits_write_what_the_schema_asks_for(
    grammars: Grammars, tokenizer: Tokenizer, seed: int, temperature: float
) -> None:
    spec = GrammarSpec(KINDS.JSON, json.dumps(PERSON))
    request = live(grammars, tokenizer, spec, temperature=temperature, seed=seed)
    assert write(request, seed) is FinishReason.STOP
    person = json.loads(text(request, tokenizer))
    assert set(person) == {"name", "age"}
    assert len(person["name"]) <= 8
    assert 0 <= person["age"] <= 99
    assert request.spec.output_token_ids[-1] == EOS


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (GrammarSpec(KINDS.REGEX, r"[a-f]{3}-\d{2}"), r"[a-f]{3}-\d{2}"),
        (GrammarSpec(KINDS.CHOICE, json.dumps(["yes", "no", 'a "b"\\\n'])), r'yes|no|a "b"\\\n'),
        (GrammarSpec(KINDS.GRAMMAR, 'start: "x" NUMBER\nNUMBER: /[0-9]{2,4}/'), r"x\d{2,4}"),
        (GrammarSpec(KINDS.GRAMMAR, 'root ::= "x" num\nnum ::= [0-9] | [0-9] num2\nnum2 ::= [a-c]'), r"x\d[a-c]?"),
    ],
)
def test_every_kind_of_grammar(grammars: Grammars, tokenizer: Tokenizer, spec: GrammarSpec, pattern: str) -> None:
    for seed in range(4):
        request = live(grammars, tokenizer, spec, seed=seed)
        assert write(request, seed) is FinishReason.STOP
        assert re.fullmatch(pattern, text(request, tokenizer)), text(request, tokenizer)


def test_a_structural_tag_forces_the_schema_only_after_its_trigger(grammars: Grammars, tokenizer: Tokenizer) -> None:
    structure = {"begin": "<call=add>", "schema": {"type": "object", "properties": {"a": {"const": 1}},
                 "required": ["a"], "additionalProperties": False}, "end": "</call>"}  # fmt: skip
    spec = GrammarSpec(KINDS.STRUCTURAL_TAG, json.dumps({"structures": [structure], "triggers": ["<call="]}))
    begun = tokenizer.encode("Well: <call=", special_tokens=False)
    request = live(grammars, tokenizer, spec, begun)
    write(request, 0, most=30)
    assert text(request, tokenizer).replace(" ", "").startswith('Well:<call=add>{"a":1}</call>')
    free = live(grammars, tokenizer, spec, max_tokens=12)
    assert write(free, 0) is FinishReason.LENGTH  # ordinary text


def test_json_is_compact_unless_the_request_says_otherwise(grammars: Grammars, tokenizer: Tokenizer) -> None:
    def allows(answer: str, whitespace: str | None = None) -> bool:
        spec = GrammarSpec(KINDS.JSON, json.dumps(PERSON), whitespace)
        matcher = grammars.compile(spec, (EOS,)).matcher()
        try:
            matcher.accept(tokenizer.encode(answer, special_tokens=False))
        except GrammarError:
            return False
        return True

    assert allows('{"name":"a","age":1}')
    assert allows('{ "name": "a", "age": 1 }')
    assert not allows('{"name":  "a"')
    assert not allows('{\n"name"')
    assert allows('{\n"name":\n"a"', r"[\n ]*")
    assert not allows('{ "name"', "")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (GrammarSpec(KINDS.JSON, "{"), "not JSON"),
        (GrammarSpec(KINDS.JSON, "3"), "a schema is an object"),
        (GrammarSpec(KINDS.JSON, '{"type": "foo"}'), "Invalid type: foo"),
        (GrammarSpec(KINDS.JSON, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (GrammarSpec(KINDS.JSON, '{"type": "object", "properties": {"a": {"not": {}}}}'), "not"),
        (GrammarSpec(KINDS.JSON, '{"$ref": "#/x"}'), "/x"),
        (GrammarSpec(KINDS.REGEX, "("), "unclosed group"),
        (GrammarSpec(KINDS.REGEX, "a(?=b)"), "look-around"),
        (GrammarSpec(KINDS.CHOICE, "[]"), "list of strings"),
        (GrammarSpec(KINDS.GRAMMAR, "start: x"), 'unknown name: "x"'),
        (GrammarSpec(KINDS.GRAMMAR, "root ::= ["), "grammar"),
        (GrammarSpec(KINDS.STRUCTURAL_TAG, "{}"), "structures"),
        (GrammarSpec(KINDS.STRUCTURAL_TAG, '{"structures": [{"begin": "<a>", "end": ""}], "triggers": ["b"]}'), "trig"),
        (GrammarSpec(KINDS.JSON, "x" * (1 << 21)), "characters"),
    ],
)
def test_a_spec_that_cannot_be_followed_exactly_is_refused_and_says_why(
    grammars: Grammars, spec: GrammarSpec, says: str
) -> None:
    with pytest.raises(GrammarError, match=re.escape(says)):
        grammars.compile(spec, (EOS,))


def test_without_an_end_token_there_is_no_structured_output(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="end token"):
        grammars.compile(GrammarSpec(KINDS.REGEX, "a"), ())


@pytest.mark.parametrize("cut", [0, 1, 3, 7])
def test_an_answer_goes_on_the_same_where_its_state_is_replayed(
    grammars: Grammars, tokenizer: Tokenizer, cut: int
) -> None:
    spec = GrammarSpec(KINDS.JSON, json.dumps(PERSON))
    whole = live(grammars, tokenizer, spec, seed=3)
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    sampler = Sampler()
    while whole.push(*sampler.sample(logits, [whole.row])) is None:
        pass
    tokens = whole.spec.output_token_ids
    resumed = live(grammars, tokenizer, spec, tokens[:cut], seed=3)
    while resumed.push(*sampler.sample(logits, [resumed.row])) is None:
        pass
    assert resumed.spec.output_token_ids == tokens


def test_neither_min_tokens_nor_ignore_eos_breaks_a_grammar(grammars: Grammars, tokenizer: Tokenizer) -> None:
    spec = GrammarSpec(KINDS.REGEX, "[ab]+")
    longer = live(grammars, tokenizer, spec, min_tokens=20, seed=1)
    assert write(longer, 1) is FinishReason.STOP
    assert len(longer.spec.output_token_ids) >= 20
    fixed = GrammarSpec(KINDS.CHOICE, '["a"]')
    for keys in ({"min_tokens": 20}, {"ignore_eos": True}):
        request = live(grammars, tokenizer, fixed, **keys)
        assert write(request, 0) is FinishReason.STOP
        assert text(request, tokenizer) == "a"


def test_before_min_tokens_a_stop_token_that_the_grammar_needs_does_not_end_the_answer(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    (b,) = tokenizer.encode("b", special_tokens=False)
    spec = GrammarSpec(KINDS.CHOICE, '["b"]')
    request = live(grammars, tokenizer, spec, min_tokens=9, stop_token_ids=(b,))
    assert write(request, 0) is FinishReason.STOP
    assert request.spec.output_token_ids == [b, EOS]
    request = live(grammars, tokenizer, spec, stop_token_ids=(b,))
    assert write(request, 0) is FinishReason.STOP
    assert request.spec.output_token_ids == [b]


def test_rows_without_a_grammar_choose_as_if_the_others_had_none(grammars: Grammars, tokenizer: Tokenizer) -> None:
    free = LiveRequest(RequestSpec(RequestKey("b"), [5], SamplingParams(temperature=0.0, eos_token_ids=(EOS,))), None)
    bound = live(grammars, tokenizer, GrammarSpec(KINDS.CHOICE, '["a"]'), temperature=0.0)
    logits = torch.randn(2, VOCAB_SIZE)
    before = logits.clone()
    chosen = Sampler().sample(logits, [free.row, bound.row])
    assert chosen[0].token_id == int(logits[0].argmax())
    assert tokenizer.decode([chosen[1].token_id]) == "a"
    assert torch.equal(logits, before)


def test_an_answer_that_does_not_fit_its_grammar_is_an_error_of_that_row(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    wrong = live(grammars, tokenizer, GrammarSpec(KINDS.CHOICE, '["a"]'), tokenizer.encode("b", special_tokens=False))
    with pytest.raises(GrammarError, match="left its grammar"):
        Sampler().sample(torch.zeros(1, VOCAB_SIZE), [wrong.row])


def test_grammars_are_compiled_once_and_the_oldest_are_dropped(tokenizer: Tokenizer) -> None:
    kept = Grammars(LlguidanceLibrary(tokenizer, VOCAB_SIZE), most=2)
    first, second, third = (GrammarSpec(KINDS.REGEX, name) for name in "abc")
    a = kept.compile(first, (EOS,))
    kept.compile(second, (EOS,))
    assert kept.compile(first, (EOS,)) is a
    kept.compile(third, (EOS,))
    assert kept.known(first, (EOS,)) is a
    assert kept.known(second, (EOS,)) is None


def test_the_end_is_forbidden_only_while_something_else_is_allowed(grammars: Grammars) -> None:
    row = grammars.row(SamplingParams(grammar=GrammarSpec(KINDS.REGEX, "a*"), eos_token_ids=(EOS,)))
    assert row is not None
    bits = np.array([0b11, 0], dtype=np.int32)
    row.forbid_ends(bits)
    assert bits.tolist() == [0b10, 0]
    bits = np.array([0b1, 0], dtype=np.int32)
    row.forbid_ends(bits)
    assert bits.tolist() == [0b1, 0]


def test_ignore_eos_leaves_the_clients_own_stop_tokens(grammars: Grammars) -> None:
    sampling = SamplingParams(grammar=GrammarSpec(KINDS.REGEX, "a*"), eos_token_ids=(EOS,), stop_token_ids=(3,))
    row = grammars.row(sampling)
    assert row is not None
    bits = np.array([0b1011], dtype=np.int32)
    row.forbid_ends(bits, stops=False)
    assert bits.tolist() == [0b1010]
    row.forbid_ends(bits)
    assert bits.tolist() == [0b0010]


def test_a_worker_without_a_tokenizer_does_not_drop_the_grammar() -> None:
    sampling = SamplingParams(grammar=GrammarSpec(KINDS.REGEX, "a"), eos_token_ids=(EOS,))
    with pytest.raises(GrammarError, match="no tokenizer"):
        LiveRequest(RequestSpec(RequestKey("a"), [5], sampling), None)
