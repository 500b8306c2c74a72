"""Every finished answer is right: schemas drawn and in real shapes, regular expressions and grammars, wild logits.

Answers come from random logits over the shipped model's tokenizer. What a library cannot follow is refused. The slow
test draws more and prints how many schemas of each keyword are supported, refused and answered wrongly.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from alignedserve.errors import GrammarError
from alignedserve.grammar.schema import common_classes
from alignedserve.request import GrammarKind, GrammarSpec
from support.grammars import LIBRARIES, allows, tiny_grammars, write
from support.schemas import drawn_schemas, grammars, keywords_of, problem, real_shapes, regexes

Schema = dict[str, Any]


class Tally:
    """Schemas by what came of them, for all and by keyword; `wrong` has each wrong answer."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.counts: Counter[tuple[str, str]] = Counter()
        self.finished = 0
        self.wrong: list[str] = []

    def try_schema(self, schema: Schema, seeds: int = 1) -> None:
        spec, found = GrammarSpec(GrammarKind.JSON, json.dumps(schema)), "supported"
        try:
            tiny_grammars(self.library).compile(spec, (0,))
        except GrammarError:
            found = "refused"
        else:
            for seed in range(seeds):
                for temperature in (0.0, 1.0):
                    answer = write(tiny_grammars(self.library), spec, seed, temperature=temperature)
                    self.finished += answer is not None
                    if answer is not None and (trouble := problem(schema, answer)):
                        self.wrong.append(f"{json.dumps(schema)}\n  {answer}\n  {trouble}")
                        found = "wrong"
        for keyword in ("all", *keywords_of(schema)):
            self.counts[keyword, found] += 1

    def table(self) -> str:
        keywords = sorted({keyword for keyword, _ in self.counts}, key=lambda one: (one != "all", one))
        rows = [f"| {self.library} | supported | refused | wrong |", "|---|---:|---:|---:|"]
        rows += [
            f"| {keyword} | {' | '.join(str(self.counts[keyword, kind]) for kind in KINDS)} |" for keyword in keywords
        ]
        return "\n".join([*rows, f"{self.finished} answers were finished"])


KINDS = ("supported", "refused", "wrong")


def try_drawn(tally: Tally, count: int, seeds: int) -> None:
    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_schemas())
    def draw(schema: Schema) -> None:
        tally.try_schema(schema, seeds)

    draw()


@pytest.mark.parametrize("library", LIBRARIES)
def test_answers_of_drawn_schemas_are_right(library: str) -> None:
    tally = Tally(library)
    try_drawn(tally, 8, 1)
    assert tally.wrong == []
    assert tally.finished > 5


@pytest.mark.parametrize("library", LIBRARIES)
def test_answers_of_real_shapes_are_right(library: str) -> None:
    tally = Tally(library)
    for _, schema in list(real_shapes())[1::10]:
        tally.try_schema(schema)
    assert tally.wrong == []
    assert tally.finished > 5


def right_regex(library: str, pattern: str, seed: int) -> bool | None:
    """None: refused, or not finished."""
    try:
        answer = write(tiny_grammars(library), GrammarSpec(GrammarKind.REGEX, pattern), seed, temperature=seed % 2)
    except GrammarError as error:
        if not error.message.startswith("regex: "):  # it was refused later, which is a dead end
            raise
        return None
    return None if answer is None else re.fullmatch(pattern, answer) is not None


def right_grammar(library: str, text: str, meaning: str, seed: int) -> bool | None:
    answer = write(tiny_grammars(library), GrammarSpec(GrammarKind.GRAMMAR, text), seed, temperature=seed % 2)
    return None if answer is None else re.fullmatch(meaning, answer) is not None


@pytest.mark.parametrize("library", LIBRARIES)
def test_answers_of_regular_expressions_and_grammars_are_right(library: str) -> None:
    found = [right_regex(library, pattern, seed) for seed, pattern in enumerate(regexes(200)[::9])]
    assert False not in found
    assert found.count(True) > 5  # xgrammar is not asked for most of the others
    found = [right_grammar(library, text, meaning, seed) for seed, (text, meaning) in enumerate(grammars(50)[::6])]
    assert set(found) <= {True, None}
    assert found.count(True) > len(found) / 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_recursive_grammars(library: str) -> None:
    spec = GrammarSpec(GrammarKind.GRAMMAR, 'root ::= "(" root ")" | "x" | "[" root "," root "]"')
    for answer, right in (("((x))", True), ("[(x),x]", True), ("((x)", False), ("[x]", False), ("", False)):
        assert allows(tiny_grammars(library), spec, answer) is right, answer


# What one of the libraries would answer wrongly if it were not refused or rewritten.
WRONG = [
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
     ['{"\\u0061":"x"}', '{"a":1,"\\u0061":"x"}']),
    ({"type": "object", "minProperties": 2}, ['{"a":1,"a":2}']),
    ({"type": "object", "required": ["z"], "additionalProperties": {"type": "integer"}}, ["{}"]),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, ['{"\\u0061c":"x"}']),
    ({"type": "string", "pattern": "^\\S+$"}, ['"\u00a0"']),
    ({"type": "string", "maxLength": 3}, ['"\x01"', '"abcd"']),
    ({"type": "string", "pattern": "^[^a]$"}, ['"a"', '"bb"']),
    ({"type": "string", "enum": ["a", 1]}, ["1"]),
    ({"enum": [1, 5], "minimum": 3}, ["1"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}], "minLength": 2}, ['"a"']),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}, "pattern": "^b"}, ['"a"']),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["1"]),
    ({"allOf": [{"type": "string"}, {"maxLength": 1}]}, ['"ab"']),
    ({"type": "array", "uniqueItems": True}, ["[1,1]"]),
    ({"type": "integer", "multipleOf": 3}, ["4"]),
    ({"type": "string", "pattern": "^a|b$", "maxLength": 1}, ['"ax"']),
    ({"not": {"type": "string"}}, ['"a"']),
    ({"type": ["string", "null"], "maxLength": 1}, ['"ab"']),
]  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("schema", "answers"), WRONG)
def test_known_wrong_answers_are_not_given(library: str, schema: Schema, answers: list[str]) -> None:
    spec = GrammarSpec(GrammarKind.JSON, json.dumps(schema))
    try:
        given = [answer for answer in answers if allows(tiny_grammars(library), spec, answer)]
    except GrammarError:
        pass  # refused
    else:
        assert given == []


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "object", "properties": {"a/b": {"not": {}}}}, "not at /properties/a~1b: llguidance cannot follow"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"items": {"uniqueItems": True}}}}, "uniqueItems at /$defs/x/items: "),
        ({"properties": {"a": {"oneOf": [{}, {"type": "integer"}]}}}, "may match a value (at /properties/a)"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "(at /properties/a)"),
        ({"properties": {"a": {"$ref": "#/nothing"}}}, "$ref at /properties/a: the schema has nothing at #/nothing"),
        ({"properties": {"a": {"format": "iri"}}}, "format: llguidance cannot follow this one (iri) (at /properties/a"),
        ({"const": "\x1b"}, "const at /: it contains control characters"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_keyword_and_its_place_in_our_own_words(schema: Schema, says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        tiny_grammars("llguidance").compile(GrammarSpec(GrammarKind.JSON, json.dumps(schema)), (0,))
    assert says in caught.value.message
    assert "coerce_one_of" not in caught.value.message


def test_what_has_no_effect_is_no_reason_to_refuse() -> None:
    schema = {"type": "array", "uniqueItems": False, "minContains": 2, "items": {"type": "integer", "format": "int32"},
              "$defs": {"unused": {"not": {}}}, "unevaluatedItems": True, "then": {}}  # fmt: skip
    assert allows(tiny_grammars("llguidance"), GrammarSpec(GrammarKind.JSON, json.dumps(schema)), "[1,1]")


def test_classes_are_what_all_engines_take_them_for() -> None:
    assert common_classes(r"\d[\w.]\\d\[\w]") == r"[0-9][0-9A-Za-z_.]\\d\[[0-9A-Za-z_]]"
    assert common_classes(r"\D[^\d-][^\D]") == r"\P{Nd}[^\p{Nd}-][^[^0-9]]"
    assert common_classes(r"\W[^\w][\W_]") == r"[^\p{L}\p{N}_][^\p{L}\p{N}_][[^\p{L}\p{N}_]_]"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("library", LIBRARIES)
def test_all_schemas_regular_expressions_and_grammars(library: str) -> None:
    drawn, real = Tally(library), Tally(library)
    try_drawn(drawn, 500, 1)
    for _, schema in real_shapes():
        real.try_schema(schema)
    print(f"\ndrawn:\n{drawn.table()}\nreal shapes:\n{real.table()}")
    found = Counter(right_regex(library, pattern, seed) for seed, pattern in enumerate(regexes(200)))
    own = Counter(right_grammar(library, text, meaning, seed) for seed, (text, meaning) in enumerate(grammars(50)))
    print(f"regular expressions: {dict(found)}\ngrammars: {dict(own)}")
    assert (drawn.wrong, real.wrong, found[False], own[False]) == ([], [], 0, 0)
