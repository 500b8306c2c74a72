"""The disk tier of a shard (`kv_pool.disk_path`): a cache of blocks behind the cache in host memory.

No fault of the disk reaches a request: what cannot be read is computed. Everything that waits for the disk is in
threads of its own, so a disk that hangs stops neither the event loop nor the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignedserve.cancellation import end_tasks
from alignedserve.config import Config
from alignedserve.control.integrity import check_books
from alignedserve.control.metrics import StoreCount, show_stores
from alignedserve.errors import AlignedServeError, ConfigError
from alignedserve.kv_pool.disk.breaker import Breaker
from alignedserve.kv_pool.disk.demotion import Demotion
from alignedserve.kv_pool.disk.file import DiskFile, FileCalls, make_folder, open_own
from alignedserve.kv_pool.disk.layout import DiskLayout, read_entries
from alignedserve.kv_pool.disk.promotion import Promotion
from alignedserve.kv_pool.disk.shard import Shard
from alignedserve.kv_pool.disk.slot_io import SlotIo
from alignedserve.kv_pool.disk.slots import Copies, DiskSlots, empty_entries
from alignedserve.kv_pool.disk.threads import CLOSED_WITHIN_S, DiskThreads
from alignedserve.kv_pool.entries import IndexEntries
from alignedserve.kv_pool.prefix_cache import configured_policy
from alignedserve.kv_pool.removal import remove_found
from alignedserve.memory import GIB
from alignedserve.metrics import Page
from alignedserve.model import ModelInfo
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

OPEN_WITHIN_S = 5.0  # a shard does not wait longer for its disk before it serves
AGAIN_S = 60.0
FLUSH_S = 5.0  # less than the processes of a cluster that ends are given
READERS, WRITERS = 4, 2  # threads: calls under way at once


@dataclass(frozen=True, slots=True)
class _Opened:
    file: DiskFile
    disk: DiskSlots
    copies: Copies
    demotion: Demotion
    promotion: Promotion
    demoting: asyncio.Task[None]


class DiskTier:
    """For one event loop. Until the file is open, nothing is found in it."""

    def __init__(
        self,
        config: Config,
        shard_id: str,
        model: ModelInfo,
        shard: Shard,
        calls: FileCalls | None = None,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[str, int], DiskThreads] = DiskThreads,
    ) -> None:
        """`calls`, `clock`, `threads`: others for tests."""
        self._config, self._id, self._model, self._shard = config, shard_id, model, shard
        self._calls, self._clock = calls or FileCalls(), clock
        self._threads = threads
        self._thread = threads("disk-open", 1)
        self._opened: _Opened | None = None
        self._to_forget: list[tuple[bytes, list[int]]] = []  # what was dropped before the file was open
        self._erasing: set[asyncio.Task[None]] = set()
        self._opening: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()  # opening has succeeded or failed once
        self._working: set[asyncio.Task[None]] = set()  # promotions with what follows them

    async def start(self, *, required: bool) -> None:
        """Open the file in the background, and wait for it a little.

        `required`: raises ConfigError if that fails because of the configuration. Else, and if the disk is broken or
        full, it is tried again later.
        """
        self._opening = asyncio.get_running_loop().create_task(self._open(required))
        tried = asyncio.get_running_loop().create_task(self._tried.wait())
        await asyncio.wait({self._opening, tried}, timeout=OPEN_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        tried.cancel()
        if self._opening.done():
            self._opening.result()
        elif not self._tried.is_set():
            self._tried.set()  # a later error is no longer one of the start
            logger.warning("the disk tier is not open after %.0f s; the shard serves without it", OPEN_WITHIN_S)

    async def _open(self, required: bool) -> None:
        while True:
            try:
                file, layout, disk, stale = await self._thread.future(self._thread.start(self._load))
                break
            except Exception as error:  # whatever it is: the shard must serve
                if required and isinstance(error, ConfigError) and not self._tried.is_set():
                    raise ConfigError(f"the disk tier cannot be opened: {error}") from error
                logger.warning("the disk tier is off: %s", error)
                self._tried.set()
                await asyncio.sleep(AGAIN_S)
        slot_io = SlotIo(file, layout, self._shard.store)
        copies = Copies(self._shard.index, disk)
        readers, writers = self._threads("disk-read", READERS), self._threads("disk-write", WRITERS)
        reading = Breaker("reading from the disk tier", self._clock)
        writing = Breaker("writing to the disk tier", self._clock)
        demotion = Demotion(self._shard, disk, copies, slot_io, writing, writers, stale)
        promotion = Promotion(self._shard, disk, copies, slot_io, reading, readers, self._clock)
        demoting = asyncio.get_running_loop().create_task(demotion.run())
        async with self._shard.alone():
            self._opened = _Opened(file, disk, copies, demotion, promotion, demoting)
            for root, token_ids in self._to_forget:
                await self.forget(root, token_ids)
            self._to_forget.clear()

    def _load(self) -> tuple[DiskFile, DiskLayout, DiskSlots, list[int]]:
        """Open the shard's file, and take over what it has. Raises ConfigError or OSError."""
        pool, geometry = self._config.kv_pool, self._shard.store.geometry
        folder = Path(pool.disk_path).expanduser()
        make_folder(folder)
        layout = DiskLayout.within(int(pool.disk_gib * GIB), geometry, self._model.weights)
        file = open_own(self._calls, folder, self._config.cluster.name, self._id, layout.content())
        try:
            before = layout.found_in(file)
            if before is None or before.slots < layout.slots:  # else it has its room, though others may fill the disk
                file.require_room(layout.size)
            taken = None if before is None else self._take_over(file, before, layout)
            disk, stale = taken or (self._empty(file, layout), [])
        except BaseException:
            file.close()
            raise
        logger.info(
            "the disk tier is open: %d of %d blocks in %s%s",
            disk.index.blocks,
            layout.slots,
            file.path,
            "" if file.direct else "; the file system has no O_DIRECT",
        )
        return file, layout, disk, stale

    def _take_over(self, file: DiskFile, before: DiskLayout, layout: DiskLayout) -> tuple[DiskSlots, list[int]] | None:
        """What is in the file, and the slots that have an entry on disk but not here; None if it contradicts itself.

        The file had the layout `before`, and has `layout` then. A smaller one keeps what is in its slots.
        """
        file.resize(before.size)  # it may have been truncated
        entries = empty_entries(layout)
        stale = read_entries(file, before, entries)
        try:
            disk = self._slots(entries)
            disk.index.check_integrity(disk.blocks.cached)
        except (AlignedServeError, IndexError) as error:
            logger.error("the disk tier begins empty: %s contradicts itself: %s", file.path, error)
            return None
        if before == layout:
            return disk, [*stale, *disk.dropped]
        layout.take_place(file, entries)
        return disk, []

    def _empty(self, file: DiskFile, layout: DiskLayout) -> DiskSlots:
        logger.info("the disk tier begins empty: %s holds no blocks of %s", file.path, layout.geometry.describe())
        layout.format(file)
        return self._slots(empty_entries(layout))

    def _slots(self, entries: IndexEntries) -> DiskSlots:
        block_size = self._shard.index.block_size
        return DiskSlots(f"{self._id}/disk", entries, block_size, configured_policy(self._config, block_size))

    # ---- what the shard asks for

    def wake(self) -> None:
        """Blocks of the shard have been taken or cached."""
        if self._opened is not None:
            self._opened.demotion.wake()

    def promoted(self, root: bytes, token_ids: Sequence[int], then: Callable[[], None]) -> None:
        """Call `then` when what is worth reading of a prompt is in the shard: at once, if nothing is on disk.

        Else within `promotion.MOST_WAIT_S`, and while nothing reads the shard's state in another thread. Raises
        TransferError if `root` is not a digest.
        """
        opened = self._opened
        if opened is None or opened.promotion.coming(root, token_ids, len(token_ids)) is None:
            then()
            return
        self._run(self._promote(opened.promotion, root, token_ids, then), self._working)

    async def _promote(
        self, promotion: Promotion, root: bytes, token_ids: Sequence[int], then: Callable[[], None]
    ) -> None:
        try:
            await promotion.promote(root, token_ids, len(token_ids))
        except Exception:  # the request goes on without
            logger.exception("what the disk tier has of a prompt could not be read")
        await self._shard.settled()
        then()

    def begin(self, root: bytes, token_ids: Sequence[int]) -> tuple[int, float]:
        """Begin to read what is on disk of a prompt that is expected here.

        Returns the number of blocks on the way, and the predicted time in seconds until they are here.
        """
        if self._opened is None:
            return 0, 0.0
        promotion = self._opened.promotion
        coming = promotion.coming(root, token_ids, len(token_ids))
        if coming is None or not (promotion.is_read(coming) or promotion.begin(coming) is not None):
            return 0, 0.0
        return len(coming.slots), promotion.ready_s

    def used_tokens(self, block_ids: Sequence[int]) -> int:
        """Of a pinned prefix, the tokens whose KV came from disk and is used for the first time."""
        if self._opened is None:
            return 0
        return self._opened.copies.first_used(block_ids) * self._shard.index.block_size

    async def forget(self, root: bytes, token_ids: Sequence[int]) -> None:
        """Forget what begins with these tokens (`PrefixIndex.begun_by`). The caller is alone with the shard.

        The file's entries follow (`erased`). Raises TransferError if `root` is not a digest.
        """
        if self._opened is None:
            self._to_forget.append((root, list(token_ids)))
            return
        disk = self._opened.disk
        find = functools.partial(disk.index.begun_by, root, token_ids)
        slots = await remove_found(disk.blocks.capacity, find, disk.remove)
        if len(slots):
            self._run(self._opened.demotion.erase(slots), self._erasing)

    async def erased(self, within_s: float) -> bool:
        """Wait until the file has no entry of what was forgotten. Returns whether that is so within this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while tasks := self._unerased():
                    await asyncio.wait(tasks)
        return not self._to_forget and not self._unerased()

    def _unerased(self) -> set[asyncio.Task[None]]:
        """What has to end before all that was forgotten is erased."""
        opening = [self._opening] if self._opening is not None and self._to_forget else []
        return {task for task in (*self._erasing, *opening) if not task.done()}

    @staticmethod
    def _run(work: Coroutine[None, None, None], among: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)

    # ---- what it tells

    def count(self) -> StoreCount:
        """Slots by state; none before the file is open."""
        return self._opened.disk.count() if self._opened is not None else StoreCount(f"{self._id}/disk", 0, 0, 0)

    def check(self) -> sv.BookCheck | None:
        """Recount, while nothing changes (`Shard.settled`); None before the file is open."""
        if self._opened is None:
            return None
        disk = self._opened.disk
        return check_books(disk.store_id, self._id, disk.check_integrity, disk.count)

    def show(self, page: Page) -> None:
        show_stores(page, [self.count()])
        opened = self._opened
        meaning = "whether the disk tier is open and not switched off after faults, by direction"
        if opened is None:
            for doing in ("read", "write"):
                page.gauge("disk_tier_on", meaning, 0, doing=doing)
            return
        demotion, promotion = opened.demotion, opened.promotion
        for doing, breaker in (("read", promotion.breaker), ("write", demotion.breaker)):
            page.gauge("disk_tier_on", meaning, not breaker.open, doing=doing)
        for doing, breaker in (("read", promotion.breaker), ("write", demotion.breaker)):
            faults = "errors, wrong blocks and time-outs of the disk tier; each has cost cached blocks only"
            page.counter("disk_tier_faults_total", faults, breaker.faults, doing=doing)
        page.counter("disk_tier_read_bytes_total", "bytes of blocks read from the disk tier", promotion.read_bytes)
        page.counter(
            "disk_tier_written_bytes_total", "bytes of blocks written to the disk tier", demotion.written_bytes
        )
        meaning = "blocks on disk that were not what was written; they were dropped"
        page.counter("disk_tier_rejected_blocks_total", meaning, promotion.rejected_blocks)
        page.counter("disk_tier_given_up_total", "reads of the disk tier that took too long", promotion.given_up)
        meaning = "reads of the disk tier that were predicted to take longer than computing"
        page.counter("disk_tier_declined_total", meaning, promotion.declined)

    async def close(self, *, flush: bool = False) -> None:
        """Erase what was forgotten, and end all tasks. `flush`: write what is cached and not on disk first.

        Both take at most `FLUSH_S`. If something cannot be erased, the next start discards the file. What is being
        read, or written by then, is lost. A call that hangs keeps the file open.
        """
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + FLUSH_S
        erased = await self.erased(FLUSH_S)
        self._thread.close()
        await end_tasks([*filter(None, [self._opening]), *self._working, *self._erasing])
        if (opened := self._opened) is None:
            if not erased:
                folder = self._config.kv_pool.disk_path
                logger.error("the disk tier was never open: what was dropped may be in %s: delete its files", folder)
            return
        self._opened = None
        await end_tasks([opened.demoting])
        if not erased:
            await self._discard(opened)
        elif flush:
            flushing = asyncio.get_running_loop().create_task(opened.demotion.flush())
            _, late = await asyncio.wait({flushing}, timeout=max(0.0, until_s - now_s()))
            if late:
                logger.warning("some cached blocks are not on disk: writing them would take over %.0f s", FLUSH_S)
            await end_tasks([flushing])
        if all([await opened.promotion.close(), await opened.demotion.close()]):
            opened.file.close()

    async def _discard(self, opened: _Opened) -> None:
        """Entries of what was forgotten are still in the file: have the next start discard it."""
        discarding = asyncio.get_running_loop().create_task(opened.demotion.discard())
        await asyncio.wait({discarding}, timeout=CLOSED_WITHIN_S)
        if discarding.done() and discarding.exception() is None:
            logger.warning("the next start discards %s: what was dropped could not be erased from it", opened.file.path)
        else:
            logger.error("what was dropped may be found in %s again: delete it", opened.file.path)
        await end_tasks([discarding])
