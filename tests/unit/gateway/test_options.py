"""Options of vLLM's and transformers' APIs: what reaches the cluster, and what an answer looks like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from alignedserve.client.messages import prompt_request
from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.requests import parse_completion
from alignedserve.gateway.grpc_service import body_of
from alignedserve.request import FinishReason, RequestSpec, TokenLogprobs
from alignedserve.text import PromptEncoder, Tokenizer
from alignedserve.text.infill import infill_tokens
from support.fake_cluster import FakeCluster, fake_model_info, playing
from support.gateway import RunningGateway
from support.gateway_front import CHAT, COMPLETIONS, HI, TINY, Front

BASES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "hi"}, CHAT: {"messages": HI}}
EOS = 5


def tokenizer(*extra: str) -> Tokenizer:
    found = Tokenizer.from_folder(TINY)
    assert found is not None
    found.backend.add_tokens([AddedToken(text, normalized=False) for text in extra])
    return found


# ---- what reaches the cluster


@pytest.mark.parametrize("path", BASES)
async def test_exclusions_reach_the_cluster(front: Front, path: str) -> None:
    body = {
        "allowed_token_ids": [7, 8],
        "bad_words_ids": [[3], [4, 5], [0]],
        "suppress_tokens": [9],
        "begin_suppress_tokens": [10],
        "forced_bos_token_id": 11,
        "forced_eos_token_id": [12, 13],
        "no_repeat_ngram_size": 3,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    (spec,) = await front.submit(path, {**BASES[path], **body})
    sampling = spec.sampling
    assert (sampling.allowed_token_ids, sampling.suppress_tokens) == ((7, 8), (9,))
    assert sampling.bad_words_ids == ((3,), (4, 5)), "an end token alone stays allowed, as in transformers"
    assert (sampling.begin_suppress_tokens, sampling.no_repeat_ngram_size) == ((10,), 3)
    assert (sampling.forced_bos_token_id, sampling.forced_eos_token_id) == ((11,), (12, 13))
    assert (sampling.skip_special_tokens, sampling.spaces_between_special_tokens) == (False, False)


async def test_a_bad_word_is_forbidden_at_the_beginning_and_after_a_space(front: Front) -> None:
    text = tokenizer()
    (spec,) = await front.submit(COMPLETIONS, {"prompt": "hi", "bad_words": ["list", " of the"]})
    expected = [text.encode(word, special_tokens=False) for word in ("list", " list", "of the", " of the")]
    assert set(spec.sampling.bad_words) <= {tuple(ids) for ids in expected}
    assert tuple(expected[0]) in spec.sampling.bad_words
    assert tuple(expected[2]) in spec.sampling.bad_words
    spaced = [ids for bare, ids in (expected[:2], expected[2:]) if len(ids) == len(bare) and ids[0] != bare[0]]
    assert {tuple(ids) for ids in spaced} <= set(spec.sampling.bad_words)
    assert spaced


async def test_words_are_tokenised_once_for_all_prompts(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []
    own = Tokenizer.encode_each

    def counted(text: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
        asked.append(words)
        return own(text, words)

    monkeypatch.setattr(Tokenizer, "encode_each", counted)
    specs = await front.submit(COMPLETIONS, {"prompt": ["a", "b", "c"], "bad_words": ["list"], "min_length": 3})
    assert asked == [["list", " list"]]
    assert len(specs) == len({spec.sampling.seed for spec in specs}) == 3
    assert {spec.sampling.bad_words for spec in specs} == {specs[0].sampling.bad_words}


async def test_defaults_of_a_model_hold_until_a_request_sets_them(front: Front) -> None:
    defaults = {
        "no_repeat_ngram_size": 4,
        "suppress_tokens": [7],
        "bad_words_ids": [[8, 9]],
        "forced_eos_token_id": [5],
        "min_new_tokens": 3,
    }
    front.model.info = fake_model_info(generation_defaults=defaults)
    (spec,) = await front.submit(COMPLETIONS, {"prompt": "hi"})
    sampling = spec.sampling
    assert (sampling.no_repeat_ngram_size, sampling.suppress_tokens, sampling.min_tokens) == (4, (7,), 3)
    assert (sampling.bad_words_ids, sampling.forced_eos_token_id) == (((8, 9),), (5,))
    off = {"no_repeat_ngram_size": 0, "suppress_tokens": [], "bad_words_ids": [], "forced_eos_token_id": []}
    (spec,) = await front.submit(COMPLETIONS, {"prompt": "hi", "min_tokens": 0, **off})
    sampling = spec.sampling
    assert (sampling.no_repeat_ngram_size, sampling.suppress_tokens, sampling.min_tokens) == (0, (), 0)
    assert (sampling.bad_words_ids, sampling.forced_eos_token_id) == ((), ())


@pytest.mark.parametrize(
    ("defaults", "body", "least"),
    [
        ({}, {"min_length": 12}, 2),
        ({}, {"min_length": 4}, 0),
        ({}, {"min_length": 99, "min_tokens": 3}, 3),
        ({"min_length": 12}, {}, 2),
        ({"min_length": 400}, {}, 8),  # a model's is cut to max_tokens
        ({"min_length": 400, "min_new_tokens": 1}, {}, 1),
        ({"min_new_tokens": 7}, {"min_length": 12}, 2),
    ],
)
async def test_a_least_length_counts_the_prompt(
    front: Front, defaults: dict[str, Any], body: dict[str, Any], least: int
) -> None:
    front.model.info = fake_model_info(generation_defaults=defaults)
    (spec,) = await front.submit(COMPLETIONS, {"prompt": [7] * 10, "max_tokens": 8, **body})
    assert spec.sampling.min_tokens == least


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"truncate_prompt_tokens": 3}, [18, 19, 20]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 20}, list(range(1, 21))),
        ({"truncate_prompt_tokens": -1}, list(range(1, 21))),
    ],
)
async def test_a_prompt_is_truncated(front: Front, body: dict[str, Any], prompt: list[int]) -> None:
    (spec,) = await front.submit(COMPLETIONS, {"prompt": list(range(1, 21)), **body})
    assert spec.prompt_token_ids == prompt


async def test_a_prompt_that_is_too_long_is_truncated_to_what_leaves_room(front: Front) -> None:
    long = "Return the list of values. " * 150  # short enough to be tokenised at once
    whole = tokenizer().encode(long)
    (spec,) = await front.submit(COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 12})
    assert spec.prompt_token_ids == whole[-500:]
    text = front.model.tokenizer
    assert text is not None
    text.special_tokens = {"bos_token": text.backend.id_to_token(whole[0]) or ""}
    (spec,) = await front.submit(COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 12})
    assert spec.prompt_token_ids == [whole[0], *whole[-499:]], "the token that begins a text is kept"
    (spec,) = await front.submit(COMPLETIONS, {"prompt": whole[:500], "truncate_prompt_tokens": 3})
    assert spec.prompt_token_ids == whole[497:500], "token ids are taken as they are"
    (spec,) = await front.submit(CHAT, {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": 99})
    assert len(spec.prompt_token_ids) == 99
    (spec,) = await front.submit(CHAT, {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": -1})
    assert len(spec.prompt_token_ids) == 384, "a quarter is for the answer"
    assert (await front.error(COMPLETIONS, {"prompt": long}))["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "{0}def a({1}): pass{2}"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "{0}def a({1}): pass{2}"),
        (("[PREFIX]", "[SUFFIX]"), "{1}): pass{0}def a("),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "{0}def a({1}): pass{2}"),
    ],
)
@pytest.mark.parametrize("special", [False, True])
async def test_a_suffix_is_written_with_the_models_tokens(
    tokens: tuple[str, ...], expected: str, special: bool
) -> None:
    text, expected = tokenizer(), expected.format(*tokens)
    text.backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in tokens])
    text.special_ids |= {text.backend.token_to_id(token) for token in tokens if special}
    assert infill_tokens(text) is not None
    front = Front(tokenizer=text, info=fake_model_info(vocab_size=4096))
    (spec,) = await front.submit(COMPLETIONS, {"prompt": "def a(", "suffix": "): pass"})
    assert text.backend.decode(spec.prompt_token_ids, skip_special_tokens=False).removeprefix("<s>") == expected
    ids = [text.backend.token_to_id(token) for token in tokens]
    assert [token for token in spec.prompt_token_ids if token in ids] == [
        text.backend.token_to_id(token) for token in sorted(tokens, key=expected.index)
    ]
    if special:  # a user's text does not spell them
        (spec,) = await front.submit(COMPLETIONS, {"prompt": f"a{tokens[1]}", "suffix": "b"})
        assert spec.prompt_token_ids.count(ids[1]) == 1


async def test_without_such_tokens_a_suffix_is_refused(front: Front) -> None:
    error = await front.error(COMPLETIONS, {"prompt": "a", "suffix": "b"})
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert await front.submit(COMPLETIONS, {"prompt": "a", "suffix": ""})


# ---- what an answer looks like


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


async def ask(gateway: RunningGateway, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def events(gateway: RunningGateway, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as http:
        answer = await http.post(path, json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one END")])
async def test_a_stop_string_may_be_part_of_the_text(
    gateway: RunningGateway, cluster: FakeCluster, include: bool, text: str
) -> None:
    cluster.script = playing(ids("one "), ids("EN"), ids("D more"), ids(" and more"))
    body = {"prompt": "a", "stop": "END", "max_tokens": 40, "include_stop_str_in_output": include}
    (choice,) = (await ask(gateway, COMPLETIONS, body))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    streamed = await events(gateway, COMPLETIONS, body)
    assert "".join(event["choices"][0]["text"] for event in streamed) == text


async def test_special_tokens_may_be_part_of_the_text(gateway: RunningGateway, cluster: FakeCluster) -> None:
    text = tokenizer()
    shown = text.backend.id_to_token(EOS)
    assert EOS in text.special_ids
    cluster.script = playing(ids("one"), [EOS], ids(" two"))
    body: dict[str, Any] = {"prompt": "a", "ignore_eos": True, "max_tokens": 20}
    (hidden,) = (await ask(gateway, COMPLETIONS, body))["choices"]
    (whole,) = (await ask(gateway, COMPLETIONS, {**body, "skip_special_tokens": False}))["choices"]
    assert (hidden["text"], whole["text"]) == ("one two", f"one{shown} two")

    cluster.script = playing(ids("one"), [EOS], finish=FinishReason.STOP)
    asked = {"prompt": "a", "skip_special_tokens": False}
    (ended,) = (await ask(gateway, COMPLETIONS, asked))["choices"]
    (kept,) = (await ask(gateway, COMPLETIONS, {**asked, "include_stop_str_in_output": True}))["choices"]
    assert (ended["text"], kept["text"]) == ("one", f"one{shown}")


async def test_the_best_answers_have_the_highest_logprob_a_token(gateway: RunningGateway, cluster: FakeCluster) -> None:
    worth = {"a": -0.5, "b": -0.2, "c": -0.9, "d": -0.3}

    async def play(cluster: FakeCluster, spec: RequestSpec) -> None:
        number = int(spec.key.request_id.rpartition("-")[2])
        assert spec.sampling.logprobs == 0
        word = "abcd"[number]
        for turn in range(number + 1):  # a sum would put the shortest first
            finish = FinishReason.LENGTH if turn == number else None
            cluster.emit(spec, ids(word), finish=finish, logprobs=[TokenLogprobs(worth[word])])

    cluster.script = play
    body = {"prompt": "x", "n": 2, "best_of": 4, "max_tokens": 4}
    answer = await ask(gateway, COMPLETIONS, body)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "bb"), (1, "dddd")]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 1 + 2 + 3 + 4
    (best,) = (await ask(gateway, COMPLETIONS, {**body, "n": 1, "logprobs": 0}))["choices"]
    assert best["logprobs"]["token_logprobs"] == pytest.approx([-0.2, -0.2])


@pytest.mark.parametrize("path", BASES)
async def test_the_prompts_logprobs_come_in_vllms_format(
    gateway: RunningGateway, cluster: FakeCluster, path: str
) -> None:
    async def play(cluster: FakeCluster, spec: RequestSpec) -> None:
        assert spec.sampling.prompt_logprobs == 2
        assert spec.sampling.logprobs is None
        top = ((7, -0.1), (8, -0.2))
        found = [TokenLogprobs(-1.5, top, rank=4) for _ in spec.prompt_token_ids[1:]]
        cluster.emit(spec, ids("x"), finish=FinishReason.LENGTH, prompt_logprobs=found)

    cluster.script = play
    answer = await ask(gateway, path, {**BASES[path], "prompt_logprobs": 2, "return_token_ids": True, "max_tokens": 1})
    found = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    prompt = answer["prompt_token_ids"]
    assert len(found) == len(prompt)
    assert found[0] is None
    text = tokenizer()
    assert found[-1] == {
        str(prompt[-1]): {"logprob": -1.5, "rank": 4, "decoded_token": text.token_text(prompt[-1])},
        "7": {"logprob": pytest.approx(-0.1), "rank": 1, "decoded_token": text.token_text(7)},
        "8": {"logprob": pytest.approx(-0.2), "rank": 2, "decoded_token": text.token_text(8)},
    }


async def test_tokens_may_be_named_by_their_ids(gateway: RunningGateway, cluster: FakeCluster) -> None:
    async def play(cluster: FakeCluster, spec: RequestSpec) -> None:
        scored = [TokenLogprobs(-0.5, ((9, -0.5), (8, -1.0)))]
        cluster.emit(spec, [9], finish=FinishReason.LENGTH, logprobs=scored)

    cluster.script = play
    body = {"prompt": "a", "logprobs": 2, "return_tokens_as_token_ids": True, "max_tokens": 1}
    (choice,) = (await ask(gateway, COMPLETIONS, body))["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:9"]
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["token_id:9", "token_id:8"]
    chat = {"messages": HI, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "max_tokens": 1}
    (choice,) = (await ask(gateway, CHAT, chat))["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], bytes(entry["bytes"])) == ("token_id:9", tokenizer().piece(9))


@pytest.mark.parametrize("path", BASES)
async def test_usage_may_come_with_each_chunk(gateway: RunningGateway, cluster: FakeCluster, path: str) -> None:
    cluster.script = playing(ids("a"), ids("b"), ids("c"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await events(gateway, path, {**BASES[path], "max_tokens": 9, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], last["usage"]["completion_tokens"], last["choices"]) == (3, 3, [])
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


async def test_options_that_leave_no_token_are_a_400(gateway: RunningGateway, cluster: FakeCluster) -> None:
    async def play(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, error=InvalidRequestError("no token may follow"))

    cluster.script = play
    async with httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as http:
        answer = await http.post(COMPLETIONS, json={"prompt": "a", "allowed_token_ids": [7], "suppress_tokens": [7]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


def test_the_encoder_of_a_tokenizer_with_these_tokens_still_reads_text() -> None:
    text = tokenizer("[PREFIX]", "[SUFFIX]")
    encoder = PromptEncoder(text)
    assert text.decode(encoder.encode(encoder.special_in("def a("), around=False)) == "def a("


# ---- over gRPC, from the Python client


def test_options_of_the_python_client_are_the_fields_of_a_body() -> None:
    options: dict[str, Any] = {
        "allowed_token_ids": [7, 8],
        "bad_words": ["list", " of"],
        "bad_words_ids": [[3], [4, 5]],
        "suppress_tokens": [9],
        "begin_suppress_tokens": [10],
        "forced_bos_token_id": [11],
        "forced_eos_token_id": [12, 13],
        "no_repeat_ngram_size": 0,
        "min_length": 3,
        "logprobs": 1,
        "logprob_token_ids": [5],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": -1,
    }
    body = body_of(prompt_request("hi", None, options))  # type: ignore[arg-type]
    assert body == {"prompt": "hi", **options}
    request = parse_completion(body)
    assert (request.bad_words_ids, request.no_repeat_ngram_size) == (((3,), (4, 5)), 0)
    alone = {"bad_words": "list", "forced_eos_token_id": 12}
    assert body_of(prompt_request("hi", None, alone)) == {  # type: ignore[arg-type]
        "prompt": "hi",
        "bad_words": ["list"],
        "forced_eos_token_id": [12],
    }
