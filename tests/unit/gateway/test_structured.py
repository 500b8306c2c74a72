"""Which grammar a request asks for, in every spelling; what is ambiguous or wrong is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.planning import CallPlan, PromptPlan, ServedModel
from alignedserve.gateway.body.requests import ReplyOptions, parse_chat, parse_completion
from alignedserve.gateway.grpc_service import body_of
from alignedserve.gateway.ledger.calls import Call
from alignedserve.gateway.ledger.resume import with_resume
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import inference_pb2 as inf
from alignedserve.request import FinishReason, GrammarKind, GrammarSpec, SamplingParams
from support.fake_cluster import fake_model_info

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON, REGEX, CHOICE, GRAMMAR, TAG, *_ = GrammarKind
MESSAGES = [{"role": "user", "content": "hi"}]


def asked(*ignored: str, **fields: Any) -> tuple[Any, str] | None:
    chat, completion = parse_chat({"messages": MESSAGES, **fields}), parse_completion({"prompt": "hi", **fields})
    assert chat.grammar_spec() == completion.grammar_spec()
    assert chat.ignored == completion.ignored == list(ignored)
    return chat.grammar_spec()


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, JSON, {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, JSON, SCHEMA),
        ({"response_format": {"type": "structural_tag", "structures": [], "triggers": []}}, TAG, None),
        ({"structured_outputs": {"json": SCHEMA}}, JSON, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, JSON, {"type": "object"}),
        ({"structured_outputs": {"regex": "a+"}}, REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, CHOICE, ["a", "b"]),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GRAMMAR, 'start: "a"'),
        ({"guided_json": {}}, JSON, {}),
        ({"json_schema": {}}, JSON, {}),
        ({"structured_outputs": {"json": False}}, JSON, False),
        ({"structured_outputs": {"json": True, "disable_fallback": True}}, JSON, True),
        ({"guided_json": 0}, JSON, 0),
        ({"guided_regex": "a+"}, REGEX, "a+"),
        ({"guided_choice": ["a"]}, CHOICE, ["a"]),
        ({"guided_grammar": "x"}, GRAMMAR, "x"),
        ({"json_schema": json.dumps(SCHEMA)}, JSON, SCHEMA),
        ({"regex": "a+"}, REGEX, "a+"),
        ({"ebnf": "root ::= x"}, GRAMMAR, "root ::= x"),
        ({"choice": ["a"]}, CHOICE, ["a"]),
        ({"structural_tag": "{}"}, TAG, {}),
    ],
)
def test_every_spelling(fields: dict[str, Any], kind: GrammarKind, text: Any) -> None:
    found = asked(**fields)
    assert found is not None
    spec, name = found
    assert spec.kind is kind
    assert name.partition(".")[0] == next(iter(fields))
    if text is not None:
        assert (spec.text if kind in (REGEX, GRAMMAR) else json.loads(spec.text)) == text


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"regex": None}],
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


def test_whitespace_is_that_of_json_alone() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}
    for kind, text in (("json", "{}"), ("grammar", "start: %json {}"), ("structural_tag", tag)):
        (spec, _) = asked(structured_outputs={kind: text, "disable_any_whitespace": True}) or (None, "")
        assert spec is not None
        assert spec.whitespace == ""
    (spec, _) = asked(guided_json=SCHEMA, guided_whitespace_pattern=" *") or (None, "")
    assert spec is not None
    assert spec.whitespace == " *"
    (spec, _) = asked(structured_outputs={"json": SCHEMA, "whitespace_pattern": ""}) or (None, "")
    assert spec is not None
    assert spec.whitespace == ""
    (spec, _) = asked("guided_whitespace_pattern", guided_regex="a", guided_whitespace_pattern=" *") or (None, "")
    assert spec is not None
    assert spec.whitespace is None


OLDER, NEWER, NONE = (
    "guided_whitespace_pattern", "structured_outputs.whitespace_pattern", "structured_outputs.disable_any_whitespace"
)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({OLDER: " *"}, [OLDER]),
        ({OLDER: " *", "response_format": {"type": "text"}}, [OLDER]),
        ({OLDER: " *", "response_format": {"type": "json_object"}}, []),
        ({OLDER: " *", "guided_choice": ["a"]}, [OLDER]),
        ({OLDER: " *", "ebnf": 'root ::= "a"'}, [OLDER]),
        ({OLDER: " *", "guided_grammar": "start: %json {}"}, []),
        ({OLDER: " *", "structured_outputs": {"json": SCHEMA}}, []),
        ({OLDER: " *", "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, [OLDER]),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": ""}}, [NEWER]),
        ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}}, [NONE]),
        ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": False}}, []),
        ({OLDER: " *", "structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, [NONE, OLDER]),
        ({OLDER: " *", "structural_tag": {"format": {"type": "regex", "pattern": "a"}}}, [OLDER]),
        ({OLDER: " *", "structural_tag": {"structures": [{"begin": "a", "end": "b"}], "triggers": ["a"]}}, []),
        ({OLDER: " *", "response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, [OLDER]),
    ],
)  # fmt: skip
def test_whitespace_without_effect_is_named(fields: dict[str, Any], named: list[str]) -> None:
    asked(*named, **fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"jsn": SCHEMA}}, "structured_outputs.jsn"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            "disable_additional_properties",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " *", "disable_any_whitespace": True}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": None}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " *"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"regex": ""}, "regex"),
        ({"choice": []}, "choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": ""}, "guided_json"),
        ({"guided_json": []}, "guided_json"),
        ({"ebnf": ""}, "ebnf"),
        ({"structural_tag": ""}, "structural_tag"),
        ({"regex": 3}, "regex"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat({"messages": MESSAGES, **fields}).grammar_spec()
    assert caught.value.param == param


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"items": deep}
    for fields in ({"guided_json": deep}, {"response_format": {"type": "json_object", "schema": deep}}):
        with pytest.raises(InvalidRequestError, match=r"json: it cannot be read") as caught:
            parse_chat({"messages": MESSAGES, **fields}).grammar_spec()
        assert caught.value.param == next(iter(fields))


def test_choices_in_grpc_that_are_nested_too_deeply_are_refused() -> None:
    request = inf.GenerateRequest(prompt="hi", grammar=pb.Grammar(kind=CHOICE, text="[" * 100_000))
    with pytest.raises(InvalidRequestError, match="must be a JSON list"):
        body_of(request)


def test_an_answer_that_its_grammar_ended_before_min_tokens_does_not_go_on() -> None:
    """Its client resumes it, or a process dies, without having told of the end."""
    ends: dict[str, Any] = {"eos_token_ids": (5,), "stop_token_ids": (7,), "min_tokens": 4, "max_tokens": 20}
    bound = SamplingParams(grammar=GrammarSpec(REGEX, "a"), **ends)
    model = ServedModel("tiny", None, None, info=fake_model_info())
    for tokens, sampling, ended in (
        ([9, 5], bound, True), ([9, 9, 7], bound, False), ([9, 9, 9, 7], bound, True),
        ([9, 5], replace(bound, grammar=None), False), ([9, 9, 9, 9, 5], replace(bound, grammar=None), True),
    ):  # fmt: skip
        plan = CallPlan("call", (PromptPlan((1,), sampling),), ReplyOptions())
        resume = inf.GenerateRequest(seed=1, resume=[inf.Delivered(token_ids=tokens)])
        (delivered,) = with_resume(plan, resume, model).resume
        (answer,) = Call(plan).answers
        answer.tokens += tokens
        assert delivered.finish is answer.finished_unsaid() is (FinishReason.STOP if ended else None)
