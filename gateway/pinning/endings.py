"""Tells the shards how requests ended: only the gateway knows of tool calls, and of a conversation's name.

With it a shard's prefix cache learns when conversations go on. A message that is lost costs only that.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping

from alignedserve.control.rpc import TokenChannel, one_answer
from alignedserve.errors import UnavailableError
from alignedserve.gateway.ledger.calls import Answer, Call
from alignedserve.gateway.pinning.board import PIN_CALL
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc

logger = logging.getLogger(__name__)

TOGETHER_S = 0.02  # what ends within this time is sent in one message: each costs nearly 1 ms of a core
ANSWER_WITHIN_S = 1.0


class EndingNotes:
    """For one event loop. `channels`: to each shard, by its id. All shards are told: any may have the request."""

    def __init__(self, channels: Callable[[], Mapping[str, TokenChannel]]) -> None:
        self._channels = channels
        self._notes: list[kp.Ending] = []
        self._sending: set[asyncio.Task[None]] = set()

    def note(self, call: Call) -> None:
        """The reader of a call has finished."""
        if call.plan.cache is None or call.plan.probe or call.plan.id.startswith(PIN_CALL):
            return  # what the cluster asks itself is no conversation
        if not self._notes:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._send)
        took_s = time.monotonic() - call.arrival_s
        for answer in call.answers:
            if kind := _kind(answer):
                name = _session(call) if len(call.answers) == 1 else ""
                self._notes.append(kp.Ending(request_id=answer.request_id, kind=kind, session=name, took_s=took_s))

    def close(self) -> None:
        for task in self._sending:
            task.cancel()

    def _send(self) -> None:
        notes, self._notes = kp.Endings(endings=self._notes), []
        for channel in self._channels().values() if notes.endings else ():
            task = asyncio.get_running_loop().create_task(self._tell(channel, notes))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _tell(self, channel: TokenChannel, notes: kp.Endings) -> None:
        try:
            await one_answer(kp_grpc.PrefixCacheStub(channel).NoteEndings(notes, timeout=ANSWER_WITHIN_S))
        except UnavailableError as error:
            logger.debug("a shard was not told how requests ended: %s", error.message)


def _kind(answer: Answer) -> str:
    """How an answer ended, as shards know it; "" for one that was cancelled or has failed."""
    if answer.finish is None:
        return ""
    return "tool_calls" if answer.calls_tools else answer.finish.value


def _session(call: Call) -> str:
    """The conversation's name, which is another one for another salt."""
    if not call.session or not call.salt:
        return call.session
    return f"{hashlib.blake2b(call.salt, digest_size=4).hexdigest()}/{call.session}"
