"""Checks of the OpenAI API: `ROWS[name](world)` calls a real server, and compares with `transformers`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import PreTrainedModel

from alignedserve import __version__
from alignedserve.testing.reference import greedy, load_reference, logprobs
from alignedserve.text import Tokenizer

PROMPT = "Return a list of"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
EMOJI = "😀"
PAGE = "https://page.example"
TOLERANCE = 1e-3


@dataclass
class World:
    """A server, and the model that it serves in `transformers`."""

    url: str
    folder: Path
    reference: PreTrainedModel = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _likeliest: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reference = load_reference(self.folder)
        tokenizer = Tokenizer.from_folder(self.folder)
        assert tokenizer is not None
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def greedy(self, prompt: str | Sequence[int], tokens: int) -> list[int]:
        ids = tuple(self.encode(prompt) if isinstance(prompt, str) else prompt)
        if len(self._known.get(ids, ())) < tokens:
            self._known[ids] = greedy(self.reference, ids, tokens)
        return self._known[ids][:tokens]

    def likeliest(self, prompt: str | Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The most likely token in place of each of `tokens`, by one forward pass over them."""
        ids = tuple(self.encode(prompt) if isinstance(prompt, str) else prompt)
        key = (*ids, *tokens)
        if key not in self._likeliest:
            self._likeliest[key] = self.logprobs(key)[len(ids) - 1 : -1].argmax(dim=-1).tolist()
        return self._likeliest[key]

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        return logprobs(self.reference, tokens)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=120.0)

    def ask(self, path: str = "completions", **body: Any) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def refused(self, path: str = "completions", **body: Any) -> tuple[int, str]:
        """Status and code."""
        answer = self.post(path, body)
        return answer.status_code, answer.json()["error"]["code"]

    def stream(self, path: str = "completions", **body: Any) -> list[dict[str, Any]]:
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def both(self, **body: Any) -> tuple[str, list[int], str]:
        """Text, tokens and finish reason of the first answer, which must be the same streamed and not."""
        (whole,) = self.ask(**body)["choices"]
        parts = [event["choices"][0] for event in self.stream(**body)]
        found = whole["text"], whole["token_ids"], whole["finish_reason"]
        assert "".join(part["text"] for part in parts) == found[0]
        assert [token for part in parts for token in part["token_ids"]] == found[1]
        assert [part["finish_reason"] for part in parts[-2:]] in ([None, found[2]], [found[2]])
        return found


Row = Callable[[World], None]
ROWS: dict[str, Row] = {}


def row(check: Row) -> Row:
    ROWS[check.__name__] = check
    return check


@row
def greedy_tokens_text_and_usage(world: World) -> None:
    answer = world.ask(prompt=PROMPT, max_tokens=20, **GREEDY)
    (choice,) = answer["choices"]
    prompt, tokens = world.encode(PROMPT), world.greedy(PROMPT, 20)
    assert (choice["token_ids"], answer.get("prompt_token_ids")) == (tokens, prompt)
    assert (choice["text"], choice["finish_reason"]) == (world.tokenizer.decode(tokens), "length")
    usage = answer["usage"]
    total = len(prompt) + 20
    assert [usage[f"{what}_tokens"] for what in ("prompt", "completion", "total")] == [len(prompt), 20, total]


@row
def a_stream_and_its_usage(world: World) -> None:
    *events, last = world.stream(prompt=PROMPT, max_tokens=20, stream_options={"include_usage": True}, **GREEDY)
    assert len(events) > 1
    choices = [event["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == world.greedy(PROMPT, 20)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 20)
    assert {json.dumps(event.get("usage")) for event in events} == {"null"}


@row
def token_ids_for_a_prompt(world: World) -> None:
    (choice,) = world.ask(prompt=world.encode(PROMPT), max_tokens=8, **GREEDY)["choices"]
    assert choice["token_ids"] == world.greedy(PROMPT, 8)


@row
def several_prompts_in_their_order(world: World) -> None:
    prompts = [PROMPT, "Raise a", "Open the file"]
    choices = world.ask(prompt=prompts, max_tokens=6, **GREEDY)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["token_ids"] for choice in choices] == [world.greedy(prompt, 6) for prompt in prompts]


@row
def a_chat_streamed_to_the_openai_package(world: World) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What does len do?"}]
    asked: dict[str, Any] = {"model": "surface", "messages": messages, "max_completion_tokens": 24, "temperature": 0}
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key="unused") as client:
        whole = client.chat.completions.create(**asked)
        *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    choices = [chunk.choices[0] for chunk in chunks]
    assert whole.choices[0].message.content
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    assert choices[0].delta.role == "assistant"
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage
    ids = world.ask("chat/completions", **asked, return_token_ids=True)
    prompt, tokens = ids["prompt_token_ids"], ids["choices"][0]["token_ids"]
    assert tokens == world.greedy(prompt, len(tokens))


@row
def calls_of_tools_with_the_openai_package(world: World) -> None:
    place = {"type": "object", "properties": {"place": {"enum": ["Bern", "Oslo"]}, "day": {"type": "integer"}}}
    parameters = {**place, "required": ["place", "day"], "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": parameters, "strict": True}}]
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Bern?"}]
    choice = {"type": "function", "function": {"name": "look"}}
    asked: dict[str, Any] = {"model": "surface", "tools": tools, "tool_choice": choice, "temperature": 0}
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key="unused") as client:
        whole = client.chat.completions.create(messages=messages, max_tokens=120, **asked).choices[0]
        with client.chat.completions.stream(messages=messages, max_tokens=120, **asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert (whole.finish_reason, streamed.finish_reason) == ("tool_calls", "tool_calls")
        calls: Any = [whole.message.tool_calls, streamed.message.tool_calls]
        (call,), (same,) = calls
        assert (call.function.name, call.function.arguments) == (same.function.name, same.function.arguments)
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, sorted(arguments)) == ("look", ["day", "place"])
        assert arguments["place"] in ("Bern", "Oslo")
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "5 degrees"}
        more = client.chat.completions.create(
            model="surface", messages=[*messages, whole.message, result], tools=tools, max_tokens=8
        )
        assert more.usage is not None
        assert more.usage.completion_tokens <= 8


@row
def echo(world: World) -> None:
    spelled = f"naïve {EMOJI} ✂️ {PROMPT}"
    text, tokens, _ = world.both(prompt=spelled, max_tokens=4, echo=True, **GREEDY)
    expected = world.greedy(spelled, 4)
    assert (text, tokens) == (spelled + world.tokenizer.decode(expected), expected)


@row
def no_tokens_but_the_prompt_and_its_scores(world: World) -> None:
    answer = world.ask(prompt=PROMPT, max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == (PROMPT, "length", 0)
    tokens = world.encode(PROMPT)
    scores, truth = choice["logprobs"], world.logprobs(tokens)
    assert scores["token_logprobs"][0] is None
    expected = [float(truth[at, token]) for at, token in enumerate(tokens[1:])]
    assert scores["token_logprobs"][1:] == pytest.approx(expected, abs=TOLERANCE)
    begins = [len(world.tokenizer.decode(tokens[:at])) for at in range(len(tokens))]
    assert scores["text_offset"] == begins


@row
def no_tokens_and_no_echo(world: World) -> None:
    assert world.refused(prompt=PROMPT, max_tokens=0) == (400, "invalid_value")


@row
def logprobs_of_a_completion(world: World) -> None:
    (choice,) = world.ask(prompt=PROMPT, max_tokens=6, logprobs=3, **GREEDY)["choices"]
    prompt, tokens = world.encode(PROMPT), world.greedy(PROMPT, 6)
    truth = world.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
    for at, (token, line) in enumerate(zip(tokens, truth, strict=True)):
        values, ids = torch.topk(line, 3)
        top = {world.tokenizer.token_text(int(best)): float(v) for best, v in zip(ids, values, strict=True)}
        assert choice["logprobs"]["token_logprobs"][at] == pytest.approx(float(line[token]), abs=TOLERANCE)
        assert choice["logprobs"]["top_logprobs"][at] == pytest.approx(top, abs=TOLERANCE)


@row
def logprobs_of_a_chat(world: World) -> None:
    body = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 5, "top_logprobs": 2}
    answer = world.ask("chat/completions", **body, logprobs=True, **GREEDY)
    prompt, (choice,) = answer["prompt_token_ids"], answer["choices"]
    tokens = world.greedy(prompt, 5)
    truth = world.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
    entries = choice["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in entries] == [world.tokenizer.piece(token) for token in tokens]
    assert [entry["logprob"] for entry in entries] == pytest.approx(
        [float(line[token]) for line, token in zip(truth, tokens, strict=True)], abs=TOLERANCE
    )
    best = [[world.tokenizer.token_text(int(t)) for t in torch.topk(line, 2).indices] for line in truth]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in entries] == best


@row
def logit_bias(world: World) -> None:
    prompt = world.encode(PROMPT)
    first, second = torch.topk(world.logprobs(prompt)[-1], 2).indices.tolist()
    (choice,) = world.ask(prompt=PROMPT, max_tokens=1, logit_bias={first: -100}, **GREEDY)["choices"]
    assert choice["token_ids"] == [second]
    (choice,) = world.ask(prompt=PROMPT, max_tokens=3, logit_bias={900: 100}, **GREEDY)["choices"]
    assert choice["token_ids"] == [900] * 3


@row
def penalties(world: World) -> None:
    prompt, tokens = world.encode(PROMPT), list[int]()
    for _ in range(12):
        line = world.logprobs([*prompt, *tokens])[-1].clone()
        for token in set(tokens):
            line[token] -= 0.5 + 1.5 * tokens.count(token)
        tokens.append(int(line.argmax()))
    assert tokens != world.greedy(PROMPT, 12)
    found = world.both(prompt=PROMPT, max_tokens=12, presence_penalty=0.5, frequency_penalty=1.5, **GREEDY)
    assert found[1] == tokens


@row
def filters_that_leave_one_token(world: World) -> None:
    """Each setting alone limits sampling at a high temperature to the most likely token."""
    hot = {**GREEDY, "temperature": 2.0, "seed": 5}
    expected = world.greedy(PROMPT, 12)
    for only in ({"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-6}):
        assert world.ask(prompt=PROMPT, max_tokens=12, **hot, **only)["choices"][0]["token_ids"] == expected, only
    assert world.ask(prompt=PROMPT, max_tokens=12, **hot)["choices"][0]["token_ids"] != expected


@row
def a_min_p_that_leaves_some(world: World) -> None:
    line = world.logprobs(world.encode(PROMPT))[-1]
    kept = set(torch.nonzero(line >= line.max() + math.log(0.3)).flatten().tolist())
    assert 1 < len(kept) < 8
    body = {**GREEDY, "temperature": 1.0, "min_p": 0.3, "seed": 3}
    choices = world.ask(prompt=PROMPT, max_tokens=1, n=16, **body)["choices"]
    drawn = {choice["token_ids"][0] for choice in choices}
    assert len(drawn) > 1
    assert drawn <= kept


@row
def a_seed_repeats_an_answer(world: World) -> None:
    def drawn(seed: int) -> tuple[str, list[int], str]:
        return world.both(prompt=PROMPT, max_tokens=16, **{**GREEDY, "temperature": 1.0}, seed=seed)

    assert drawn(7) == drawn(7) != drawn(8)


@row
def two_answers(world: World) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, **GREEDY, "temperature": 1.0, "seed": 11}
    answer = world.ask(n=2, **body)
    (alone,) = world.ask(**body)["choices"]
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert texts[0] == alone["text"] != texts[1]
    assert answer["usage"]["completion_tokens"] == 24
    streamed = ["", ""]
    for event in world.stream(n=2, **body):
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


@row
def a_stop_string_that_chunks_cut(world: World) -> None:
    """The stop string begins in one token and ends in another. No part of it is sent."""
    whole = world.tokenizer.decode(world.greedy(PROMPT, 20))
    pieces = [world.tokenizer.decode([token]) for token in world.greedy(PROMPT, 3)]
    stop = pieces[0][-2:] + pieces[1] + pieces[2][:2]
    before = whole.index(stop)
    text, tokens, finish = world.both(prompt=PROMPT, max_tokens=20, stop=["never", stop], **GREEDY)
    assert (text, tokens, finish) == (whole[:before], world.greedy(PROMPT, 3), "stop")


@row
def what_only_looked_like_a_stop_string(world: World) -> None:
    pieces = world.tokenizer.decode(world.greedy(PROMPT, 20))
    text, _, finish = world.both(prompt=PROMPT, max_tokens=20, stop=pieces[1:9] + "?", **GREEDY)
    assert (text, finish) == (pieces, "length")


@row
def a_stop_token(world: World) -> None:
    tokens = world.greedy(PROMPT, 4)
    text, found, finish = world.both(prompt=PROMPT, max_tokens=20, stop_token_ids=tokens[-1:], **GREEDY)
    assert (text, found, finish) == (world.tokenizer.decode(tokens[:-1]), tokens, "stop")


def spelled_by_bytes(world: World, data: bytes) -> dict[str, Any]:
    """A body whose answer is these bytes, one token each: the bias orders them, and a penalty excludes earlier ones."""
    tokens = [
        next(t for t in range(world.tokenizer.vocab_size) if world.tokenizer.piece(t) == bytes([b])) for b in data
    ]
    bias = {token: 100 - 25 * place for place, token in enumerate(tokens)}
    return {"prompt": PROMPT, "max_tokens": len(tokens), "logit_bias": bias, "repetition_penalty": 100.0, **GREEDY}


@row
def an_emoji_of_four_tokens(world: World) -> None:
    body = spelled_by_bytes(world, EMOJI.encode())
    assert world.both(**body)[0] == EMOJI
    assert {event["choices"][0]["text"] for event in world.stream(**body)} <= {"", EMOJI}
    text, tokens, finish = world.both(**{**body, "stop": EMOJI, "max_tokens": 9})
    assert (text, len(tokens), finish) == ("", 4, "stop")


@row
def half_a_character(world: World) -> None:
    text, tokens, finish = world.both(**spelled_by_bytes(world, EMOJI.encode()[:3]))
    assert (len(tokens), finish) == (3, "length")
    assert text == EMOJI.encode()[:3].decode(errors="replace")


@row
def models(world: World) -> None:
    (model,) = httpx.get(f"{world.url}/v1/models", timeout=30.0).json()["data"]
    assert model["id"] == "surface"
    assert world.refused(model="other", prompt=PROMPT) == (404, "model_not_found")
    assert (model["root"], model["parent"], model["max_model_len"]) == ("surface", None, 512)
    assert [permission["object"] for permission in model["permission"]] == ["model_permission"]


@row
def tokens_that_may_not_follow(world: World) -> None:
    """As `generate` of transformers chooses them."""
    prompt = world.encode(PROMPT)
    first = world.greedy(PROMPT, 4)
    options: dict[str, Any] = {
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[first[0]], first[2:4]],
        "suppress_tokens": [first[1]],
        "begin_suppress_tokens": [first[3]],
        "forced_eos_token_id": 7,
    }
    ids = torch.tensor([prompt])
    output = world.reference.generate(  # type: ignore[operator]  # transformers' own mixin, untyped
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None,
        pad_token_id=0, **options,
    )  # fmt: skip
    expected = output[0, len(prompt) :].tolist()
    assert expected[-1] == 7
    assert world.both(prompt=PROMPT, max_tokens=24, **options, **GREEDY)[1] == expected
    (choice,) = world.ask(prompt=PROMPT, max_tokens=6, allowed_token_ids=[5, 900], **GREEDY)["choices"]
    assert set(choice["token_ids"]) <= {5, 900}
    words = [world.tokenizer.decode([token]) for token in first]
    text, _, _ = world.both(prompt=PROMPT, max_tokens=24, bad_words=[words[0].strip()], **GREEDY)
    assert not text.startswith(words[0])


@row
def a_prompts_logprobs(world: World) -> None:
    answer = world.ask(prompt=PROMPT, max_tokens=1, prompt_logprobs=2, **GREEDY)
    tokens, truth = world.encode(PROMPT), world.logprobs(world.encode(PROMPT))
    none, *found = answer["choices"][0]["prompt_logprobs"]
    assert none is None
    for token, line, entries in zip(tokens[1:], truth, found, strict=False):
        assert entries[str(token)]["logprob"] == pytest.approx(float(line[token]), abs=TOLERANCE)
        assert entries[str(token)]["rank"] == int((line >= line[token]).sum())
        assert {str(int(best)) for best in torch.topk(line, 2).indices} <= set(entries)
    assert len(found) == len(tokens) - 1


@row
def logprobs_of_listed_tokens(world: World) -> None:
    asked: dict[str, Any] = {
        "max_tokens": 1,
        "logprobs": 1,
        "logprob_token_ids": [900, 5],
        "return_tokens_as_token_ids": True,
    }
    (choice,) = world.ask(prompt=PROMPT, **asked, **GREEDY)["choices"]
    line = world.logprobs(world.encode(PROMPT))[-1]
    best = int(line.argmax())
    expected = {f"token_id:{token}": float(line[token]) for token in (900, 5, best)}
    assert choice["logprobs"]["top_logprobs"][0] == pytest.approx(expected, abs=TOLERANCE)


@row
def the_best_of_some(world: World) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "logprobs": 0, "seed": 3, **GREEDY, "temperature": 1.0}
    every = world.ask(n=4, **body)["choices"]
    ranked = sorted(every, key=lambda choice: sum(choice["logprobs"]["token_logprobs"]), reverse=True)
    best = world.ask(best_of=4, n=2, **body)["choices"]
    assert [choice["token_ids"] for choice in best] == [choice["token_ids"] for choice in ranked[:2]]


@row
def a_truncated_prompt(world: World) -> None:
    whole = world.encode(PROMPT)
    answer = world.ask(prompt=PROMPT, max_tokens=4, truncate_prompt_tokens=3, **GREEDY)
    assert answer["prompt_token_ids"] == whole[-3:]
    assert answer["choices"][0]["token_ids"] == world.greedy(whole[-3:], 4)


@row
def tokens_and_their_text(world: World) -> None:
    counted = httpx.post(f"{world.url}/tokenize", json={"prompt": PROMPT}, timeout=30.0).json()
    assert (counted["tokens"], counted["count"]) == (world.encode(PROMPT), len(world.encode(PROMPT)))
    back = httpx.post(f"{world.url}/detokenize", json={"tokens": counted["tokens"]}, timeout=30.0)
    assert back.json() == {"prompt": PROMPT}


@row
def small_endpoints(world: World) -> None:
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{world.url}/ping", timeout=30.0)
        assert (answer.status_code, answer.content) == (200, b"")
    assert httpx.get(f"{world.url}/version", timeout=30.0).json() == {"version": __version__}
    assert httpx.get(f"{world.url}/load", timeout=30.0).json()["server_load"] >= 0
    assert world.refused("embeddings", model="surface", input="a") == (400, "unsupported_parameter")


@row
def a_request_id_comes_back_once(world: World) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    for sent in ("mine-7", "mine-7"):
        answer = httpx.post(f"{world.url}/v1/completions", json=body, headers={"X-Request-Id": sent}, timeout=30.0)
        assert answer.status_code == 200
        assert answer.headers.get_list("x-request-id") == [sent]
    assert len(world.post("completions", body).headers.get_list("x-request-id")) == 1


@row
def a_page_that_may_call(world: World) -> None:
    """Needs `gateway.cors_origins`."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for page, status in ((PAGE, 200), ("https://evil.example", 400)):
        answer = httpx.options(f"{world.url}/v1/completions", headers={"Origin": page, **asked}, timeout=30.0)
        assert answer.status_code == status
    answer = httpx.get(f"{world.url}/v1/models", headers={"Origin": PAGE}, timeout=30.0)
    assert answer.headers["access-control-allow-origin"] == PAGE
