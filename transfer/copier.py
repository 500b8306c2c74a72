"""Copies of workers: over the first route that works, verified if configured, and watched."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from alignedserve.errors import ChecksumError, TransferError
from alignedserve.metrics import Page
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.completion import Completion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """One way to the wanted blocks: `source_ids` over `channel`. `checksums`: of each of them, as written."""

    channel: Channel
    source_ids: Sequence[int]
    checksums: Sequence[int] = ()
    settled: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    routes: Sequence[Route]
    destination_ids: Sequence[int]
    completion: Completion


@dataclass(slots=True)
class _Lane:
    """The copies of one channel in flight, oldest first; `since_s`: when the first became the current one."""

    under_way: dict[Completion, None] = field(default_factory=dict)
    since_s: float = 0.0


class Copier:
    """Runs every copy of a worker. Thread-safe; `stuck` reports when the worker must be replaced.

    With `verify`, a copy is done only once each block's checksum at the destination equals that of the route. The bytes
    are hashed in the copier's own thread, whole blocks at a time, including the unused end of the last one.
    """

    def __init__(self, *, verify: bool, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.verify = verify
        self.mismatches = 0  # blocks that differ from what was written
        self.checked_blocks = 0
        self.failures = 0  # failed copies, including mismatches; most were repeated over the next route
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked_s = clock()
        self._lanes: dict[Channel, _Lane] = {}
        self._lock = threading.Lock()
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="checksums")  # starts its thread on first use

    async def checksums(self, store: BlockStore, block_ids: Sequence[int]) -> list[int]:
        """Checksums of blocks without concurrent writers, to be sent with their contents; [] without `verify`."""
        if not self.verify:
            return []
        return await asyncio.get_running_loop().run_in_executor(self._hasher, store.checksums, list(block_ids))

    def copy(self, routes: Sequence[Route], destination_ids: Sequence[int], label: str) -> Completion:
        """Copy to `destination_ids`, over the first of `routes` that succeeds; all lead to one store. Never blocks.

        `label` names the request. If none succeeds, the completion ends with the last route's TransferError (a
        ChecksumError if a block differs from what was written). Until it has ended, both sides' blocks are in use.
        """
        job = _Job(routes, list(destination_ids), Completion(label))
        self._begin(job, 0)
        return job.completion

    def copy_anew(
        self, channel: Channel, source_ids: Sequence[int], destination_ids: Sequence[int], label: str
    ) -> Completion:
        """`copy` of blocks whose checksums are not known: with `verify` they are computed first. Never blocks.

        Nothing may write to the source until the end.
        """
        if not self.verify:
            return self.copy([Route(channel, source_ids)] * 2, destination_ids, label)
        completion = Completion(label)

        def begin() -> None:
            try:
                route = Route(channel, source_ids, channel.source.checksums(source_ids))
            except Exception as error:  # on any error the completion must end
                completion.finish(TransferError(f"{label}: blocks could not be read: {error!r}"))
            else:
                copy = self.copy([route, route], destination_ids, label)
                copy.add_callback(lambda ended: completion.finish(ended.error))

        try:
            self._hasher.submit(begin)
        except RuntimeError:  # shut down: the worker is ending
            completion.finish(TransferError(f"{label}: no longer copied"))
        return completion

    def begin_part(
        self,
        channel: Channel,
        source_ids: Sequence[int],
        destination_ids: Sequence[int],
        layers: tuple[int, int] | None,
        label: str,
    ) -> Completion:
        """Begin one of several copies that fill the same blocks, for `join`. Never blocks, never raises TransferError.

        It is watched like any other, but neither verified nor repeated: that is done for the whole.
        """
        completion = Completion(label)
        try:
            copy = channel.copy(source_ids, destination_ids, layers=layers)
        except TransferError as error:
            completion.finish(error)
            return completion
        self._enter_lane(channel, copy)

        def ended(copy: Completion) -> None:
            self._leave_lane(channel, copy)
            completion.finish(copy.error)

        copy.add_callback(ended)
        return completion

    def join(
        self, parts: Sequence[Completion], routes: Sequence[Route], destination_ids: Sequence[int], label: str
    ) -> Completion:
        """`copy`, whose first attempt is `parts`: already begun, over the first of `routes`."""
        job = _Job(routes, list(destination_ids), Completion(label))
        left = len(parts)

        def ended(_: Completion) -> None:
            nonlocal left
            with self._lock:
                left -= 1
                waiting = left
            if not waiting:
                self._judge(job, 0, next((part.error for part in parts if part.error is not None), None))

        for part in parts:
            part.add_callback(ended)
        return job.completion

    def stuck(self) -> TransferError | None:
        """Why this worker cannot go on: a copy has been in flight for longer than `timeout_s`, and others wait for it.

        The only remedy is to end the process, which also makes the copy's blocks safe to reuse. Must be called several
        times in `timeout_s`: a longer gap means that the process was suspended, and its copies with it. A copy that
        waits for another process is not counted: it fails by itself, and the other process or the network is the cause.
        """
        now_s = self._clock()
        slept = now_s - self._asked_s > self._timeout_s / 2
        self._asked_s = now_s
        with self._lock:
            for channel, lane in self._lanes.items():
                if slept or channel.waits_for_peer:
                    lane.since_s = now_s
                elif lane.under_way and now_s - lane.since_s > self._timeout_s:
                    pair = f"{channel.source.store_id} to {channel.destination.store_id}"
                    return TransferError(
                        f"a copy from {pair} has not ended within {self._timeout_s:g} s (kv_pool.copy_timeout_s); "
                        f"{len(lane.under_way)} are under way there"
                    )
        return None

    def show_metrics(self, page: Page) -> None:
        page.counter("kv_copy_failures_total", "copies that failed on every route", self.failures)
        page.counter("kv_checksum_blocks_total", "blocks compared (kv_pool.verify)", self.checked_blocks)
        meaning = "blocks that differed and were copied or computed again"
        page.counter("kv_checksum_mismatches_total", meaning, self.mismatches)

    def close(self) -> None:
        """Idempotent. The channels are closed by their owners."""
        self._hasher.shutdown(wait=False, cancel_futures=True)

    def _begin(self, job: _Job, attempt: int) -> None:
        route = job.routes[attempt]
        try:
            copy = route.channel.copy(route.source_ids, job.destination_ids, settled=route.settled)
        except TransferError as error:
            self._failed(job, attempt, error)
            return
        self._enter_lane(route.channel, copy)
        copy.add_callback(lambda ended: self._ended(job, attempt, ended))

    def _ended(self, job: _Job, attempt: int, copy: Completion) -> None:
        """Mostly called in the channel's thread."""
        self._leave_lane(job.routes[attempt].channel, copy)
        self._judge(job, attempt, copy.error)

    def _judge(self, job: _Job, attempt: int, error: TransferError | None) -> None:
        if error is not None:
            self._failed(job, attempt, error)
        elif not self.verify:
            job.completion.finish()
        else:
            try:
                self._hasher.submit(self._check, job, attempt)
            except RuntimeError:  # shut down: the worker is ending
                self._failed(job, len(job.routes) - 1, TransferError(f"{job.completion.label}: no longer verified"))

    def _enter_lane(self, channel: Channel, copy: Completion) -> None:
        with self._lock:
            lane = self._lanes.setdefault(channel, _Lane())
            if not lane.under_way:
                lane.since_s = self._clock()
            lane.under_way[copy] = None

    def _leave_lane(self, channel: Channel, copy: Completion) -> None:
        with self._lock:
            lane = self._lanes[channel]
            if next(iter(lane.under_way)) is copy:
                lane.since_s = self._clock()
            del lane.under_way[copy]
            if not lane.under_way:
                del self._lanes[channel]

    def _check(self, job: _Job, attempt: int) -> None:
        try:
            self._require_equal(job, job.routes[attempt])
        except TransferError as error:
            self._failed(job, attempt, error)
        except Exception as error:  # on any error the completion must end
            logger.exception("blocks of %s could not be checked", job.completion.label)
            self._failed(job, attempt, TransferError(f"{job.completion.label}: blocks could not be checked: {error!r}"))
        else:
            job.completion.finish()

    def _require_equal(self, job: _Job, route: Route) -> None:
        source, store, label = route.channel.source, route.channel.destination, job.completion.label
        if source.slice != store.slice:
            raise ChecksumError(
                f"blocks of {source.store_id} and {store.store_id} hold different layers or heads, so kv_pool.verify "
                "cannot compare them"
            )
        if len(route.checksums) != len(job.destination_ids):
            raise ChecksumError(
                f"{label}: {len(job.destination_ids)} blocks of {source.store_id} came with {len(route.checksums)} "
                "checksums: they cannot be trusted"
            )
        found = store.checksums(job.destination_ids)
        wrong = [index for index, checksum in enumerate(route.checksums) if found[index] != checksum]
        self.checked_blocks += len(found)
        self.mismatches += len(wrong)
        if wrong:
            first = wrong[0]
            raise ChecksumError(
                f"{label}: {len(wrong)} of {len(found)} blocks differ from what was written: block "
                f"{job.destination_ids[first]} of {store.store_id}, copied from block {route.source_ids[first]} of "
                f"{source.store_id}, has checksum {found[first]:016x}, not {route.checksums[first]:016x}",
                store_id=store.store_id,
                block=job.destination_ids[first],
                request_id=label,
            )

    def _failed(self, job: _Job, attempt: int, error: TransferError) -> None:
        with self._lock:
            self.failures += 1
        following = attempt + 1
        if following == len(job.routes) or job.completion.cancelled:
            job.completion.finish(error)
            return
        logger.warning("%s; trying again", error.message)
        self._begin(job, following)
