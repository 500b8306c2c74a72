"""Sends the ledger's submissions (by group), cancels and questions to the scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from alignedserve.control.convert import spec_to_proto
from alignedserve.gateway.ledger.calls import Answer, AnswerState
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import RequestKey, RequestSpec

_KEPT_CANCELS = 8192
_AT_ONCE_S = 0.02  # from the submission to the read of its prompt, if the prompt did not have to wait
_MOST_SENT_TOKENS = 8192  # longer prompts are read; their prefill takes much longer than the read
_MOST_SENT_BYTES = 1 << 20  # of a group, whose members each have the grammar


class SchedulerPort(Protocol):
    """The link to the scheduler. While it is down, each method does nothing and returns False."""

    gateway_id: str
    address: str

    @property
    def down_for_s(self) -> float:
        """Seconds since the link was last up, or since it was created; 0 while it is up."""

    def submit(self, requests: Sequence[pb.RequestHead], specs: bytes) -> bool: ...

    def cancel(self, keys: Sequence[RequestKey]) -> bool: ...

    def ask(self, keys: Sequence[RequestKey]) -> bool: ...


class Submitter:
    """Answers that cannot be sent now stay UNSENT, and cancels are kept, until `resend`.

    A new request's prompt is sent with its submission unless the last prompt that a worker read had waited for its
    prefill. This saves a round trip before the first token. Other prompts are read when their prefill begins.
    """

    def __init__(self) -> None:
        self._port: SchedulerPort | None = None
        self._unsent_cancels: list[RequestKey] = []
        self._begins_at_once = True  # whether the last prompt that a worker read had not waited

    def attach(self, port: SchedulerPort) -> None:
        self._port = port

    @property
    def down_for_s(self) -> float:
        return 0.0 if self._port is None else self._port.down_for_s

    def submit(self, answers: Iterable[Answer]) -> None:
        """Sends the answers that are UNSENT. Answers without tokens are sent together with those to the same prompt, as
        a group that shares the prompt's blocks. Each answer with tokens is sent by itself.
        """
        groups: dict[str, list[Answer]] = {}
        for answer in answers:
            if answer.state is AnswerState.UNSENT:
                group = answer.request_id if answer.tokens else f"{answer.group_id}/{answer.epoch}"
                groups.setdefault(group, []).append(answer)
        for members in groups.values():
            self._submit_group(members)

    def cancel(self, answers: Iterable[Answer]) -> None:
        """Cancels the answers that were sent, now or when the link is up again."""
        keys = [RequestKey(answer.request_id, answer.sent_epoch) for answer in answers if answer.sent_epoch is not None]
        if keys and (self._port is None or not self._port.cancel(keys)):
            self._unsent_cancels = (self._unsent_cancels + keys)[-_KEPT_CANCELS:]

    def ask(self, answers: Iterable[Answer]) -> None:
        """Asks the scheduler which of these it does not know. Without a link it does nothing."""
        keys = [answer.key for answer in answers]
        if keys and self._port is not None:
            self._port.ask(keys)

    def resend(self, answers: Iterable[Answer]) -> None:
        """The link is up (again): sends kept cancels, then all answers without a token in their epoch.

        Answers that were already sent in their epoch get a new epoch.
        """
        keys, self._unsent_cancels = self._unsent_cancels, []
        if keys and self._port is not None:
            self._port.cancel(keys)
        again = [answer for answer in answers if answer.state is not AnswerState.RUNNING]
        for answer in again:
            if answer.state is AnswerState.SUBMITTED:  # whether the scheduler received it is unknown
                answer.next_epoch("the link to the scheduler broke")
        self.submit(again)

    def _submit_group(self, group: Sequence[Answer]) -> None:
        port = self._port
        if port is None:
            return
        heads = [answer.head(port.gateway_id, len(group)) for answer in group]
        if port.submit(heads, self._sent_specs(port, group)):
            for answer in group:
                answer.sent()

    def _sent_specs(self, port: SchedulerPort, group: Sequence[Answer]) -> bytes:
        """The serialised specifications to send with a submission; b"" if they are to be read."""
        first = group[0]  # in a later epoch the scheduler first asks the pool for KV
        if first.epoch or not self._begins_at_once or len(first.prompt.token_ids) > _MOST_SENT_TOKENS:
            return b""
        now_s = time.monotonic()
        found = _with_one_prompt(answer.spec(port.gateway_id, port.address, now_s) for answer in group)
        sent = gw.RequestSpecs(requests=map(spec_to_proto, found)).SerializeToString()
        return sent if len(sent) <= _MOST_SENT_BYTES else b""

    def specs(self, answers: Iterable[Answer]) -> list[RequestSpec]:
        """The specifications for a worker, of the answers that were sent. Only the first of a group has the prompt."""
        sent = [answer for answer in answers if answer.state is not AnswerState.UNSENT]
        if self._port is None or not sent:
            return []
        self._begins_at_once = time.monotonic() - sent[-1].sent_s < _AT_ONCE_S
        port = self._port
        return _with_one_prompt(answer.spec(port.gateway_id, port.address, answer.sent_s) for answer in sent)


def _with_one_prompt(specs: Iterable[RequestSpec]) -> list[RequestSpec]:
    """The specifications, of which only the first of each group keeps its prompt."""
    found: list[RequestSpec] = []
    for spec in specs:
        if found and spec.group_id == found[-1].group_id:
            spec.prompt_token_ids = []
        found.append(spec)
    return found
