"""Channels: each copies blocks from one store to another, in order, in its own thread."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from alignedserve.errors import TransferError
from alignedserve.geometry import StoreSlice
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.handles import slice_block_bytes
from alignedserve.transfer.runs import IdArray, check_ids, common_part

logger = logging.getLogger(__name__)

MAX_PENDING_COPIES = 4096


@dataclass(frozen=True, slots=True)
class PageLocked:
    """How much of a store's memory is page-locked in this process. `ended`: locking has stopped."""

    store_id: str
    locked_bytes: int
    total_bytes: int
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ChannelCounters:
    """Totals of a channel since its creation. `busy_s`: seconds in which it was copying."""

    copies: int = 0
    failed: int = 0
    blocks: int = 0
    bytes: int = 0
    busy_s: float = 0.0


class Channel(ABC):
    """Copies blocks from `source` to `destination`; if their slices differ, the part that both hold.

    Copies of one channel run one after the other, in the order of the calls. The caller owns the blocks on both sides
    until the completion is `done`.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The kind: "shared-memory", "pcie", "cuda-ipc"."""

    @property
    @abstractmethod
    def source(self) -> BlockStore: ...

    @property
    @abstractmethod
    def destination(self) -> BlockStore: ...

    @abstractmethod
    def copy(
        self,
        source_ids: Sequence[int],
        destination_ids: Sequence[int],
        *,
        layers: tuple[int, int] | None = None,
        settled: bool = False,
    ) -> Completion:
        """Begin to copy block `source_ids[i]` to block `destination_ids[i]`; never blocks.

        `layers` (begin, end, numbered in the whole model): only these, so that a prefill can stream layer by layer.
        `settled`: no device work submitted by this process so far touches the blocks, so the copy does not wait for it.
        Raises TransferError if ids are wrong, the layers are not in both stores, the queue is full or the channel is
        closed; later failures are in the completion.
        """

    @abstractmethod
    def counters(self) -> ChannelCounters: ...

    @property
    @abstractmethod
    def pending(self) -> int:
        """Copies that were requested and have not ended."""

    @property
    def waits_for_peer(self) -> bool:
        """Whether the current copy waits for another process that takes part in it, which has its own time limits."""
        return False

    def page_locked(self) -> PageLocked | None:
        """How much of its host side is page-locked; None if copies need no such memory."""
        return None

    def trouble(self) -> TransferError | None:
        """The error for which its process must be replaced, if any: the channel cannot be as fast as configured."""
        return None

    @abstractmethod
    def close(self, timeout_s: float = 10.0) -> None:
        """Fail the copies that have not begun and wait for the one that has. Idempotent. The stores stay open."""


def wait_page_locked(channel: Channel, timeout_s: float) -> None:
    """Wait until the channel's host side is page-locked, or cannot be; before that its copies are slower.

    Raises TransferError after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (progress := channel.page_locked()) is not None and not progress.ended:
        if time.monotonic() > deadline:
            raise TransferError(f"{progress.store_id} was not page-locked within {timeout_s:g} s")
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy in the queue. `ready`: channel-specific object that the source's blocks wait for."""

    source_ids: IdArray
    destination_ids: IdArray
    part: StoreSlice
    completion: Completion
    ready: Any = None


class QueuedChannel(Channel):
    """A channel with a bounded queue and a thread. Subclasses define how a copy begins and how its end is awaited."""

    def __init__(
        self, source: BlockStore, destination: BlockStore, *, in_flight: int = 1, max_pending: int = MAX_PENDING_COPIES
    ) -> None:
        """`in_flight`: number of copies begun before the end of the first is awaited. Raises like `common_part`."""
        self._source, self._destination = source, destination
        self._part = common_part(source, destination)
        self._in_flight, self._max_pending = in_flight, max_pending
        self._queue: deque[Copy] = deque()
        self._pending = 0
        self._closed = False
        self._changed = threading.Condition()
        self._counters = ChannelCounters()
        self._thread = threading.Thread(
            target=self._run, name=f"copy-{source.store_id}-{destination.store_id}", daemon=True
        )
        self._thread.start()

    @abstractmethod
    def _begin(self, copy: Copy) -> Any:
        """Start the copy, in the channel's thread. Returns the argument for `_end`.

        Raises TransferError, RuntimeError, OSError.
        """

    @abstractmethod
    def _end(self, copy: Copy, begun: Any) -> None:
        """Return when everything has been copied. Raises like `_begin`."""

    def _ready(self) -> Any:
        """Called in the thread that requests a copy. Returns what the source's blocks wait for, if anything."""
        return None

    @property
    def source(self) -> BlockStore:
        return self._source

    @property
    def destination(self) -> BlockStore:
        return self._destination

    @property
    def pending(self) -> int:
        return self._pending

    def counters(self) -> ChannelCounters:
        return self._counters

    def copy(
        self,
        source_ids: Sequence[int],
        destination_ids: Sequence[int],
        *,
        layers: tuple[int, int] | None = None,
        settled: bool = False,
    ) -> Completion:
        if len(source_ids) != len(destination_ids):
            raise TransferError(f"{len(source_ids)} blocks cannot be copied to {len(destination_ids)}")
        sources = check_ids(source_ids, self._source, distinct=False)
        destinations = check_ids(destination_ids, self._destination, distinct=True)
        part = self._part if layers is None else self._layers(*layers)
        completion = Completion(f"{self._source.store_id} to {self._destination.store_id}")
        if not sources.size:
            completion.finish()
            return completion
        with self._changed:
            if self._closed:
                raise TransferError(f"the channel {completion.label} is closed")
            if self._pending >= self._max_pending:
                raise TransferError(f"the channel {completion.label} has too many copies waiting ({self._pending})")
            self._queue.append(Copy(sources, destinations, part, completion, None if settled else self._ready()))
            self._pending += 1
            self._changed.notify()
        return completion

    def close(self, timeout_s: float = 10.0) -> None:
        with self._changed:
            self._closed = True
            dropped = list(self._queue)
            self._queue.clear()
            self._pending -= len(dropped)
            self._changed.notify()
        for copy in dropped:
            copy.completion.finish(TransferError(f"the channel {copy.completion.label} was closed"))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _layers(self, begin: int, end: int) -> StoreSlice:
        part = replace(self._part, layer_begin=begin, layer_end=end)
        if not self._part.layer_begin <= begin < end <= self._part.layer_end:
            raise TransferError(f"layers {begin} to {end} are not in both stores, which share {self._part}")
        return part

    def _run(self) -> None:
        begun: deque[tuple[Copy, Any, float]] = deque()
        while True:
            copy = self._next(wait=not begun)
            if copy is not None:
                self._start(copy, begun)
            elif not begun:
                return
            if begun and (copy is None or len(begun) >= self._in_flight):
                self._finish(*begun.popleft())

    def _next(self, *, wait: bool) -> Copy | None:
        """The next copy; None if there is none (with `wait`: and the channel is closed)."""
        with self._changed:
            while wait and not self._queue and not self._closed:
                self._changed.wait()
            return self._queue.popleft() if self._queue else None

    def _start(self, copy: Copy, begun: deque[tuple[Copy, Any, float]]) -> None:
        now = time.perf_counter()
        if copy.completion.cancelled:
            self._record(copy, now, cancelled(copy))
            return
        try:
            begun.append((copy, self._begin(copy), now))
        except Exception as error:  # on any error the completion must end, and the channel continue
            self._record(copy, now, _as_transfer_error(copy, error))

    def _finish(self, copy: Copy, handle: Any, started: float) -> None:
        try:
            self._end(copy, handle)
        except Exception as error:  # as in _start
            self._record(copy, started, _as_transfer_error(copy, error))
        else:
            self._record(copy, started, None)

    def _record(self, copy: Copy, started: float, error: TransferError | None) -> None:
        then = self._counters
        blocks = 0 if error else copy.source_ids.size
        self._counters = ChannelCounters(
            copies=then.copies + (error is None),
            failed=then.failed + (error is not None),
            blocks=then.blocks + blocks,
            bytes=then.bytes + blocks * slice_block_bytes(self._source.geometry, copy.part),
            busy_s=then.busy_s + time.perf_counter() - started,
        )
        with self._changed:
            self._pending -= 1
        copy.completion.finish(error)


def cancelled(copy: Copy) -> TransferError:
    return TransferError(f"the copy {copy.completion.label} was cancelled", cancelled=True)


def _as_transfer_error(copy: Copy, error: Exception) -> TransferError:
    if isinstance(error, TransferError):
        return error
    logger.error("copy %s failed", copy.completion.label, exc_info=error)
    return TransferError(f"the copy {copy.completion.label} failed: {error!r}")
