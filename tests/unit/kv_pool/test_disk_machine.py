"""The machine of the prefix cache with a disk tier behind it: each block's bytes say which tokens were written to it.

The disk fails, returns other bytes and is cut; the shard's process is killed between any two calls of the disk, and the
whole cluster, whose memory is gone then. No match may ever lead to other bytes than those of the prompt.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from alignedserve.kv_pool.disk.shard import DISK
from alignedserve.kv_pool.records import WriterKey
from alignedserve.transfer.block_store import HostBlockStore
from support.disk_tier import READ_FAULTS, WRITE_FAULTS, HeldThreads, TierRig, pattern
from support.machines import machine_settings
from support.prefix_machine import CAPACITY, FUSES, PROMPTS, PrefixMachine, Prompt
from support.prefix_pool import GEOMETRY, Fuse, Killed, index_memory, open_indexed

SLOTS = 9
Result = TypeVar("Result")


class Bytes(dict[int, object]):
    """The content of the host's blocks, as their bytes say. Writing `None` scribbles."""

    def __init__(self, store: HostBlockStore) -> None:
        super().__init__()
        self.store = store
        self.meanings: dict[bytes, object] = {}

    def __setitem__(self, block: int, content: object) -> None:
        data = os.urandom(GEOMETRY.block_bytes)
        if content is not None:
            root, tokens = content  # type: ignore[misc]
            data = pattern(root, tokens)
            self.meanings[data] = content
        self.store.read_block(block)[:] = data

    def __getitem__(self, block: int) -> object:
        return self.meanings.get(bytes(self.store.read_block(block)))


class DeadlyFuse(Fuse):
    """Once the process is killed, nothing of it writes any more."""

    dead = False

    def tick(self) -> None:
        if self.dead:
            raise Killed
        try:
            super().tick()
        except Killed:
            self.dead = True
            raise


class DiskMachine(PrefixMachine):
    own_writer = DISK

    @initialize(held=st.booleans(), lru=st.booleans(), collide=st.booleans(), reserve=st.integers(0, 3))
    def start(self, *, held: bool, lru: bool, collide: bool, reserve: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="disk-tier-"))
        self.rig: TierRig | None = None
        self.store = HostBlockStore.private("kv_pool-0", GEOMETRY, CAPACITY)
        self.bytes = Bytes(self.store)
        self.lru, self.restarts, self.on_disk = lru, 0, 0
        HeldThreads.held = held
        super().start(collide=collide, lru=lru, reserve=reserve)

    def open_pool(self) -> None:
        """The first process, or a successor of one that was killed."""
        if self.rig is not None:
            self.fuse.dead = True
            self.rig.kill()
        self.fuse = DeadlyFuse()
        self.content = self.bytes
        self.pool, self.index = open_indexed(
            self.memory, CAPACITY, self.policy, self.reserve, self.fuse, digest=self.digest
        )
        self.rig = TierRig(self.pool, self.index, self.store, self.folder, SLOTS, policy="lru" if self.lru else "value")
        self.rig.start()

    def until_killed(self, fuse: int, step: Callable[[], Result]) -> Result | None:
        self.fuse.left = fuse
        try:
            result: Result | None = step()
        except Killed:
            result = None
        if self.fuse.dead:  # perhaps in a task
            self.kills += 1
            self.open_pool()
            return None
        self.fuse.left = -1
        return result

    @rule(prompt=PROMPTS, fuse=FUSES, calls=st.sampled_from((0, 2, 99)))
    def promote(self, prompt: Prompt, fuse: int, calls: int) -> None:
        """For one of the last prompts, or another one. `calls` of the disk are done before anything else happens."""
        root, tokens = self.known[-1 - len(prompt[1])] if len(self.known) > len(prompt[1]) else (prompt[0], [])
        self.during(fuse, calls, lambda: self.rig.opened.promotion.promote(root, [*tokens, 0], 1000))

    @rule(fuse=FUSES, calls=st.sampled_from((0, 2, 99)))
    def demote(self, fuse: int, calls: int) -> None:
        self.during(fuse, calls, self.rig.opened.demotion.step, alone=True)

    @rule(prompt=PROMPTS, calls=st.sampled_from((0, 1, 99)))
    def give_up_all_and_promote(self, prompt: Prompt, calls: int) -> None:
        last = WriterKey("decode", "all", 1)
        for grant in self.pool.want(last, self.pool.counts().free + self.pool.counts().cached):
            if grant.writer == last:
                for block in grant.block_ids:
                    self.content[block] = None
        self.pool.hello(last)  # it waits for no more
        self.pool.give_back(last, self.pool._blocks.leased_to(last))
        self.pool.hello(last)
        self.promote(prompt, -1, calls)

    def during(self, fuse: int, calls: int, begin: Callable[[], Any], *, alone: bool = False) -> None:
        def step() -> None:
            tasks = [task for task in self.rig.tasks if not task.done()]
            if not (alone and tasks):
                self.rig.begin(begin())
                self.rig.work(calls)

        self.until_killed(fuse, step)

    @rule(count=st.integers(1, 6), fuse=FUSES)
    def work(self, count: int, fuse: int) -> None:
        self.until_killed(fuse, lambda: self.rig.work(count))

    @rule(
        reads=st.lists(st.sampled_from(("", *READ_FAULTS)), max_size=3),
        writes=st.lists(st.sampled_from(("", *WRITE_FAULTS)), max_size=3),
    )
    def let_the_disk_fail(self, reads: list[str], writes: list[str]) -> None:
        self.rig.calls.read_faults, self.rig.calls.write_faults = reads, writes

    @rule(share=st.floats(0.0, 1.0), removed=st.booleans())
    def lose_a_part_of_the_file(self, share: float, *, removed: bool) -> None:
        for path in self.folder.glob("*.kv"):
            if removed:
                path.unlink()
            else:
                os.truncate(path, int(path.stat().st_size * share))

    @rule()
    def wait(self) -> None:
        self.rig.now += 1000.0
        self.rig.spin()

    @rule(clean=st.booleans())
    def restart_the_cluster(self, *, clean: bool) -> None:
        """All memory is gone. `clean`: what had to be written is."""
        if clean:
            self.finish()
        self.memory = index_memory(CAPACITY)
        self.store = HostBlockStore.private("kv_pool-0", GEOMETRY, CAPACITY)
        self.bytes.store = self.store
        self.restarts += 1
        self.open_pool()
        self.on_disk += self.rig.opened.disk.index.blocks

    def finish(self) -> None:
        held, HeldThreads.held = HeldThreads.held, False
        self.rig.work(1000)
        self.rig.spin()
        HeldThreads.held = held

    @invariant()
    def the_tier_is_consistent(self) -> None:
        if getattr(self, "rig", None) is None:
            return
        book = self.rig.tier.check()
        assert book is not None
        assert book.problem == ""
        assert book.free_blocks + book.owned_blocks + book.cached_blocks == book.capacity_blocks == SLOTS

    def teardown(self) -> None:
        if getattr(self, "rig", None) is None:
            return
        try:
            self.finish()
            assert all(task.done() for task in self.rig.tasks)
            for task in self.rig.tasks:
                task.result()
            assert not self.pool._blocks.leased_to(DISK)
            count = self.rig.tier.count()
            assert count.owned == 0
            assert self.rig.opened.disk.blocks.leased_blocks == 0
            super().teardown()
            self.rig.kill()
        finally:
            HeldThreads.held = False
            shutil.rmtree(self.folder, ignore_errors=True)


TestDisk = DiskMachine.TestCase
TestDisk.settings = machine_settings(25, 40)
