"""Which submissions carry their prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from alignedserve.control.convert import key_from_proto, keys_to_proto
from alignedserve.gateway.body.planning import CallPlan, PromptPlan
from alignedserve.gateway.body.requests import ReplyOptions
from alignedserve.gateway.ledger import submitter
from alignedserve.gateway.ledger.calls import Answer, Call
from alignedserve.gateway.ledger.submitter import Submitter
from alignedserve.gateway.spec_source import SpecSource
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import GrammarKind, GrammarSpec, RequestKey, SamplingParams


class Port:
    gateway_id = "gateway-0"
    address = "127.0.0.1:1"
    down_for_s = 0.0

    def __init__(self) -> None:
        self.sent: list[gw.RequestSpecs] = []

    def submit(self, requests: Sequence[pb.RequestHead], specs: bytes) -> bool:
        self.sent.append(gw.RequestSpecs.FromString(specs))
        return True

    def cancel(self, keys: Sequence[RequestKey]) -> bool:
        return True

    def ask(self, keys: Sequence[RequestKey]) -> bool:
        return True


def answers(tokens: int = 10, n: int = 1) -> list[Answer]:
    prompt = PromptPlan(tuple(range(tokens)), SamplingParams())
    return Call(CallPlan("call", (prompt,), ReplyOptions(), n=n)).answers


def sends(port: Port, submits: Submitter, some: list[Answer]) -> list[list[int]]:
    """The prompts that the submission of these answers carries."""
    submits.submit(some)
    return [list(spec.prompt_token_ids) for spec in port.sent[-1].requests]


def test_prompts_are_sent_until_one_has_waited_and_again_once_one_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    port, submits = Port(), Submitter()
    submits.attach(port)
    first = answers()
    assert sends(port, submits, first) == [list(range(10))]
    first[0].sent_s -= submitter._AT_ONCE_S
    assert [spec.prompt_token_ids for spec in submits.specs(first)] == [list(range(10))]
    second = answers()
    assert sends(port, submits, second) == []
    second[0].sent_s = time.monotonic()
    submits.specs(second)
    assert sends(port, submits, answers()) == [list(range(10))]
    again = answers()
    again[0].next_epoch()
    assert sends(port, submits, again) == []
    monkeypatch.setattr(submitter, "_MOST_SENT_TOKENS", 9)
    assert sends(port, submits, answers()) == []


async def test_large_grammars_are_read_in_messages_of_a_bounded_size() -> None:
    """gRPC refuses messages of 64 MiB, and a reader asks for many requests at once."""
    port, submits = Port(), Submitter()
    submits.attach(port)
    grammar = GrammarSpec(GrammarKind.REGEX, "a" * (1 << 20))
    plan = CallPlan("call", (PromptPlan((1,), SamplingParams(grammar=grammar)),), ReplyOptions(), n=16)
    group = Call(plan).answers
    assert sends(port, submits, group) == []
    by_key = {answer.key: answer for answer in group}
    ledger = SimpleNamespace(specs=lambda keys: submits.specs([by_key[key] for key in keys]))
    source = SpecSource(ledger)  # type: ignore[arg-type]
    read = [message async for message in source.ReadSpecs(keys_to_proto(by_key), None)]  # type: ignore[arg-type]
    assert [key_from_proto(spec.key) for message in read for spec in message.requests] == list(by_key)
    assert max(message.ByteSize() for message in read) < 8 << 20


def test_what_is_sent_is_what_would_be_read() -> None:
    port, submits = Port(), Submitter()
    submits.attach(port)
    group = answers(n=3)
    assert sends(port, submits, group) == [list(range(10)), [], []]
    read = submits.specs(group)
    assert [spec.key for spec in read] == [answer.key for answer in group]
    for sent, spec in zip(port.sent[-1].requests, read, strict=True):
        assert (sent.key.request_id, sent.group_id, sent.gateway_address) == (
            spec.key.request_id,
            spec.group_id,
            spec.gateway_address,
        )
        assert abs(sent.timings.since_ns - time.time_ns()) < 5e9
