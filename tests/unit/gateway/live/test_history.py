"""How requests are described for people who look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve.gateway.body.planning import CallPlan, PromptPlan
from alignedserve.gateway.body.requests import ReplyOptions
from alignedserve.gateway.ledger.calls import Answer, AnswerState, Call, caller, sent_request_id
from alignedserve.gateway.ledger.resume import Delivered
from alignedserve.gateway.live import history
from alignedserve.gateway.live.history import RecentRequests, SlowRequests, describe, requests_of
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import SamplingParams

PROMPT = PromptPlan((1, 2), SamplingParams(max_tokens=8))


def answers(*resume: Delivered, prompts: int = 1) -> list[Answer]:
    return Call(CallPlan("c", (PROMPT,) * prompts, ReplyOptions(), internal_id="c", resume=resume)).answers


def test_tokens_are_told_apart_by_their_epoch_and_their_gateway() -> None:
    (answer,) = answers()
    assert (describe(answer)["tokens_before"], describe(answer)["resumed_tokens"]) == (0, None)
    answer.tokens += [5, 6, 7]
    answer.next_epoch("decode-0 died")
    answer.tokens.append(8)
    assert (describe(answer)["tokens_before"], describe(answer)["resumed_tokens"]) == (3, None)


def test_a_resumed_call_says_how_many_tokens_its_client_had() -> None:
    first, second = answers(Delivered((5, 6)), Delivered((7,)), prompts=2)
    first.tokens.append(8)
    first.next_epoch("decode-0 died")
    assert (describe(first)["tokens_before"], describe(first)["resumed_tokens"]) == (3, 2)
    assert (describe(second)["tokens_before"], describe(second)["resumed_tokens"]) == (1, 1)


def test_an_answer_that_ended_before_a_token_has_waited_since_it_was_sent() -> None:
    (answer,) = answers()
    answer.sent()
    answer.sent_s -= 0.5
    answer.call.arrival_s -= 1.0
    assert describe(answer)["stages"] == {}  # open
    answer.state = AnswerState.ENDED
    found = describe(answer)
    assert found["stages"]["until_first_token"] == pytest.approx(found["took_s"] - 0.5, abs=0.01)
    answer.tokens.append(5)
    assert describe(answer)["stages"] == {}
    answer.next_epoch("decode-0 died")
    answer.state = AnswerState.ENDED
    assert describe(answer)["stages"] == {}  # it was not sent again


def test_the_last_reasons_of_losses_are_told_in_short() -> None:
    (answer,) = answers()
    for number in range(20):
        answer.next_epoch(f"{number} {'long' * 100}")
    found = describe(answer)
    assert (found["losses"], len(found["loss_reasons"])) == (20, history.MOST_REASONS)
    assert found["loss_reasons"][-1].startswith("19 long")
    assert max(map(len, found["loss_reasons"])) == history.MOST_REASON


def test_refused_calls_are_kept_apart_and_belong_to_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_REFUSED", 2)
    recent = RecentRequests()
    (answer,) = answers()
    recent.note(answer)
    for number in range(3):
        sent = sent_request_id.set(f"try-{number}")
        whose = caller.set(b"key")
        recent.refuse("the cluster is full")
        sent_request_id.reset(sent)
        caller.reset(whose)
    refused = recent.of(b"key")
    assert [one["x_request_id"] for one in refused] == ["try-2", "try-1"]
    assert refused[0].keys() == describe(answer).keys()
    assert [one["refused"] for one in recent.of(None)] == ["", *["the cluster is full"] * 2]
    assert [one["request_id"] for one in recent.of(b"")] == [answer.request_id]


def listed(recent: RecentRequests, **query: Any) -> list[str]:
    ledger: Any = SimpleNamespace(open_answers=lambda: (), answers_of=lambda name, owner: [])
    found = requests_of(ledger, recent, gw.RequestsQuery(whosever=True, most=50, **query))
    return [one["id"] for one in found]


def test_the_slowest_are_listed_after_newer_ones_have_pushed_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_REQUESTS", 2)
    recent = RecentRequests()
    for number, took_s in enumerate((9.0, 1.0, 2.0, 3.0)):
        name = f"c{number}"
        (answer,) = Call(CallPlan(name, (PROMPT,), ReplyOptions(), internal_id=name)).answers
        answer.call.arrival_s -= took_s
        answer.state = AnswerState.ENDED
        recent.note(answer)
    assert listed(recent) == ["c0", "c3", "c2", "c1"]
    assert listed(recent, newest=True) == ["c3", "c2"]
    assert listed(recent, id="c0") == ["c0"]


def test_the_slowest_are_kept_for_five_minutes_a_few_of_each_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_SLOW", 2)
    monkeypatch.setattr(history, "MOST_OWNERS", 2)
    now_s = [0.0]
    slow = SlowRequests(lambda: now_s[0])

    def kept(owner: bytes | None) -> list[float]:
        return sorted(one["took_s"] for one in slow.of(owner))

    for owner, took_s in ((b"a", 2.0), (b"a", 1.0), (b"a", 3.0), (b"b", 0.5), (b"c", 9.0)):
        slow.note(owner, {"took_s": took_s})
    assert [kept(owner) for owner in (b"a", b"b", b"c", None)] == [[2.0, 3.0], [0.5], [], [0.5, 2.0, 3.0]]
    now_s[0] = 309.0
    slow.note(b"c", {"took_s": 9.0})
    assert kept(None) == [0.5, 2.0, 3.0, 9.0]
    now_s[0] = 310.0
    assert kept(None) == [9.0]
