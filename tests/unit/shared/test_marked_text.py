"""Text with markers in it: each at its place, whatever stop strings hold back or cut off; and what templates get."""

from __future__ import annotations

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.model import resolve_model
from alignedserve.text import CallArguments, ChatTemplate, MarkedText, StoppableText, Tokenizer
from alignedserve.text.call_arguments import marked
from alignedserve.text.user_text import Marks
from alignedserve.thinking import ThinkingLimit

TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
MARK = 2  # <|system|>


def shown(tokens: list[int], *stops: str) -> tuple[str, bool]:
    assert TOKENIZER is not None
    text = MarkedText(StoppableText(TOKENIZER, stops), {MARK: "<M>"})
    found = ""
    for token in tokens:
        found += text.push(token)
        if text.stopped:
            return found, True
    return found + text.finish(), False


def ids(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text)


@given(parts=st.lists(st.text(max_size=6), min_size=1, max_size=6))
def test_markers_stand_where_their_tokens_were(parts: list[str]) -> None:
    tokens = [token for part in parts for token in (MARK, *ids(part))][1:]
    for stops in ((), ("never there",), ("n", "ne", "x\x00y")):
        text, stopped = shown(tokens, *stops)
        if not stopped:
            assert text == "<M>".join(parts)
        else:
            assert "<M>".join(parts).startswith(text.removesuffix("<M>"))


def test_a_stop_string_is_found_across_a_marker_as_workers_find_it() -> None:
    assert shown([*ids("one a"), MARK, *ids("b two")], "ab") == ("one ", True)
    assert shown([*ids("one"), MARK, *ids(" ab")], "ab") == ("one<M> ", True)
    assert shown([*ids("one a"), MARK], "ab") == ("one a<M>", False)


# ---- the limit of reasoning

OPEN, CLOSE = (7,), (8, 9)


def forced(budget: int, begun: bool, *drawn: int) -> list[int]:
    """The tokens of an answer whose model draws `drawn`, where none is forced."""
    limit, tokens, draws = ThinkingLimit(budget, OPEN, CLOSE, begun), list[int](), list(drawn)
    while draws:
        token = limit.forced(tokens)
        assert token is None or limit.near(len(tokens))
        tokens.append(draws.pop(0) if token is None else token)
    return tokens


@pytest.mark.parametrize(
    ("budget", "begun", "drawn", "tokens"),
    [
        (2, True, [1, 1, 1, 1], [1, 1, 8, 9, 1, 1]),
        (0, True, [1, 1], [8, 9, 1, 1]),
        (2, False, [7, 1, 1, 1], [7, 1, 1, 8, 9, 1]),
        (2, False, [1, 1, 1, 1], [1, 1, 1, 1]),
        (4, True, [1, 8, 9, 1, 1, 1, 1], [1, 8, 9, 1, 1, 1, 1]),
        (9, True, [1, 1], [1, 1]),
    ],
)
def test_a_spent_budget_forces_the_end_of_reasoning(
    budget: int, begun: bool, drawn: list[int], tokens: list[int]
) -> None:
    assert forced(budget, begun, *drawn) == tokens


def test_what_is_forced_depends_on_the_tokens_alone() -> None:
    for tokens in product((1, 7, 8, 9), repeat=5):
        limit = ThinkingLimit(2, OPEN, CLOSE)
        if (token := limit.forced(tokens)) is not None:
            assert tokens[0] == 7
            assert token in CLOSE


# ---- what templates are given


def test_arguments_are_a_mapping_and_text() -> None:
    arguments = CallArguments(city="Bern", n=1)
    template = ChatTemplate(
        "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a.city }}|{{ a | tojson }}|{{ 'x' + a + 'y' }}|"
        "{{ a }}|{% for k, v in a | items %}{{ k }}={{ v }};{% endfor %}|{{ messages[0].tool_calls[0].id + a }}",
        {},
    )
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "i", "function": {"arguments": arguments}}]}
    text = json.dumps(arguments)
    expected = f"Bern|{text}|x{text}y|{text}|city=Bern;n=1;|i{text}"
    assert template.render([turn]) == expected
    written, marks = template.render_marked([turn], Marks(["<|end|>"]))
    assert marks.unmark(written) == expected


def test_every_text_in_a_value_is_marked() -> None:
    marks = Marks(["<|end|>"])
    value = marked({"<|end|>": ["<|end|>", {"a": CallArguments(b="<|end|>")}], "n": 1}, marks)
    assert "<|end|>" not in "".join(str.__str__(text) for text in (*value, value["<|end|>"][0]))
    assert isinstance(value["<|end|>"][1]["a"], CallArguments)
    assert value["n"] == 1
