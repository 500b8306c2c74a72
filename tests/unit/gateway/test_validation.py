"""Every limit of the HTTP API: bad input gets OpenAI's error object, which names the field, and submits nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from alignedserve.gateway.body.requests import ChatRequest, CompletionRequest
from support.gateway_front import CHAT, COMPLETIONS, HI, Front

SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 5}, "model", "invalid_type"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.01}, "temperature", "invalid_value"),
    ({"temperature": 10**400}, "temperature", "invalid_json"),
    ({"temperature": [1]}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.5}, "top_p", "invalid_value"),
    ({"top_p": {}}, "top_p", "invalid_type"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 2.5}, "top_k", "invalid_type"),
    ({"top_k": True}, "top_k", "invalid_type"),
    ({"min_p": 1.1}, "min_p", "invalid_value"),
    ({"seed": "7"}, "seed", "invalid_type"),
    ({"seed": 1 << 63}, "seed", "invalid_value"),
    ({"seed": 1 << 70}, "seed", "invalid_type"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": -1}, "repetition_penalty", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"frequency_penalty": "0"}, "frequency_penalty", "invalid_type"),
    ({"logit_bias": []}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"5": True}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"2048": 1}}, "logit_bias", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": ["a", 5]}, "stop", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop", "invalid_value"),
    ({"stop": [str(number) for number in range(17)]}, "stop", "invalid_value"),
    ({"stop": "x" * 1025}, "stop", "invalid_value"),
    ({"stop_token_ids": 5}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": [True]}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [2048]}, "stop_token_ids", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "invalid_type"),
    ({"allowed_token_ids": [2048]}, "allowed_token_ids", "invalid_value"),
    ({"bad_words": "a"}, "bad_words", "invalid_type"),
    ({"bad_words": [""]}, "bad_words", "invalid_value"),
    ({"bad_words": [" "]}, "bad_words", "invalid_value"),
    ({"bad_words": ["a"] * 257}, "bad_words", "invalid_value"),
    ({"bad_words_ids": [[]]}, "bad_words_ids", "invalid_value"),
    ({"bad_words_ids": [5]}, "bad_words_ids", "invalid_type"),
    ({"bad_words_ids": [[5, 2048]]}, "bad_words_ids", "invalid_value"),
    ({"suppress_tokens": [-1]}, "suppress_tokens", "invalid_value"),
    ({"begin_suppress_tokens": ["a"]}, "begin_suppress_tokens", "invalid_type"),
    ({"forced_bos_token_id": "a"}, "forced_bos_token_id", "invalid_type"),
    ({"forced_eos_token_id": [2048]}, "forced_eos_token_id", "invalid_value"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size", "invalid_value"),
    ({"no_repeat_ngram_size": 2.0}, "no_repeat_ngram_size", "invalid_type"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", "invalid_value"),
    ({"skip_special_tokens": 0}, "skip_special_tokens", "invalid_type"),
    ({"spaces_between_special_tokens": "no"}, "spaces_between_special_tokens", "invalid_type"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "invalid_type"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"return_tokens_as_token_ids": "a"}, "return_tokens_as_token_ids", "invalid_type"),
    ({"min_length": 500, "max_tokens": 8}, "min_length", "invalid_value"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "continuous_usage_stats", "invalid_type"),
    ({"n": "2"}, "n", "invalid_type"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 17}, "n", "invalid_value"),
    ({"n": 1.0}, "n", "invalid_type"),
    ({"n": True}, "n", "invalid_type"),
    ({"stream": "true"}, "stream", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage", "invalid_type"),
    ({"return_token_ids": "yes"}, "return_token_ids", "invalid_type"),
    ({"include_timings": 0}, "include_timings", "invalid_type"),
    ({"timeout_s": 0}, "timeout_s", "invalid_value"),
    ({"timeout_s": -1}, "timeout_s", "invalid_value"),
    ({"wait_objective_s": 0}, "wait_objective_s", "invalid_value"),
    ({"wait_objective_s": -1.0}, "wait_objective_s", "invalid_value"),
    ({"wait_objective_s": 0.009}, "wait_objective_s", "invalid_value"),
    ({"wait_objective_s": 86_401}, "wait_objective_s", "invalid_value"),
    ({"wait_objective_s": 1e400}, "wait_objective_s", "invalid_json"),
    ({"wait_objective_s": "2"}, "wait_objective_s", "invalid_type"),
    ({"wait_objective_s": True}, "wait_objective_s", "invalid_type"),
    ({"priority": 1 << 63}, "priority", "invalid_value"),
    ({"priority": 0.5}, "priority", "invalid_type"),
    ({"priority": "1"}, "priority", "invalid_type"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 5.0}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": 1 << 40}, "max_tokens", "invalid_value"),
    ({"max_tokens": 512}, "max_tokens", "context_length_exceeded"),
]


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})])
@pytest.mark.parametrize(("body", "param", "code"), SAMPLING)
async def test_what_is_wrong_in_both_is_named(
    front: Front, path: str, base: dict[str, Any], body: dict[str, Any], param: str, code: str
) -> None:
    error = await front.error(path, {**base, **body})
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert error["param"] == (None if code == "invalid_json" else param)


TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {"5": "x"}}, "logit_bias[\"5\"] must be a number, not a string ('x')"),
    ({"logit_bias": {"7": 1, "5": None}}, 'logit_bias["5"] must be a number, not null'),
    ({"logit_bias": {"5": True}}, 'logit_bias["5"] must be a number, not a boolean (true)'),
    ({"logit_bias": {"5": -101}}, 'logit_bias["5"] must be between -100 and 100, got -101'),
    ({"logit_bias": [1]}, "logit_bias must be an object of token ids and numbers, not an array (1 entries)"),
    ({"stop": [1]}, "stop[0] must be a string, not an integer (1)"),
    ({"stop": ["a", {}]}, "stop[1] must be a string, not an object (0 entries)"),
    ({"stop": 1.5}, "stop must be a string or an array of strings, not a number (1.5)"),
    ({"stop": ["a", ""]}, "stop[1] must have 1 to 1024 characters, got 0"),
    ({"stop": ""}, "stop must have 1 to 1024 characters, got 0"),
    ({"stop_token_ids": [3, "a"]}, "stop_token_ids[1] must be an integer between 0 and 2147483647, not a string ('a')"),
    (
        {"stop_token_ids": [3, 2**64]},
        "stop_token_ids[1] must be an integer between 0 and 2147483647, got about 1.84e+19",
    ),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] must be between 0 and 2147483647, got -1"),
    ({"prompt": [1, "a"]}, "prompt[1] must be an integer between 0 and 2147483647, not a string ('a')"),
    ({"prompt": [1, 2.0]}, "prompt[1] must be an integer between 0 and 2147483647, got 2.0"),
    ({"prompt": [2**70]}, "prompt[0] must be an integer between 0 and 2147483647, got about 1.18e+21"),
    ({"prompt": [[1, 2], [3, None]]}, "prompt[1][1] must be an integer between 0 and 2147483647, not null"),
    ({"prompt": [True]}, "prompt[0] must be text, a token id or an array of token ids, not a boolean (true)"),
    ({"prompt": ["a", 1]}, "prompt[1] must be text or an array of token ids, not an integer (1)"),
    ({"prompt": ["a", ""]}, "prompt[1] must not be empty"),
    (
        {"seed": 2**70},
        "seed must be an integer between -9223372036854775808 and 9223372036854775807, got about 1.18e+21",
    ),
    ({"max_tokens": 2.5}, "max_tokens must be an integer between 0 and 2147483647, got 2.5"),
    ({"max_tokens": 5.0}, "max_tokens must be an integer between 0 and 2147483647, got 5.0"),
    ({"max_tokens": "7"}, "max_tokens must be an integer between 0 and 2147483647, not a string ('7')"),
    ({"temperature": [1]}, "temperature must be a number, not an array (1 entries)"),
    ({"stream": 1}, "stream must be true or false, not an integer (1)"),
]


@pytest.mark.parametrize(("body", "text"), TEXTS)
async def test_the_text_names_the_value_at_fault_and_what_it_is(front: Front, body: dict[str, Any], text: str) -> None:
    error = await front.error(COMPLETIONS, {"prompt": "hi", **body})
    assert (error["message"], error["param"]) == (text, next(iter(body)))


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["hi", ""]}, "prompt", "invalid_value"),
        ({"prompt": {}}, "prompt", "invalid_type"),
        ({"prompt": 5}, "prompt", "invalid_type"),
        ({"prompt": True}, "prompt", "invalid_type"),
        ({"prompt": [True]}, "prompt", "invalid_type"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": [1, True]}, "prompt", "invalid_type"),
        ({"prompt": [1, 2.0]}, "prompt", "invalid_type"),
        ({"prompt": [[1, None]]}, "prompt", "invalid_type"),
        ({"prompt": [[[1]]]}, "prompt", "invalid_type"),
        ({"prompt": ["a", None]}, "prompt", "invalid_type"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [5, 2048]}, "prompt", "invalid_value"),
        ({"prompt": [1 << 62]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 9}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 8, "n": 9}, "prompt", "invalid_value"),
        ({"prompt": [5] * 512}, "prompt", "context_length_exceeded"),
        ({"prompt": [5] * 600, "max_tokens": 1}, "prompt", "context_length_exceeded"),
        ({"prompt": [5] * 500, "max_tokens": 13}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "word " * 2000}, "prompt", "context_length_exceeded"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": "a", "echo": "yes"}, "echo", "invalid_type"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
        ({"prompt": "a", "logprobs": -1}, "logprobs", "invalid_value"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_type"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of", "invalid_value"),
        ({"prompt": "a", "best_of": 3, "stream": True}, "best_of", "invalid_value"),
        ({"prompt": "a", "best_of": 17}, "best_of", "invalid_value"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
        ({"prompt": "a", "suffix": 5}, "suffix", "invalid_type"),
        ({"prompt": "a", "suffix": "b", "echo": True}, "echo", "invalid_value"),
        ({"prompt": [5], "suffix": "b"}, "suffix", "invalid_value"),
        ({"prompt": "a", "suffix": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "invalid_value"),
    ],
)
async def test_what_is_wrong_in_a_completion_is_named(
    front: Front, body: dict[str, Any], param: str, code: str
) -> None:
    error = await front.error(COMPLETIONS, body)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": {}}, "messages", "invalid_type"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
        ({"messages": [None]}, "messages[0]", "invalid_type"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0].role", "invalid_type"),
        ({"messages": [{"role": "bard", "content": "hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "function", "content": "hi"}]}, "messages[0].name", "missing_required_parameter"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": {"text": "hi"}}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": [{"text": "hi"}]}]},
            "messages[0].content[0].type",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
            "invalid_type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name", "invalid_type"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": HI, "max_completion_tokens": 5000}, "max_tokens", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages", "context_length_exceeded"),
        ({"messages": HI, "logprobs": 5}, "logprobs", "invalid_type"),
        ({"messages": HI, "top_logprobs": 5}, "top_logprobs", "invalid_value"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"messages": HI, "logprobs": True, "top_logprobs": True}, "top_logprobs", "invalid_type"),
    ],
)
async def test_what_is_wrong_in_a_chat_is_named(front: Front, body: dict[str, Any], param: str, code: str) -> None:
    error = await front.error(CHAT, body)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "a",}',
        b'{"prompt": NaN}',
        b'{"temperature": Infinity}',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 5_000,
        b'{"prompt": 1e999}',
        b"\xef\xbb\xbf{}",
    ],
)
async def test_malformed_json_is_refused(front: Front, path: str, body: bytes) -> None:
    error = await front.error(path, body)
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize("body", [[], "text", 5, None, True])
async def test_a_body_that_is_no_object_is_refused(front: Front, body: Any) -> None:
    assert (await front.error(COMPLETIONS, body))["code"] == "invalid_type"


async def test_an_unknown_model_does_not_exist(front: Front) -> None:
    for path, base in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})):
        error = await front.error(path, {**base, "model": "gpt-5"}, 404)
        assert error["code"] == "model_not_found"
        assert "gpt-5" in error["message"]
        assert "tiny" in error["message"]


async def test_a_body_over_the_limit_is_refused_before_it_is_read(front: Front) -> None:
    error = await front.error(COMPLETIONS, {"prompt": "a" * 300_000}, 413)
    assert error["code"] == "request_too_large"
    assert "0.25 MiB" in error["message"]


async def test_a_body_that_grows_over_the_limit_is_refused(front: Front) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 65_536

    answer = await front.client.post(COMPLETIONS, content=endless())
    assert answer.status_code == 413
    assert sent <= 12  # as much again is discarded, so that a slightly larger body still gets its answer


async def test_unknown_paths_and_methods_get_error_objects(front: Front) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", COMPLETIONS, 405), ("DELETE", "/v1/models", 405)):
        answer = await front.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answer.headers["allow"] == "GET, HEAD"
    answer = await front.client.put("/tokenize")
    assert "PUT /tokenize is not allowed; use POST" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [[True]] * 100_000}),
        (CompletionRequest, {"prompt": [[None] * 100_000]}),
        (CompletionRequest, {"prompt": [1, *["a"] * 100_000]}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 100_000}),
        (CompletionRequest, {"prompt": "a", "stop": [5] * 100_000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(number): "a" for number in range(100_000)}}),
        (ChatRequest, {"messages": [{}] * 100_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 100_000}]}),
    ],
)
def test_a_body_with_very_many_mistakes_becomes_few_errors(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """All errors are built before the first is shown."""
    with pytest.raises(ValidationError) as errors:
        kind.model_validate(body)
    assert errors.value.error_count() <= 2
