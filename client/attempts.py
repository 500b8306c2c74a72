"""One call over as many connections as it takes: what was delivered before one broke is not asked for again."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import grpc

from alignedserve.client.calls import Call
from alignedserve.client.failures import may_go_on
from alignedserve.errors import AlignedServeError, DeadlineError
from alignedserve.proto import inference_pb2 as pb

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0
_LEAST_TIMEOUT_S = 0.001


class Attempts:
    """`call` is the one to send next; `take` each chunk of a stream, `again` whatever it fails with.

    `patience_s` is how long it may take from a failure to the next token, in seconds; 0: the first failure is final.
    """

    def __init__(self, call: Call[Any], patience_s: float) -> None:
        self.call = call
        self.request_id: str | None = getattr(call.message, "request_id", "") or None
        self.complete = False  # the last chunk has come
        self._first = call
        self._patience_s = patience_s
        self._deadline_s = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        self._seed: int | None = None  # in use since the first chunk
        self._max_tokens: int | None = None  # as well
        self._delivered: dict[int, pb.Delivered] = {}
        self._failing_since_s: float | None = None
        self._failures = 0

    def take(self, chunk: pb.GenerateChunk) -> None:
        """Note what it delivers, and take out what an earlier connection's first chunk has delivered."""
        self.request_id = chunk.request_id
        if self._seed is not None:
            chunk.ClearField("prompt_token_ids")
        elif chunk.HasField("seed"):
            self._seed = chunk.seed
            self._max_tokens = chunk.max_tokens if chunk.HasField("max_tokens") else None
        delivered = self._delivered.setdefault(chunk.choice.index, pb.Delivered())
        delivered.token_ids.extend(chunk.choice.token_ids)
        delivered.finish_reason = chunk.choice.finish_reason
        if chunk.choice.token_ids:
            self._failures, self._failing_since_s = 0, None
        self.complete = chunk.HasField("usage")

    def again(self, error: grpc.RpcError) -> float | None:
        """Seconds to wait before `call` is sent, which goes on with this one. None: the failure is final."""
        now_s = time.monotonic()
        begun = bool(self._failures or self._delivered)
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        tired = now_s - self._failing_since_s >= self._patience_s
        # Without its seed (a server that does not tell) an answer that has begun cannot go on as it began.
        if tired or self._late(now_s) or not may_go_on(error, begun=begun) or (self._delivered and self._seed is None):
            return None
        wait_s = min(_FIRST_WAIT_S * 2.0**self._failures, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)
        self._failures += 1
        self.call = self._next_call(now_s + wait_s)
        return wait_s

    def error(self, error: grpc.RpcError) -> AlignedServeError:
        """The typed error for a failure that is final."""
        if self._late(time.monotonic()):  # whatever was tried last
            limit_s = self._first.timeout_s
            ids = {"request_id": self.request_id} if self.request_id else {}
            return DeadlineError(f"the call did not end within its {limit_s:g} s", address=self._first.address, **ids)
        return self._first.error(error, self.request_id)

    def _late(self, now_s: float) -> bool:
        return self._deadline_s is not None and now_s >= self._deadline_s

    def _next_call(self, now_s: float) -> Call[Any]:
        message = pb.GenerateRequest()
        message.CopyFrom(self._first.message)
        message.request_id = self.request_id or ""
        if self._seed is not None:
            message.seed = self._seed
        if self._max_tokens is not None:
            message.max_tokens = self._max_tokens
        message.resume.extend(self._delivered.get(index, pb.Delivered()) for index in range(message.n or 1))
        if self._deadline_s is None:
            return replace(self._first, message=message)
        message.timeout_s = max(self._deadline_s - now_s, _LEAST_TIMEOUT_S)
        return replace(self._first, message=message, timeout_s=message.timeout_s)
