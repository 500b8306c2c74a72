"""The decode loop in any order of events, launching ahead or not: every request gets its scripted answer."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from alignedserve.config import DecodeConfig
from alignedserve.scheduler.instance.plan import BufferKind
from support.machines import machine_settings
from support.scripted_cell import BUFFER, POOL, Client, ScriptedCell
from support.scripted_decode import Script

PROMPTS = ([11] * 3, [12] * 5, [11] * 4 + [13] * 5)  # one for each group; other requests have their own, of 6 tokens
MAYBE = st.one_of(st.none(), st.integers(1, 12))
ANY = st.integers(0, 99)


class LoopMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(8, 24),
        block_size=st.sampled_from((1, 2, 4)),
        max_running=st.integers(1, 6),
        watermark=st.sampled_from((0, 0, 1, 3)),
        join_iterations=st.sampled_from((1, 1, 4)),
        overlap=st.sampled_from((True, True, False)),
        caches=st.sampled_from((True, True, False)),
        lanes=st.sampled_from((1, 1, 2, 3)),
        ranks=st.sampled_from((1, 1, 2, 3)),
    )
    def start(
        self,
        blocks: int,
        block_size: int,
        max_running: int,
        watermark: int,
        join_iterations: int,
        lanes: int,
        ranks: int,
        *,
        overlap: bool,
        caches: bool,
    ) -> None:
        """`blocks`: of each rank. Several have a cache each, and no lanes."""
        config = DecodeConfig(max_running=max_running, watermark_blocks=watermark, join_iterations=join_iterations)
        lanes = lanes if ranks == 1 else 1
        self.cell = ScriptedCell(ranks * blocks, block_size, overlap, config, caches=caches, lanes=lanes, ranks=ranks)
        self.room = blocks * block_size

    def clients(self, where: str) -> list[Client]:
        return [client for client in self.cell.clients.values() if client.where == where and not client.cancelled]

    @rule(
        group=st.integers(0, 3),
        most=st.integers(2, 12),
        ends_at=MAYBE,
        fails_at=st.one_of(st.none(), MAYBE),
        needs_host=st.sampled_from((False, False, False, True)),
        kind=st.sampled_from(BufferKind),
        batch_id=st.integers(1, 3),
    )
    def offer(
        self,
        group: int,
        most: int,
        ends_at: int | None,
        fails_at: int | None,
        kind: BufferKind,
        batch_id: int,
        *,
        needs_host: bool,
    ) -> None:
        number = len(self.cell.clients)
        prompt, name = (PROMPTS[group], f"g{group}") if group < len(PROMPTS) else ([11, 11, *[number] * 4], "")
        if len(prompt) + most <= self.room:
            script = Script(number, prompt, most, ends_at, fails_at, needs_host, name)
            self.cell.offer(self.cell.add(script), kind, batch_id)

    @rule(index=ANY, kind=st.sampled_from(BufferKind), batch_id=st.integers(1, 3))
    def offer_again(self, index: int, kind: BufferKind, batch_id: int) -> None:
        if waiting := self.clients(POOL):
            self.cell.offer(waiting[index % len(waiting)], kind, batch_id)

    @rule(index=ANY)
    def cancel(self, index: int) -> None:
        if here := self.clients("here"):
            self.cell.cancel(here[index % len(here)])

    @rule(index=ANY)
    def recall(self, index: int) -> None:
        if here := self.clients("here"):
            self.cell.loop.recall([here[index % len(here)].script.key])

    @rule(index=ANY, due_in_s=st.sampled_from((-5.0, 5.0)))
    def mark_urgent(self, index: int, due_in_s: float) -> None:
        if here := self.clients("here"):
            self.cell.loop.mark_urgent({here[index % len(here)].script.key: due_in_s})

    @rule(objective_s=st.sampled_from((0.0, 5.0, float("inf"))))
    def set_default_objective(self, objective_s: float) -> None:
        self.cell.loop.set_default_objective(objective_s)

    @rule(blocks=st.sampled_from((0, 4, 100)))
    def set_lease(self, blocks: int) -> None:
        self.cell.loop.set_lease(blocks)

    @rule()
    def take_inventory(self) -> None:
        self.cell.loop.take_inventory()

    @rule(store=st.sampled_from((BUFFER, BUFFER, POOL)))
    def lose_source(self, store: str) -> None:
        self.cell.loop.source_lost([store])

    @rule()
    def leave_source(self) -> None:
        self.cell.loop.leave_source([BUFFER])

    @rule(fails=st.sampled_from((False, False, True)), turns=st.integers(1, 4))
    def turn(self, turns: int, *, fails: bool) -> None:
        self.cell.engine.fail_next = fails and turns == 1
        for _ in range(turns):
            self.cell.turn()

    @precondition(lambda self: hasattr(self, "cell") and self.cell.pulls)
    @rule(index=ANY, fails=st.sampled_from((False, False, False, True)))
    def end_pull(self, index: int, *, fails: bool) -> None:
        self.cell.end_pull(index % len(self.cell.pulls), fails=fails)

    @precondition(lambda self: hasattr(self, "cell") and self.cell.copies)
    @rule(index=ANY, fails=st.sampled_from((False, False, True)))
    def end_move(self, index: int, *, fails: bool) -> None:
        self.cell.end_move(index % len(self.cell.copies), fails=fails)

    @precondition(lambda self: hasattr(self, "cell") and self.cell.evictions)
    @rule(index=ANY, fails=st.sampled_from((False, False, True)))
    def end_eviction(self, index: int, *, fails: bool) -> None:
        self.cell.end_eviction(index % len(self.cell.evictions), fails=fails)

    @precondition(lambda self: hasattr(self, "cell") and self.cell.endings)
    @rule(index=ANY)
    def end_caching(self, index: int) -> None:
        self.cell.end_caching(index % len(self.cell.endings))

    @invariant()
    def as_many_steps_at_one_time_as_may_be(self) -> None:
        if hasattr(self, "cell"):
            assert self.cell.engine.most_ahead <= max(self.cell.lanes, 1 + (self.cell.overlap and self.cell.lanes == 1))

    def teardown(self) -> None:
        if not hasattr(self, "cell"):
            return
        drains = len(self.cell.clients) % 3 == 0
        if drains:
            self.cell.loop.drain()
        self.cell.settle()
        if drains:
            assert self.cell.drained
            assert not self.clients("here")
            self.cell.check()
            assert self.cell.allocator.free_blocks == self.cell.blocks
        else:
            self.cell.check_ended()


TestLoop = LoopMachine.TestCase
TestLoop.settings = machine_settings(80, 50)
