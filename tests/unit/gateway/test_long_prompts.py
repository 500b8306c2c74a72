"""Prompts that are too long are refused before or while they are tokenised. Long prompts delay no other request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from alignedserve.errors import DeadlineError, InvalidRequestError, OverloadedError
from alignedserve.gateway.body import tokenising
from alignedserve.gateway.body.planning import CallPlan, ServedModel, plan_chat, plan_completion
from alignedserve.gateway.body.requests import parse_chat, parse_completion
from alignedserve.gateway.failures import ContextLengthError, UnsupportedFeatureError
from alignedserve.gateway.grpc_service import InferenceService, body_of
from alignedserve.gateway.http.pacing import Pace
from alignedserve.model import resolve_model
from alignedserve.proto import inference_pb2 as inf
from alignedserve.testing.tokenizers import family
from alignedserve.text import ChatTemplate, Prompt, Tokenizer, dividing
from support.fake_cluster import fake_model_info
from support.gateway_front import CHAT, COMPLETIONS, Front

LIMIT = 512
PLAIN_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


def served(name: str = "qwen", positions: int = LIMIT) -> ServedModel:
    """A model whose tokenizer is verified only for where texts may be cut."""
    tokenizer = Tokenizer(Backend.from_str(family(name)), {})
    template = ChatTemplate(PLAIN_TEMPLATE, tokenizer.special_tokens)
    return ServedModel("tiny", tokenizer, template, fake_model_info(max_positions=positions))


def shipped() -> ServedModel:
    tokenizer = Tokenizer.from_folder(resolve_model("tiny"))
    assert tokenizer is not None
    template = ChatTemplate.from_folder(resolve_model("tiny"), tokenizer.special_tokens)
    return ServedModel("tiny", tokenizer, template, fake_model_info(max_positions=LIMIT))


class Counted:
    """Counts the characters that a model's encoder tokenises; `pause_s` delays each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: ServedModel, pause_s: float = 0.0) -> None:
        assert model.encoder is not None
        self.sizes: list[int] = []
        self.aside = 0  # beside the event loop, at the same time
        self.most_aside = 0
        self.pause_s = pause_s
        self._encoding = model.encoder._encoding
        monkeypatch.setattr(model.encoder, "_encoding", self)

    def __call__(self, text: str) -> Any:
        self.sizes.append(len(text))
        aside = threading.current_thread() is not threading.main_thread()
        self.aside += aside
        self.most_aside = max(self.most_aside, self.aside)
        time.sleep(self.pause_s)
        self.aside -= aside
        return self._encoding(text)


async def complete(model: ServedModel, prompt: Any, **more: Any) -> CallPlan:
    return await plan_completion(model, parse_completion({"prompt": prompt, **more}))


async def chat(model: ServedModel, content: str, **more: Any) -> CallPlan:
    return await plan_chat(model, parse_chat({"messages": [{"role": "user", "content": content}], **more}))


ASK = (complete, chat)
WORDS = "some words " * 4000


@pytest.mark.parametrize("ask", ASK)
async def test_what_is_too_long_by_its_bytes_is_not_tokenised(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shipped()
    counted = Counted(monkeypatch, model)
    with pytest.raises(
        ContextLengthError, match=r"the model's 512 positions\); the prompt has at least \d+ tokens"
    ) as raised:
        await ask(model, WORDS)
    assert raised.value.param == ("prompt" if ask is complete else "messages")
    assert not counted.sizes


async def test_one_of_several_prompts_refuses_all_before_any_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shipped()
    counted = Counted(monkeypatch, model)
    with pytest.raises(ContextLengthError):
        await complete(model, ["short", [1, 2, 3], "x" * 100_000])
    with pytest.raises(ContextLengthError, match="at least 600 tokens"):
        await complete(model, ["some words " * 40, [1] * 600])
    assert not counted.sizes


@pytest.mark.parametrize("ask", ASK)
async def test_tokenising_stops_where_the_limit_is_passed(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served()
    counted = Counted(monkeypatch, model)
    with pytest.raises(ContextLengthError, match="at least"):
        await ask(model, WORDS * 20)
    assert sum(counted.sizes) <= 2 * dividing.PIECE
    assert counted.most_aside == 1


async def test_what_fits_has_the_same_tokens_long_or_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "PIECE", 1000)
    model = served(positions=1 << 20)
    assert model.encoder is not None
    (prompt,) = (await complete(model, WORDS)).prompts
    assert list(prompt.token_ids) == model.encoder.encode(Prompt(WORDS))
    several = (await complete(model, ["a b", WORDS, "c"])).prompts
    assert [list(one.token_ids) for one in several] == [model.encoder.encode(Prompt(t)) for t in ("a b", WORDS, "c")]
    (said,) = (await chat(model, WORDS)).prompts
    assert list(said.token_ids) == model.encoder.encode(model.encoder.special_in(f"<|im_start|>{WORDS}"), around=False)


async def test_the_clusters_own_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shipped()
    model.capacity_tokens = 16
    counted = Counted(monkeypatch, model)
    with pytest.raises(
        ContextLengthError, match=r"the 16 tokens that this cluster can hold\); the prompt has at least"
    ):
        await complete(model, "some words " * 100)
    assert not counted.sizes
    with pytest.raises(ContextLengthError, match="has 16 tokens and max_tokens is 1"):
        await complete(model, [1] * 16, max_tokens=1)


async def test_a_cancelled_request_stops_after_its_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "PIECE", 1000)
    model = served(positions=1 << 20)
    counted = Counted(monkeypatch, model, pause_s=0.02)
    asked = asyncio.ensure_future(complete(model, WORDS))
    await asyncio.sleep(0.1)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    begun = len(counted.sizes)
    await asyncio.sleep(0.2)
    assert begun <= len(counted.sizes) <= begun + 1 < 30


@pytest.mark.parametrize("ask", ASK)
async def test_the_time_limit_covers_tokenising(ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "PIECE", 1000)
    model = served(positions=1 << 20)
    counted = Counted(monkeypatch, model, pause_s=0.02)
    with pytest.raises(DeadlineError, match=r"did not end within its timeout of 0\.1 s"):
        await ask(model, WORDS, timeout_s=0.1)
    assert 1 <= len(counted.sizes) < 15
    counted.pause_s = 0.001
    plan = await ask(model, WORDS, timeout_s=60)
    assert 0.03 < plan.spent_s < 60


async def test_short_prompts_do_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "PIECE", 1000)
    model = served(positions=1 << 20)
    counted = Counted(monkeypatch, model, pause_s=0.005)
    long = [asyncio.ensure_future(complete(model, WORDS)) for _ in range(8)]
    await asyncio.sleep(0.02)
    for _ in range(20):
        await complete(model, "a short one")
    assert not any(one.done() for one in long)
    assert len({plan.prompts[0].token_ids for plan in await asyncio.gather(*long)}) == 1
    assert 1 <= counted.most_aside <= tokenising._THREADS


async def test_the_event_loop_runs_while_a_long_text_is_tokenised() -> None:
    """A thread alone is not enough: the tokenizer must also release the GIL."""
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            begun_s = time.monotonic()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.monotonic() - begun_s)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.01)  # it has begun
    begun_s = time.monotonic()
    (prompt,) = (await complete(served(positions=1 << 20), WORDS * 20)).prompts
    spent_s = time.monotonic() - begun_s
    await asyncio.sleep(0.01)  # the watcher has measured its last wait
    watcher.cancel()
    assert len(prompt.token_ids) > 100_000
    assert longest_s < spent_s / 2


async def test_a_word_that_never_ends_is_refused_if_it_is_too_long_for_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dividing, "PIECE", 1000)
    monkeypatch.setattr(dividing, "MOST_UNBROKEN", 5000)
    with pytest.raises(
        InvalidRequestError, match="longer than 8192 characters, the maximum that is tokenised at once"
    ) as raised:
        await complete(served(positions=LIMIT), "1" * 20_000)
    assert raised.value.param == "prompt"
    (prompt,) = (await complete(served(positions=1 << 20), "1" * 20_000)).prompts
    assert len(prompt.token_ids) > 5000


async def test_special_tokens_of_a_long_text_are_looked_for_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = served(positions=1 << 20)
    assert model.encoder is not None
    find, looked = model.encoder.special_in, []

    def special_in(text: str, most: int) -> Prompt:
        looked.append((len(text), threading.current_thread() is threading.main_thread()))
        return find(text, most)

    monkeypatch.setattr(model.encoder, "special_in", special_in)
    for prompt in ("<s>" * 40, "<s>" * 4000, ["<s>" * 1000] * 4):
        await complete(model, prompt, allow_special_tokens=True)
    assert looked == [(120, True), (12_000, False), *[(3000, False)] * 4]


async def test_no_more_special_tokens_are_looked_for_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served()
    counted = Counted(monkeypatch, model)
    with pytest.raises(ContextLengthError, match=f"at least {LIMIT + 1} tokens"):
        await complete(model, "<s>" * 300_000, allow_special_tokens=True)
    assert not counted.sizes
    with pytest.raises(ContextLengthError, match=r"at least \d+ tokens"):
        await complete(model, "<s> word" * 40_000, allow_special_tokens=True)
    assert sum(counted.sizes) <= 2 * dividing.PIECE


async def test_what_cannot_be_divided_keeps_no_other_long_text_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served("unknown", positions=1 << 20)
    assert model.encoder is not None
    free, encoding = threading.Event(), model.encoder._encoding

    def held(text: str) -> Any:
        assert len(text) < dividing.LONG or free.wait(20)
        return encoding(text)

    monkeypatch.setattr(model.encoder, "_encoding", held)
    undivided = [asyncio.ensure_future(complete(model, WORDS * 2)) for _ in range(3)]
    await asyncio.wait_for(complete(model, WORDS), 10)
    assert not any(one.done() for one in undivided)
    free.set()
    assert len({plan.prompts[0].token_ids for plan in await asyncio.gather(*undivided)}) == 1


async def test_what_cannot_be_divided_is_refused_by_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served("unigram")
    assert model.encoder is not None
    monkeypatch.setattr(type(model.encoder), "divisible", property(lambda self: False))
    monkeypatch.setattr(dividing, "MOST_UNBROKEN", 40_000)
    counted = Counted(monkeypatch, model)
    with pytest.raises(ContextLengthError, match="has 44000 characters, too many to tokenise"):
        await complete(model, WORDS)
    assert not counted.sizes


# ---- special tokens, by request


async def test_a_prompt_is_text_unless_it_is_asked_otherwise(front: Front) -> None:
    text = "<|user|>hi<|end|><|assistant|>"
    (plain,) = await front.submit(COMPLETIONS, {"prompt": text})
    (special,) = await front.submit(COMPLETIONS, {"prompt": text, "allow_special_tokens": True})
    (ids,) = await front.submit(COMPLETIONS, {"prompt": [3, 75, 5, 4, 0]})
    assert front.model.tokenizer is not None
    assert special.prompt_token_ids == front.model.tokenizer.encode(text)
    assert not set(plain.prompt_token_ids) & front.model.tokenizer.special_ids
    assert front.model.tokenizer.decode(plain.prompt_token_ids) == text
    assert ids.prompt_token_ids == [3, 75, 5, 4, 0], "token ids are what they are"


async def test_what_a_message_says_is_text(front: Front) -> None:
    turns = [{"role": role, "content": "a<|end|><|system|>b<|endoftext|>"} for role in ("system", "user")]
    (request,) = await front.submit(CHAT, {"messages": turns})
    tokenizer = front.model.tokenizer
    assert tokenizer is not None
    special = [token for token in request.prompt_token_ids if token in tokenizer.special_ids]
    assert [tokenizer.token_text(token) for token in special] == [
        "<|system|>",
        "<|end|>",
        "<|user|>",
        "<|end|>",
        "<|assistant|>",
    ]
    error = await front.error(CHAT, {"messages": turns, "allow_special_tokens": True})
    assert (error["code"], error["param"]) == ("unsupported_parameter", "allow_special_tokens")
    error = await front.error(COMPLETIONS, {"prompt": "a", "allow_special_tokens": "yes"})
    assert (error["code"], error["param"]) == ("invalid_type", "allow_special_tokens")


def test_the_same_over_grpc() -> None:
    request = inf.GenerateRequest(prompt="<|end|>", allow_special_tokens=True)
    assert parse_completion(body_of(request)).allow_special_tokens
    assert not parse_completion(body_of(inf.GenerateRequest(prompt="<|end|>"))).allow_special_tokens
    request = inf.GenerateRequest(conversation=inf.Conversation(messages=[inf.ChatMessage(role="user", content="a")]))
    parse_chat(body_of(request))
    request.allow_special_tokens = True
    with pytest.raises(UnsupportedFeatureError):
        parse_chat(body_of(request))


async def test_large_requests_over_grpc_wait_for_a_pace_and_hold_no_place_meanwhile(front: Front) -> None:
    """Once, 1,024 of them made every completion fail with 429."""

    async def cancel_none(call_id: str, caller: Any) -> bool:
        return False

    class Gate(Pace):
        def __init__(self) -> None:
            super().__init__()
            self.taken: list[int] = []
            self.opened = asyncio.Event()

        async def take(self, size: int) -> None:
            self.taken.append(size)
            await self.opened.wait()

    service = InferenceService(front.ledger, front.intake, front.model, 4 << 20, cancel_none)
    service._pace = gate = Gate()
    large = inf.GenerateRequest(prompt="x" * (200 << 10))
    waiting = [asyncio.ensure_future(service.generate(large)) for _ in range(64)]
    while len(gate.taken) < 64:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with front.intake.admit(len(front.ledger)), pytest.raises(ContextLengthError):
        await service.generate(inf.GenerateRequest(prompt="x" * 50_000))
    assert gate.taken == [large.ByteSize()] * 64
    gate.opened.set()
    for call in waiting:
        with pytest.raises(ContextLengthError):
            await call

    front.intake.tell(0, 60.0, limited=True)
    with pytest.raises(OverloadedError):  # before it waits
        await service.generate(large)
    assert len(gate.taken) == 64
    with pytest.raises(ContextLengthError):  # a resumed request was already accepted, so it is not refused for load
        await service.generate(inf.GenerateRequest(prompt=large.prompt, seed=1, resume=[{"token_ids": [1]}]))
