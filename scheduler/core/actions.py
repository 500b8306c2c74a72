"""What the scheduler core asks for. The actor around it carries these out over gRPC; the simulator in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.errors import AlignedServeError
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.events import BufferKind


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Send the group (its first request carries the prompt) to the prefill instance.

    `base_tokens`: the pool holds the KV of so many of its tokens; only the others are to be computed.
    """

    prefill_id: str
    keys: tuple[RequestKey, ...]
    base_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring these from the pool into a candidate buffer; from here on the decode instance decides about them.

    `prefill_id` None: there are no buffers, the decode instance pulls from the pool itself.
    """

    decode_id: str
    prefill_id: str | None
    buffer: BufferKind
    batch_id: int
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask the decode instance to give back those of these that have not joined."""

    decode_id: str
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class MarkUrgent:
    """Overdue requests wait at the decode instance, or are on their way; each is due in so many seconds (or was: < 0).

    One in its candidate batch stops late joins and begins the switch.
    """

    decode_id: str
    keys: tuple[RequestKey, ...]
    due_in_s: tuple[float, ...]

    def due_s(self, now_s: float) -> dict[RequestKey, float]:
        """When each is due, by the clock that `now_s` is of."""
        return {key: now_s + due_in_s for key, due_in_s in zip(self.keys, self.due_in_s, strict=True)}


@dataclass(frozen=True, slots=True)
class ReleasePool:
    """The pool's copy of these is not needed any more (ended), or has to make room (`dropped`).

    `dropped`: the requests decode, and may be evicted to the pool while this is on its way. So the pool frees a copy
    only if it still has as many tokens as `kv_tokens` says, in the order of `keys`: a longer one was committed since.
    `pool_id`: the shard that drops; what has ended all shards release, since any may have been written to last.
    """

    keys: tuple[RequestKey, ...]
    dropped: bool = False
    kv_tokens: tuple[int, ...] = ()
    pool_id: str = ""


@dataclass(frozen=True, slots=True)
class CancelAt:
    """Tell the instance that holds them to stop work on these and free what they hold."""

    role: str
    instance_id: str
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell the gateway that these were refused, or ended before any worker had them (`error` CancelledError)."""

    keys: tuple[RequestKey, ...]
    error: AlignedServeError


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Tell the gateway to submit these again, in a new epoch."""

    keys: tuple[RequestKey, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The core holds nothing of these any more: the actor may drop what it keeps beside it."""

    keys: tuple[RequestKey, ...]


Action = StartPrefill | Prefetch | Recall | MarkUrgent | ReleasePool | CancelAt | Reject | ReportLost | Forget
