"""Fields that other servers read: each does what it asks for, or is a 400 that names it. What changes no answer is
accepted, and named in a header.
"""

from __future__ import annotations

import itertools
from typing import Any

import openai
import pytest

from alignedserve.gateway.body import refused
from alignedserve.gateway.body.requests import Unread
from support.gateway_front import CHAT, COMPLETIONS, HI, Front

HEADER = "x-alignedserve-ignored-fields"
NOTHING = ("", [], {}, False)
BASES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "hi"}, CHAT: {"messages": HI}}
TOOL = {"type": "function", "function": {"name": "f"}}

# Field: values that are refused, values that ask for what happens anyway (null always does).
BOTH: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "adapter": (("name",), NOTHING),
    "adapter_id": (("name",), NOTHING),
    "adapters": ((["name"],), NOTHING),
    "custom_logit_processor": (("a.b",), NOTHING),
    "dry_multiplier": ((0.8,), (0, 0.0)),
    "early_stopping": ((True, "never"), (False,)),
    "guided_decoding_backend": (("xgrammar",), ("auto", "")),
    "images": ((["AAAA"],), NOTHING),
    "input_ids": (([5, 6], []), ()),
    "length_penalty": ((0.5,), (1, 1.0)),
    "logit_processors": ((["a.b"],), NOTHING),
    "logits_processors": ((["a.b"],), NOTHING),
    "lora": (("name",), NOTHING),
    "lora_path": (("name",), NOTHING),
    "lora_request": (({"name": "a"},), NOTHING),
    "mirostat": ((2,), (0, 0.0)),
    "mm_processor_kwargs": (({"a": 1},), NOTHING),
    "multi_modal_data": (({"image": "AAAA"},), NOTHING),
    "num_beams": ((4,), (1, 1.0)),
    "prompt_embeds": (("AAAA",), NOTHING),
    "reasoning": (({"effort": "low"}, True), ({},)),
    "repetition_detection": (({"max_pattern_size": 3},), ({},)),
    "stop_regex": (("a+", ["a+"]), ("", [])),
    "max_length": ((20, 0), ()),
    "mirostat_mode": ((2,), (0, 0.0)),
    "return_hidden_states": ((True,), (False,)),
    "thinking": (({"type": "enabled", "budget_tokens": 1024},), ({"type": "disabled"},)),
    "typical_p": ((0.5,), (1, 1.0)),
    "use_beam_search": ((True,), (False,)),
    "verbosity": (("low", "high"), ("medium",)),
    "xtc_probability": ((0.5,), (0, 0.0)),
}
ONLY: dict[str, dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]] = {
    COMPLETIONS: {
        "chat_template_kwargs": (({"enable_thinking": False},), NOTHING),
        "enable_thinking": ((True, False), ()),
        "function_call": (({"name": "f"}, "f"), ("none", "auto")),
        "functions": (([{"name": "f"}],), ([],)),
        "include_reasoning": ((False, 1), (True,)),
        "parallel_tool_calls": (("yes", 1), (True, False)),
        "reasoning_effort": (("low", "none", "medium"), ()),
        "separate_reasoning": ((True,), (False,)),
        "thinking_token_budget": ((0, 100), ()),
        "tool_choice": (("required", {"type": "function", "function": {"name": "f"}}), ("none", "auto")),
        "tools": (([TOOL],), ([],)),
        "add_special_tokens": ((False,), (True,)),
        "messages": ((HI,), NOTHING),
    },
    CHAT: {
        "add_special_tokens": ((True,), (False,)),
        "allow_special_tokens": ((True,), (False,)),
        "audio": (({"voice": "a", "format": "wav"},), NOTHING),
        "best_of": ((2,), (1, 1.0)),
        "chat_template": (("{{ 1 }}",), NOTHING),
        "documents": (([{"text": "a"}],), NOTHING),
        "echo": ((True,), (False,)),
        "modalities": ((["text", "audio"],), (["text"], [])),
        "prompt": (("hi",), NOTHING),
        "suffix": (("end",), ("",)),
        "web_search_options": (({},), ()),
    },
}
OF_A_MESSAGE: dict[str, Any] = {
    "audio": {"id": "a"},
    "refusal": "no",
}
TABLE = {path: {**BOTH, **own} for path, own in ONLY.items()}
REFUSED = [(path, name, value) for path, fields in TABLE.items() for name in fields for value in fields[name][0]]


def test_the_table_has_every_field_that_is_refused() -> None:
    assert TABLE[COMPLETIONS].keys() == refused.COMPLETION.keys()
    assert TABLE[CHAT].keys() == refused.CHAT.keys()
    assert OF_A_MESSAGE.keys() == refused.MESSAGE.keys()


@pytest.mark.parametrize(("path", "name", "value"), REFUSED)
async def test_what_asks_for_something_is_refused_by_name(front: Front, path: str, name: str, value: Any) -> None:
    error = await front.error(path, {**BASES[path], name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"].startswith(f"{name} is not supported: ")


@pytest.mark.parametrize("path", BASES)
async def test_what_asks_for_what_happens_anyway_is_accepted(front: Front, path: str) -> None:
    columns = [(*harmless, None) for _, harmless in TABLE[path].values()]
    rows = [dict(zip(TABLE[path], row, strict=True)) for row in itertools.zip_longest(*columns)]
    for row in rows:
        answer = await front.client.post(path, json={**row, **BASES[path], "timeout_s": 0.01})
        assert answer.status_code == 408, answer.text
        assert HEADER not in answer.headers
    assert len(front.port.submitted) == len(rows)


@pytest.mark.parametrize(("name", "value"), OF_A_MESSAGE.items())
async def test_what_a_template_would_not_see_of_a_message_is_refused(front: Front, name: str, value: Any) -> None:
    turns = [*HI, {"role": "assistant", "content": "a", name: value}]
    error = await front.error(CHAT, {"messages": turns})
    assert (error["param"], error["code"]) == (f"messages[1].{name}", "unsupported_parameter")
    for nothing in (None, *NOTHING):
        await front.submit(CHAT, {"messages": [*HI, {"role": "assistant", "content": "a", name: nothing}]})


async def test_an_answer_goes_back_as_a_message_as_it_came(front: Front) -> None:
    """The message as the `openai` package dumps it."""
    turn = {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    answer = await front.client.post(CHAT, json={"messages": [*HI, turn], "timeout_s": 0.01})
    assert (answer.status_code, answer.headers[HEADER]) == (408, "messages.annotations")


# ---- honoured under another server's name


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize(
    ("body", "option", "value"),
    [
        ({"max_completion_tokens": 7}, "max_tokens", 7),
        ({"max_new_tokens": 7}, "max_tokens", 7),
        ({"max_tokens": 7, "max_completion_tokens": 7, "max_new_tokens": 7}, "max_tokens", 7),
        ({"min_new_tokens": 3}, "min_tokens", 3),
        ({"min_tokens": 3, "min_new_tokens": 3}, "min_tokens", 3),
        ({"n_predict": 7}, "max_tokens", 7),
        ({"sampling_seed": 5}, "seed", 5),
        ({"stop_sequences": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop_sequences": "a", "stop": []}, "stop", ("a",)),
        ({"repeat_penalty": 1.3}, "repetition_penalty", 1.3),
        ({"do_sample": False}, "temperature", 0.0),
        ({"do_sample": False, "temperature": 0}, "temperature", 0.0),
        ({"do_sample": True}, "temperature", 1.0),
        ({"do_sample": True, "temperature": 0.5}, "temperature", 0.5),
    ],
)
async def test_other_names_of_options_are_honoured(
    front: Front, path: str, body: dict[str, Any], option: str, value: float
) -> None:
    (spec,) = await front.submit(path, {**BASES[path], **body})
    assert getattr(spec.sampling, option) == value


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 5, "max_new_tokens": 6}, "max_new_tokens", "invalid_value"),
        ({"max_completion_tokens": 5, "max_new_tokens": 6}, "max_new_tokens", "invalid_value"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens", "invalid_type"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
        ({"max_new_tokens": True}, "max_new_tokens", "invalid_type"),
        ({"min_tokens": 1, "min_new_tokens": 2}, "min_new_tokens", "invalid_value"),
        ({"min_new_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
        ({"min_new_tokens": 1.5}, "min_new_tokens", "invalid_type"),
        ({"max_tokens": 5, "n_predict": 6}, "n_predict", "invalid_value"),
        ({"n_predict": -1}, "n_predict", "invalid_value"),
        ({"n": 1, "num_return_sequences": 2}, "num_return_sequences", "invalid_value"),
        ({"stop": "a", "stop_sequences": ["b"]}, "stop_sequences", "invalid_value"),
        ({"seed": 1, "sampling_seed": 2}, "sampling_seed", "invalid_value"),
        ({"no_stop_trim": True, "include_stop_str_in_output": False}, "no_stop_trim", "invalid_value"),
        ({"do_sample": "false"}, "do_sample", "invalid_type"),
        ({"do_sample": 0}, "do_sample", "invalid_type"),
        ({"do_sample": False, "temperature": 0.5}, "do_sample", "invalid_value"),
        ({"do_sample": True, "temperature": 0}, "do_sample", "invalid_value"),
    ],
)
async def test_other_names_are_checked_and_must_not_contradict(
    front: Front, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    error = await front.error(path, {**BASES[path], **body})
    assert (error["param"], error["code"]) == (param, code)


async def test_the_number_of_answers_has_another_name(front: Front) -> None:
    assert len(await front.submit(COMPLETIONS, {"prompt": "hi", "num_return_sequences": 3})) == 3


async def test_no_tokens_by_another_name_needs_echo(front: Front) -> None:
    error = await front.error(COMPLETIONS, {"prompt": "hi", "max_completion_tokens": 0})
    assert (error["param"], error["code"]) == ("max_tokens", "invalid_value")
    answer = await front.client.post(COMPLETIONS, json={"prompt": "hi", "max_completion_tokens": 0, "echo": True})
    assert answer.json()["choices"][0]["text"] == "hi"


# ---- fields that change no answer

UNREAD: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "metadata": ({"a": "b"}, ([], "a")),
    "prediction": ({"type": "content", "content": "a"}, ("a",)),
    "prompt_cache_key": ("a", (5,)),
    "prompt_cache_options": ({}, (True,)),
    "prompt_cache_retention": ("24h", (24,)),
    "safety_identifier": ("a", (["a"],)),
    "service_tier": ("auto", (1,)),
    "store": (True, ("true", 1)),
    "user": ("me", (5, {})),
}


@pytest.mark.parametrize("path", BASES)
async def test_what_changes_no_answer_is_accepted_and_named(front: Front, path: str) -> None:
    assert UNREAD.keys() == Unread.model_fields.keys()
    values = {name: value for name, (value, _) in UNREAD.items()}
    answer = await front.client.post(path, json={**BASES[path], **values, "timeout_s": 0.01})
    assert answer.status_code == 408
    assert set(answer.headers[HEADER].split(", ")) == UNREAD.keys()


@pytest.mark.parametrize("path", BASES)
async def test_what_changes_no_answer_is_checked_all_the_same(front: Front, path: str) -> None:
    for name, (_, wrong) in UNREAD.items():
        for value in wrong:
            error = await front.error(path, {**BASES[path], name: value})
            assert (error["param"], error["code"]) == (name, "invalid_type")


async def test_unknown_fields_are_ignored_and_named(front: Front) -> None:
    body = {
        "prompt": "hi",
        "max_tokens": 0,
        "echo": True,
        "user": "me",
        "store": True,
        "wéird\r\nname": 1,
        "other": None,
    }
    answer = await front.client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200
    assert answer.headers[HEADER] == "user, store, w%C3%A9ird%0D%0Aname"
    answer = await front.client.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 0, "echo": True})
    assert HEADER not in answer.headers
    within = {"stream": True, "stream_options": {"include_obfuscation": False}, "timeout_s": 0.01}
    answer = await front.client.post(CHAT, json={"messages": [{**HI[0], "weight": 1}] * 2, **within})
    assert answer.headers[HEADER] == "stream_options.include_obfuscation, messages.weight"


async def test_names_of_unknown_fields_never_make_a_header_that_proxies_refuse(front: Front) -> None:
    body = {"prompt": "hi", "max_tokens": 0, "echo": True} | {"字" * 64 + str(number): 1 for number in range(40)}
    answer = await front.client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200
    header = answer.headers[HEADER]
    assert 500 < len(header) < 2100
    assert header.endswith(", ...")


# ---- what the `openai` package sends

USUAL: dict[str, Any] = {
    "model": "tiny",
    "frequency_penalty": 0.5,
    "logit_bias": {"7": -100},
    "n": 2,
    "presence_penalty": 0.5,
    "seed": 7,
    "stop": ["\n\n", "END"],
    "temperature": 0.7,
    "top_p": 0.9,
    "user": "me",
}
USUAL_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "What does len return?"},
    ],
    "logprobs": True,
    "top_logprobs": 3,
    "max_completion_tokens": 8,
    "metadata": {"run": "1"},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prompt_cache_key": "a",
    "response_format": {"type": "text"},
    "safety_identifier": "a",
    "service_tier": "auto",
    "store": False,
    "tool_choice": "none",
    "verbosity": "medium",
}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_openai_package_usually_sends_is_taken(front: Front, stream: bool) -> None:
    asking = openai.AsyncOpenAI(api_key="unused", base_url="http://gateway/v1", http_client=front.client, max_retries=0)
    streaming: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    late = {"extra_body": {"timeout_s": 0.01}}
    with pytest.raises(openai.APIStatusError) as answer:
        await asking.chat.completions.create(**USUAL, **USUAL_CHAT, **streaming, **late)
    assert answer.value.status_code == 408, "no worker answers, but the request was accepted"
    with pytest.raises(openai.APIStatusError) as answer:
        await asking.completions.create(**USUAL, prompt=["a", "b"], max_tokens=8, logprobs=2, **streaming, **late)
    assert answer.value.status_code == 408
    chat, completion = front.port.submitted[:2], front.port.submitted[2:]
    assert len(completion) == 4
    for spec, scored in (*zip(chat, itertools.repeat(3)), *zip(completion, itertools.repeat(2))):
        sampling = spec.sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.7, 0.9, 8)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.5)
        assert (sampling.stop, sampling.logit_bias, sampling.logprobs) == (("\n\n", "END"), ((7, -100.0),), scored)
