"""A shard with a disk tier in one thread: the calls of the disk are done when a test says so, and fail as it says."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from alignedserve.config import Config, KvPoolConfig
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.counts import Grant
from alignedserve.kv_pool.disk.file import PAGE_BYTES, FileCalls, page_buffer
from alignedserve.kv_pool.disk.layout import DiskLayout
from alignedserve.kv_pool.disk.shard import Shard
from alignedserve.kv_pool.disk.threads import DiskThreads
from alignedserve.kv_pool.disk.tier import DiskTier
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.memory import GIB
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.transfer.block_store import HostBlockStore
from support.fake_roles import MODEL
from support.prefix_pool import GEOMETRY, index_memory, open_indexed

Result = TypeVar("Result")
READ_FAULTS = ("eio", "short", "garbage")
WRITE_FAULTS = ("eio", "enospc", "short", "torn")


class FaultyCalls(FileCalls):
    """The next calls of a kind fail as `faults` say: "" is a call that succeeds."""

    def __init__(self) -> None:
        self.read_faults: list[str] = []
        self.write_faults: list[str] = []
        self.reads = self.writes = 0
        self.fds: list[int] = []
        self.dead = False  # the process has been killed: nothing reaches the disk any more
        self.free = self.total = 1 << 50

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self.fds.append(super().open(path, flags, mode))
        return self.fds[-1]

    def close(self, fd: int) -> None:
        if fd in self.fds:
            self.fds.remove(fd)
            super().close(fd)

    def room(self, folder: str) -> tuple[int, int]:
        return self.free, self.total

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._require_alive()
        self.reads += 1
        fault = self.read_faults.pop(0) if self.read_faults else ""
        if fault == "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done = super().read(fd, buffers, offset)
        if fault == "garbage" and done:
            buffers[0][0] ^= 1
        return done // 2 if fault == "short" else done

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._require_alive()
        self.writes += 1
        fault = self.write_faults.pop(0) if self.write_faults else ""
        if fault in ("eio", "enospc"):
            number = errno.EIO if fault == "eio" else errno.ENOSPC
            raise OSError(number, os.strerror(number))
        if not fault:
            return super().write(fd, buffers, offset)
        whole = sum(buffer.nbytes for buffer in buffers)
        part = page_buffer(whole)[: whole // 2 // PAGE_BYTES * PAGE_BYTES]
        part[:] = b"".join(buffers)[: len(part)]
        if len(part):
            super().write(fd, [part], offset)
        return len(part) if fault == "short" else whole

    def _require_alive(self) -> None:
        if self.dead:
            raise OSError(errno.EBADF, "the process has ended")


class HeldThreads(DiskThreads):
    """Jobs are done at once, or when `work` is called while `held`."""

    held = False

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name, count)
        self.waiting: list[tuple[Future[object], Callable[[], object]]] = []

    def start(self, work: Callable[[], Result]) -> Future[Result]:
        done: Future[Result] = Future()
        self.waiting.append((done, work))  # type: ignore[arg-type]
        if not type(self).held:
            self.work()
        return done

    def work(self, count: int = 1 << 30) -> None:
        while self.waiting and count:
            done, work = self.waiting.pop(0)
            count -= 1
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:  # as DiskThreads does
                    done.set_exception(error)

    def _wait(self) -> bool:
        return not self.waiting


def disk_gib(slots: int, geometry: KvGeometry) -> float:
    """The size that has room for just so many slots."""
    return (DiskLayout(slots, geometry, "").size + PAGE_BYTES) / GIB


def shard_memory(capacity: int, geometry: KvGeometry) -> tuple[KvPool, PrefixIndex, HostBlockStore]:
    """A shard with an index in memory of its own."""
    pool, index = open_indexed(index_memory(capacity), capacity)
    return pool, index, HostBlockStore.private(pool.store_id, geometry, capacity)


def pattern(root: bytes, tokens: Iterable[int], size: int = GEOMETRY.block_bytes) -> bytes:
    """What a block with the KV of the last of these tokens has: of all of them."""
    return hashlib.shake_128(repr((root, tuple(tokens))).encode()).digest(size)


class TierRig:
    """A tier over a shard, in one thread. Its event loop runs only in `run` and `spin`."""

    def __init__(
        self,
        pool: KvPool,
        index: PrefixIndex,
        store: HostBlockStore,
        folder: Path,
        slots: int,
        *,
        shard_id: str = "kv_pool-0",
        policy: str = "lru",
        cost: StepCost | None = None,
        threads: type[DiskThreads] = HeldThreads,
        verify: bool = False,
        weights: str = "",
        ahead: int = 0,
    ) -> None:
        """`ahead`: how many blocks are written before they go; 0: all that are cached."""
        self.ahead = ahead or store.capacity_blocks
        self.now = 0.0
        self.calls = FaultyCalls()
        self.threads: list[DiskThreads] = []
        self.grants: list[Grant] = []
        self.loop = asyncio.new_event_loop()
        kv_pool = KvPoolConfig(
            prefix_cache=True, cache_policy=policy, disk_path=str(folder), disk_gib=disk_gib(slots, store.geometry)
        )

        async def settled() -> None:
            await asyncio.sleep(0)

        def make(name: str, count: int) -> DiskThreads:
            self.threads.append(threads(name, count))
            return self.threads[-1]

        self.pool, self.index, self.store = pool, index, store
        shard = Shard(pool, index, store, self.grants.extend, settled, contextlib.nullcontext, verify, cost)
        model = replace(MODEL, weights=weights)
        self.tier = DiskTier(Config(kv_pool=kv_pool), shard_id, model, shard, self.calls, lambda: self.now, make)
        self.tasks: list[asyncio.Task[object]] = []

    def start(self, *, required: bool = True) -> None:
        held, HeldThreads.held = HeldThreads.held, False
        self.run(self.tier.start(required=required))
        HeldThreads.held = held
        if self.tier._opened is not None:
            self.opened.demotion._ahead = self.ahead

    def run(self, what) -> object:  # type: ignore[no-untyped-def]
        return self.loop.run_until_complete(what)

    def begin(self, what) -> asyncio.Task[object]:  # type: ignore[no-untyped-def]
        """Begin a coroutine; `spin` and `work` continue it."""
        self.tasks.append(self.loop.create_task(what))
        self.spin()
        return self.tasks[-1]

    def spin(self) -> None:
        async def turns() -> None:
            for _ in range(25):
                await asyncio.sleep(0)

        self.run(turns())

    def work(self, count: int) -> None:
        """Do calls that are held, and let what waits for them go on."""
        for _ in range(count):
            busy = next((each for each in self.threads if isinstance(each, HeldThreads) and each.waiting), None)
            if busy is None:
                return
            busy.work(1)
            self.spin()

    @property
    def opened(self):  # type: ignore[no-untyped-def]
        assert self.tier._opened is not None
        return self.tier._opened

    def demote(self) -> None:
        """Write until there is nothing left to write ahead."""
        while self.run(self.opened.demotion.step()):
            pass

    def kill(self) -> None:
        """The process ends now. What it has not written is lost."""
        self.calls.dead = True
        for fd in list(self.calls.fds):
            self.calls.close(fd)
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        for each in self.threads:
            if isinstance(each, HeldThreads):
                each.work()
        for _ in range(3):
            self.spin()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.spin()
        for task in {*pending, *self.tasks}:
            if task.done() and not task.cancelled():
                task.exception()
        self.loop.close()
