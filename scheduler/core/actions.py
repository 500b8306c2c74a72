"""Actions of the scheduler core. The scheduler process carries them out over gRPC, the simulator in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.errors import AlignedServeError
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import BufferKind


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Send the group (its first request carries the prompt) to the prefill instance.

    `base_tokens`: the pool holds the KV of the first `base_tokens` tokens; only the rest is computed. `copy_from`: the
    shard whose cached prefix of the prompt is copied to the instance's own first; "" if none is.
    """

    prefill_id: str
    keys: tuple[RequestKey, ...]
    base_tokens: int = 0
    copy_from: str = ""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Copy these requests from the pool into a candidate buffer. From here on the decode instance decides about them.

    `prefill_id` None: there are no buffers; the decode instance copies from the pool itself.
    """

    decode_id: str
    prefill_id: str | None
    buffer: BufferKind
    batch_id: int
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask the decode instance to give back those of these requests that have not joined."""

    decode_id: str
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class MarkUrgent:
    """Overdue requests wait at the decode instance or are on their way. `due_in_s`: seconds until due; < 0: past due.

    An overdue request in the candidate batch stops late joins and begins the batch switch.
    """

    decode_id: str
    keys: tuple[RequestKey, ...]
    due_in_s: tuple[float, ...]

    def due_s(self, now_s: float) -> dict[RequestKey, float]:
        """When each request is due, by the clock of `now_s`."""
        return {key: now_s + due_in_s for key, due_in_s in zip(self.keys, self.due_in_s, strict=True)}


@dataclass(frozen=True, slots=True)
class ReleasePool:
    """The pool's copies are no longer needed because the requests ended, or must make room (`dropped`).

    With `dropped` the requests decode, and may be evicted to the pool while this message is on its way. A shard then
    frees a copy only if it still has `kv_tokens` tokens (in the order of `keys`): a longer copy was committed since.
    `pool_id`: the shard that drops. Copies of ended requests are released at all shards, since any may have been
    written to last.
    """

    keys: tuple[RequestKey, ...]
    dropped: bool = False
    kv_tokens: tuple[int, ...] = ()
    pool_id: str = ""


@dataclass(frozen=True, slots=True)
class GiveUpPins:
    """Evictions wait for room in the shard: have prefill instances let go of the cached prefixes that they hold there.

    A prompt that has not begun is computed whole; one that waits for room to be written is written whole. `pool_id` "":
    the cluster's only shard.
    """

    pool_id: str


@dataclass(frozen=True, slots=True)
class CancelAt:
    """Tell the instance that holds these requests to stop work on them and free what they hold."""

    role: str
    instance_id: str
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell the gateway that these were refused, or ended before any worker had them (error: CancelledError)."""

    keys: tuple[RequestKey, ...]
    error: AlignedServeError


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Tell the gateway to submit these again, in a new epoch."""

    keys: tuple[RequestKey, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The core holds no more state of these requests: the scheduler process may drop its own."""

    keys: tuple[RequestKey, ...]


Action = (
    StartPrefill | Prefetch | Recall | MarkUrgent | ReleasePool | GiveUpPins | CancelAt | Reject | ReportLost | Forget
)
