"""Answers that go on with the conversation's last message, the assistant's."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.planning import ServedModel, plan_chat
from alignedserve.gateway.body.requests import parse_chat
from alignedserve.gateway.dialects.model_dialects import choose_dialects
from alignedserve.text import ChatTemplate, PromptEncoder, Tokenizer
from support.fake_cluster import fake_model_info
from support.gateway_front import CHAT, HI, TINY, Front

FOUND = Tokenizer.from_folder(TINY)
assert FOUND is not None
TOKENIZER: Tokenizer = FOUND
TURN = "{% for m in messages %}<|user|>{{ WHAT }}<|end|>{% endfor %}{% if add_generation_prompt %}NEW{% endif %}"
THINKS = TURN.replace("WHAT", "'<think></think>' ~ m.content.split('</think>')[-1].lstrip('\\n')")


def begun(text: str) -> list[dict[str, Any]]:
    return [*HI, {"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("what", "content", "end"),
    [
        ("m.content", "It is", "It is"),
        ("m.content", "It is ", "It is "),
        ("m.content", "", "<|user|>"),
        ("m.content | trim", "It is \n", "It is"),
        ("m.content.strip() ~ '.'", "It is", "It is"),
        ("m.content.split('</think>')[-1]", "a</think>It is", "<|user|>It is"),
        ("m.content ~ m.content", "It is", "It is"),
    ],
)
def test_a_prompt_ends_where_the_last_content_does(what: str, content: str, end: str) -> None:
    template = ChatTemplate(TURN.replace("WHAT", what), TOKENIZER.special_tokens)
    prompt = PromptEncoder(TOKENIZER, template).of_begun_answer(template, begun(content))
    assert prompt.text.endswith(end)
    assert "NEW" not in prompt.text
    assert [prompt.text[a:b] for a, b in prompt.specials] == ["<|user|>", "<|end|>", "<|user|>"]


def test_a_special_token_that_the_client_writes_is_text() -> None:
    template = ChatTemplate(TURN.replace("WHAT", "m.content"), TOKENIZER.special_tokens)
    prompt = PromptEncoder(TOKENIZER, template).of_begun_answer(template, begun("a<|end|>b"))
    assert prompt.text.endswith("<|user|>a<|end|>b")
    assert len(prompt.specials) == 3


def test_a_template_that_drops_the_last_message() -> None:
    template = ChatTemplate("{{ messages[0].content }}", TOKENIZER.special_tokens)
    with pytest.raises(InvalidRequestError, match="does not write the last message"):
        PromptEncoder(TOKENIZER, template).of_begun_answer(template, begun("a"))


async def test_a_chat_and_its_tokens_end_with_the_last_message(front: Front) -> None:
    body = {"messages": begun("It is"), "continue_final_message": True}
    (spec,) = await front.submit(CHAT, {**body, "add_generation_prompt": False})
    text = TOKENIZER.decode(spec.prompt_token_ids, skip_special=False)
    assert text.endswith("<|end|><|assistant|>It is")
    answer = (await front.client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == spec.prompt_token_ids
    (new,) = await front.submit(CHAT, {"messages": begun("It is")})
    assert TOKENIZER.decode(new.prompt_token_ids, skip_special=False) == f"{text}<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": 5}, "continue_final_message"),
        ({"continue_final_message": True, "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"continue_final_message": True, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        (
            {
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "content": "a",
                        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                    },
                ],
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
    ],
)
async def test_what_cannot_be_continued(front: Front, fields: dict[str, Any], param: str) -> None:
    error = await front.error(CHAT, {"messages": begun("a"), **fields})
    assert error["param"] == param


def thinking_model(template: str, reasoning: str) -> ServedModel:
    own = ChatTemplate(template, TOKENIZER.special_tokens)
    dialects = choose_dialects("none", reasoning, chat_template=template, tokenizer=TOKENIZER)
    return ServedModel("tiny", TOKENIZER, own, fake_model_info(), dialects=dialects)


async def test_reasoning_is_over_in_an_answer_that_has_begun() -> None:
    model = thinking_model(THINKS, "deepseek_r1")
    body = {"messages": begun("It is"), "continue_final_message": True, "thinking_token_budget": 5}
    plan = await plan_chat(model, parse_chat(body))
    assert plan.reading is None
    assert plan.prompts[0].sampling.thinking is None
    assert (await plan_chat(model, parse_chat({"messages": HI}))).reading is not None


async def test_messages_of_gpt_oss_cannot_be_continued() -> None:
    model = thinking_model(THINKS, "harmony")
    with pytest.raises(InvalidRequestError, match="continue_final_message is not supported: the answers of gpt-oss"):
        await plan_chat(model, parse_chat({"messages": begun("a"), "continue_final_message": True}))
