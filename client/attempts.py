"""Retries of one call. Tokens delivered before a connection broke are not requested again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

import grpc

from alignedserve.client.calls import Call
from alignedserve.client.connections import Rotation
from alignedserve.client.failures import Failure, kind_of, retry_after_s
from alignedserve.client.types import ClientTimings
from alignedserve.errors import AlignedServeError, ConfigError, DeadlineError
from alignedserve.proto import inference_pb2 as pb

_LEAST_TIMEOUT_S = 0.001


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a client waits before it retries after a refusal, in seconds.

    The first wait is `first_s`. It doubles each time, up to `longest_s`, and is multiplied by a random number from 0.5
    to 1. If the server gives a longer time (Retry-After), the wait is that time and up to a tenth more. If that time
    exceeds `retry_after_limit_s`, there is no retry.
    """

    first_s: float = 0.5
    longest_s: float = 8.0
    retry_after_limit_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.longest_s or not self.retry_after_limit_s >= 0:
            raise ConfigError(f"a backoff needs 0 <= first_s <= longest_s and retry_after_limit_s >= 0, got {self}")

    def wait_s(self, failures: int, asked_s: float | None = None) -> float:
        """Seconds to wait before the next attempt, after `failures` earlier waits. `asked_s` is the server's time."""
        drawn_s = min(self.first_s * 2.0 ** min(failures, 64), self.longest_s) * random.uniform(0.5, 1.0)
        return drawn_s if asked_s is None else max(drawn_s, asked_s * random.uniform(1.0, 1.1))


DEFAULT_BACKOFF = Backoff()
DEFAULT_RESUME_S = 15.0
_RECONNECT = Backoff(0.05, 1.0)


@dataclass(frozen=True, slots=True)
class Tries:
    """The addresses and limits for attempts of a client's calls; see `Client` for the fields."""

    rotation: Rotation
    backoff: Backoff = DEFAULT_BACKOFF
    resume_s: float = DEFAULT_RESUME_S

    def __post_init__(self) -> None:
        if not self.resume_s >= 0:  # a NaN too
            raise ConfigError(f"resume_s must be at least 0, got {self.resume_s}")

    def of(self, call: Call[Any]) -> Attempts:
        """The attempts of one call."""
        return Attempts(call, self)


class Attempts:
    """Send `call` to `address`. Pass each chunk of a stream to `take`, and each failure to `again`."""

    def __init__(self, call: Call[Any], tries: Tries) -> None:
        self.call = call
        self.request_id: str = getattr(call.message, "request_id", "")
        self.complete = False  # whether the last chunk has arrived
        self.address = tries.rotation.next()
        self._rotation = tries.rotation
        self._backoff = tries.backoff
        self._first = call
        # A call that generates no tokens is retried like a call that no server has accepted.
        self._resume_s = tries.resume_s if call.generates else None
        self._begun_s = time.monotonic()
        self._first_token_s: float | None = None
        self._deadline_s = None if call.timeout_s is None else self._begun_s + call.timeout_s
        message = call.message
        self._answers = (message.best_of or message.n or 1) if call.generates else 0
        self._model = ""  # from the first chunk: only the same model can continue the answer
        self._seed: int | None = None  # from the first chunk
        self._max_tokens: int | None = None  # from the first chunk
        self._delivered: dict[int, pb.Delivered] = {}
        self._begun = False  # whether a server has accepted the call
        self._failing_since_s: float | None = None
        self._failures = 0  # since the last token
        self._retries = 0
        self._unreached: set[str] = set()
        self._sent = 1

    def take(self, chunk: pb.GenerateChunk) -> None:
        """Note what a chunk delivers. Removes prompt tokens that the first chunk of an earlier connection delivered."""
        self.request_id = chunk.request_id
        self._begun = True
        self._model = self._model or chunk.model
        if self._seed is not None:
            chunk.ClearField("prompt_token_ids")
        elif chunk.HasField("seed"):
            self._seed = chunk.seed
            self._max_tokens = chunk.max_tokens if chunk.HasField("max_tokens") else None
        delivered = self._delivered.setdefault(chunk.choice.index, pb.Delivered())
        delivered.token_ids.extend(chunk.choice.token_ids)
        finish = chunk.choice.finish_reason
        delivered.finish_reason = "stop" if finish == "tool_calls" else finish  # how its tokens ended
        if chunk.choice.token_ids:
            if self._first_token_s is None:
                self._first_token_s = time.monotonic()
            self._failures, self._failing_since_s = 0, None
            self._rotation.worked(self.address)
        if chunk.HasField("usage"):  # not sufficient alone: older gateways send it with several chunks
            ended = sum(bool(answer.finish_reason) for answer in self._delivered.values())
            self.complete = ended == self._answers

    def result(self, response: Any) -> Any:
        """The result of a response."""
        self._rotation.worked(self.address)
        return self.call.parse(response, self.timings())

    @property
    def again_sent(self) -> bool:
        """Whether `call` is a retry."""
        return self._sent > 1

    def timings(self) -> ClientTimings:
        """The times of this call that the client has measured until now."""
        first_s = None if self._first_token_s is None else self._first_token_s - self._begun_s
        return ClientTimings(time.monotonic() - self._begun_s, first_s, self._sent)

    def again(self, error: grpc.RpcError) -> float | None:
        """Seconds to wait before the updated `call` is sent to `address`. None: the failure is final."""
        now_s = time.monotonic()
        kind = kind_of(error, begun=self._begun)
        if kind in (Failure.BROKEN, Failure.UNREACHED):
            self._rotation.failed(self.address)
        # Without its seed, which an old server may not send, an answer that has begun cannot be continued.
        if kind is Failure.FINAL or self._late(now_s) or (self._delivered and self._seed is None):
            return None
        if kind is Failure.BROKEN and self._resume_s is not None:
            self._begun = True
        wait = self._wait_to_resume_s if self._begun else self._wait_to_retry_s
        wait_s = wait(now_s, error, kind)
        if wait_s is None:
            return None
        self.address = self._rotation.next(but=self._unreached)  # also if other calls share the rotation
        self.call = self._next_call(now_s + wait_s)
        self._sent += 1
        return wait_s

    def error(self, error: grpc.RpcError) -> AlignedServeError:
        """The typed error for a final failure."""
        if self._late(time.monotonic()):  # regardless of the last failure
            limit_s = self._first.timeout_s
            ids = {"request_id": self.request_id} if self.request_id else {}
            message = f"the call did not finish within its limit of {limit_s:g} s"
            return DeadlineError(message, status=grpc.StatusCode.DEADLINE_EXCEEDED.name, address=self.address, **ids)
        return self._first.error(error, self.address, self.request_id)

    def _wait_to_resume_s(self, now_s: float, error: grpc.RpcError, kind: Failure) -> float | None:
        """Wait time before a resume: a server had accepted the call. Ends after `resume_s` without a new token."""
        self._unreached.clear()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        left_s = self._failing_since_s + (self._resume_s or 0.0) - now_s
        if left_s <= 0:
            return None
        # A gateway that ends also gives a time, but another gateway can continue sooner.
        asked_s = retry_after_s(error) if kind is Failure.REFUSED else None
        wait_s = min(_RECONNECT.wait_s(self._failures, asked_s), left_s)
        self._failures += 1
        return wait_s if self._deadline_s is None else min(wait_s, self._deadline_s - now_s)

    def _wait_to_retry_s(self, now_s: float, error: grpc.RpcError, kind: Failure) -> float | None:
        """Wait time before a retry: no server has accepted the call. Each of `max_retries` tries every address."""
        if kind is Failure.UNREACHED:
            self._unreached.add(self.address)
            if len(self._unreached) < len(self._rotation.addresses):
                return 0.0
        self._unreached.clear()
        asked_s = retry_after_s(error)
        if self._retries >= self._first.max_retries or (asked_s or 0.0) > self._backoff.retry_after_limit_s:
            return None
        wait_s = self._backoff.wait_s(self._retries, asked_s)
        if self._deadline_s is not None and now_s + wait_s >= self._deadline_s:
            return None  # no time is left, and the refusal is a better error than the deadline
        self._retries += 1
        return wait_s

    def _late(self, now_s: float) -> bool:
        return self._deadline_s is not None and now_s >= self._deadline_s

    def _next_call(self, now_s: float) -> Call[Any]:
        timeout_s = None if self._deadline_s is None else max(self._deadline_s - now_s, _LEAST_TIMEOUT_S)
        if self._resume_s is None:
            return replace(self._first, timeout_s=timeout_s)
        message = pb.GenerateRequest()
        message.CopyFrom(self._first.message)
        message.request_id = self.request_id
        if self._model:
            message.model = self._model
        if self._seed is not None:
            message.seed = self._seed
        if self._max_tokens is not None:
            message.max_tokens = self._max_tokens
        if self._begun:
            message.resume.extend(self._delivered.get(index, pb.Delivered()) for index in range(self._answers))
        if timeout_s is not None:
            message.timeout_s = timeout_s
        return replace(self._first, message=message, timeout_s=timeout_s)
