"""The iteration scheduler beside a model: offers, cancels, recalls, marks, copies that end or fail, in any order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from alignedserve.config import DecodeConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.plan import (
    BufferKind,
    CancelOutcome,
    Candidate,
    Evict,
    IterationPlan,
    Join,
    Relocate,
)
from alignedserve.scheduler.instance.ranged_allocator import RangedAllocator
from alignedserve.scheduler.ranks.group_scheduler import GroupScheduler
from alignedserve.scheduler.ranks.names import PLACEMENTS
from support.chains import chain_of

NUMBERS = st.integers(0, 9)
MANY = st.lists(NUMBERS, max_size=4)
KINDS = st.sampled_from(BufferKind)
COPYING = ("entering", "moving", "leaving")
RANKS = st.sampled_from((1, 1, 2, 3))
GROUP_SIZE = 3  # requests 0 to 2, 3 to 5 and 6 to 8 answer one prompt each; 9 is alone
COMMON = 6  # tokens that all prompts begin with


def key_of(number: int) -> RequestKey:
    return RequestKey(str(number))


def salt_of(key: RequestKey) -> bytes:
    return b"other" if int(key.request_id) == 8 else b""


@dataclass
class Known:
    """`where`: candidate, giving back, entering, running, moving or leaving; `tokens`: its KV."""

    candidate: Candidate
    where: str
    tokens: int
    copy: Join | Evict | Relocate | None = None
    cancelled: bool = False


def most_tokens(known: Known) -> int:
    return known.candidate.max_total_tokens


class IterationMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(3, 24),
        block_size=st.sampled_from((1, 4)),
        max_running=st.integers(1, 6),
        watermark=st.sampled_from((0, 0, 1, 3)),
        join_iterations=st.sampled_from((1, 4, 8)),
        starvation_after_s=st.sampled_from((2.0, 20.0, float("inf"))),
        join_window=st.sampled_from((None, 0.0, 0.25)),
        prompts=st.lists(st.integers(1, 30), min_size=4, max_size=4),
        objective_s=st.sampled_from((None, None, 1.0, 150.0, 300.0)),
        ranks=RANKS,
        placement=st.sampled_from(("shared-pool", *PLACEMENTS)),
    )
    def start(
        self,
        capacity: int,
        block_size: int,
        max_running: int,
        watermark: int,
        join_iterations: int,
        starvation_after_s: float,
        join_window: float | None,
        prompts: list[int],
        objective_s: float | None,
        ranks: int,
        placement: str,
    ) -> None:
        """With an objective a token takes a second in an iteration; joins count each member with all its growth.

        `capacity`: blocks of each rank. Several have a cache each.
        """
        self.ranks = ranks
        self.block_size, self.capacity, self.max_running, self.prompts = block_size, capacity, max_running, prompts
        config = DecodeConfig(max_running=max_running, watermark_blocks=watermark, join_iterations=join_iterations)
        self.objective_s = objective_s
        pace = None if objective_s is None else Pace(objective_s, sum)
        waits: dict[str, Any] = {"starvation_after_s": starvation_after_s, "join_window": join_window, "pace": pace}
        if ranks == 1:
            self.allocator = BlockAllocator(capacity, "decode-0")
            self.scheduler = IterationScheduler(config, self.allocator, block_size, **waits)
        else:
            self.allocator = ranged = RangedAllocator(ranks, capacity, "decode-0")
            self.scheduler = GroupScheduler(config, ranged, block_size, PLACEMENTS[placement](ranks), **waits)
        self.known: dict[RequestKey, Known] = {}
        self.content: dict[int, tuple[object, ...]] = {}  # block -> salt, and the tokens up to its end
        self.failed_out = 0  # failed copies out: as many requests may run beyond `max_running`
        self.now_s = 0.0

    def words(self, key: RequestKey, count: int) -> list[str]:
        """The first tokens of a request: some of all requests, some of its group, the rest its own."""
        number = int(key.request_id)
        group = number // GROUP_SIZE
        ends = min(COMMON, self.prompts[group]), self.prompts[group] + 2
        return ["all" if at < ends[0] else f"g{group}" if at < ends[1] else f"r{number}" for at in range(count)]

    def note_content(self, join: Join) -> None:
        """What a join shares is the KV of its own tokens, and has been copied in."""
        for index, block in enumerate(join.block_ids):
            if index < join.resident_blocks:
                assert self.content[block] == self.content_of(join.key, index)
            else:
                self.content.pop(block, None)

    def content_of(self, key: RequestKey, index: int) -> tuple[object, ...]:
        return salt_of(key), *self.words(key, (index + 1) * self.block_size)

    def where(self, *places: str) -> list[Known]:
        return [known for known in self.known.values() if known.where in places]

    # what the worker tells

    @rule(number=NUMBERS, more=st.integers(0, 8), most=st.integers(1, 12), kind=KINDS, batch_id=st.integers(1, 3))
    def offer(self, number: int, more: int, most: int, kind: BufferKind, batch_id: int) -> None:
        key = key_of(number)
        prompt = self.prompts[number // GROUP_SIZE]
        chain = chain_of(self.words(key, prompt + more), self.block_size, salt_of(key))
        candidate = Candidate(key, prompt + more, prompt + more + most, chain, kind, batch_id)
        self.scheduler.offer(candidate, self.now_s)
        known = self.known.get(key)
        if known is not None and known.where != "candidate":
            return  # it is here already
        fits = -(-candidate.max_total_tokens // self.block_size) <= self.capacity
        self.known[key] = Known(candidate, "candidate" if fits else "giving back", candidate.kv_tokens)

    @rule(number=NUMBERS)
    def withdraw(self, number: int) -> None:
        key = key_of(number)
        was_candidate = key in self.known and self.known[key].where in ("candidate", "giving back")
        assert self.scheduler.withdraw(key) == was_candidate
        if was_candidate:
            del self.known[key]

    @rule(numbers=MANY)
    def recall(self, numbers: list[int]) -> None:
        self.scheduler.recall([key_of(number) for number in numbers])
        for known in self.where("candidate"):
            if int(known.candidate.key.request_id) in numbers:
                known.where = "giving back"

    @rule(numbers=MANY, late_s=st.floats(-5.0, 5.0))
    def mark_urgent(self, numbers: list[int], late_s: float) -> None:
        self.scheduler.mark_urgent({key_of(number): self.now_s - late_s for number in numbers})

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        key = key_of(number)
        known = self.known.get(key)
        outcome = self.scheduler.cancel(key)
        if known is None:
            assert outcome is CancelOutcome.NOT_HERE
        elif known.where in COPYING:
            assert outcome is CancelOutcome.COPYING
            known.cancelled = True
        else:
            assert outcome is (CancelOutcome.RUNNING if known.where == "running" else CancelOutcome.WAITING)
            del self.known[key]

    @rule(blocks=st.sampled_from((0, 0, 4, 100)))
    def set_lease(self, blocks: int) -> None:
        self.scheduler.set_requests_buffer_lease(blocks)

    @precondition(lambda self: hasattr(self, "known") and self.where(*COPYING))
    @rule(index=st.integers(0, 9), fails=st.sampled_from((False, False, True)))
    def end_copy(self, index: int, *, fails: bool) -> None:
        copies = self.where(*COPYING)
        known = copies[index % len(copies)]
        key, leaving = known.candidate.key, known.where == "leaving"
        copy, known.copy = known.copy, None
        if isinstance(copy, Relocate):
            runs_on = self.end_move(known, copy, fails=fails)
        elif fails:
            runs_on = leaving and not known.cancelled
            assert self.scheduler.copy_failed(key) == runs_on
            self.failed_out += runs_on
        elif leaving:
            assert self.scheduler.copied_out(key) == (not known.cancelled)
            runs_on = False
        else:
            runs_on = not known.cancelled
            assert isinstance(copy, Join)
            self.content |= {block: self.content_of(key, index) for index, block in enumerate(copy.block_ids)}
            assert self.scheduler.copied_in(key) == runs_on
        if runs_on:
            known.where = "running"
        elif leaving and not (fails or known.cancelled or self.to_pool[key]):
            known.where = "candidate"
            known.candidate = replace(known.candidate, kv_tokens=known.tokens)
        else:
            del self.known[key]

    def end_move(self, known: Known, move: Relocate, *, fails: bool) -> bool:
        """Until here the blocks on both sides were held."""
        key = known.candidate.key
        kept = {block: self.content_of(key, move.shared_blocks + at) for at, block in enumerate(move.block_ids)}
        assert all(self.allocator.holder_count(block) for block in (*move.source_ids, *move.block_ids))
        end = self.scheduler.copy_failed if fails else self.scheduler.copied_in
        assert end(key) == (not known.cancelled)
        if not fails:
            self.content |= kept
        return not known.cancelled

    @precondition(lambda self: hasattr(self, "known") and self.where("entering"))
    @rule(index=st.integers(0, 9))
    def copy_in_what_cannot_run_yet(self, index: int) -> None:
        entering = self.where("entering")
        known = entering[index % len(entering)]
        key, copy = known.candidate.key, known.copy
        assert isinstance(copy, Join)
        assert self.scheduler.copied_in(key, ready=False)
        self.content |= {block: self.content_of(key, place) for place, block in enumerate(copy.block_ids)}

    @rule(number=NUMBERS)
    def end_a_copy_that_is_none(self, number: int) -> None:
        known = self.known.get(key_of(number))
        if known is None or known.where not in COPYING:
            for end in self.scheduler.copied_in, self.scheduler.copied_out, self.scheduler.copy_failed:
                with pytest.raises(AccountingError):
                    end(key_of(number))

    # an iteration

    @rule(passes_s=st.sampled_from((0.0, 0.5, 3.0, 30.0)), cancels=MANY, stops=MANY)
    def iterate(self, passes_s: float, cancels: list[int], stops: list[int]) -> None:
        """`cancels` arrive during the pass; `stops` end with a stop string."""
        self.now_s += passes_s
        plan = self.scheduler.plan(self.now_s)
        self.take_plan(plan)
        for number in cancels:
            self.cancel(number)
        tokens = []
        for item in plan.run:
            known = self.known.get(item.key)
            if known is None:
                tokens.append((item.key, bool(stops)))  # cancelled meanwhile: ignored
                continue
            known.tokens += 1
            stopped = int(item.key.request_id) in stops
            ends = known.tokens >= known.candidate.max_total_tokens or stopped
            tokens.append((item.key, ends))
            if ends:
                del self.known[item.key]
        self.scheduler.advance(tokens)

    def take_plan(self, plan: IterationPlan) -> None:
        for key in plan.give_back.keys:
            assert self.known.pop(key).where in ("candidate", "giving back")
        assert not self.where("giving back")
        self.to_pool = getattr(self, "to_pool", {})
        for evict in plan.evictions:
            known = self.known[evict.key]
            assert (known.where, known.tokens) == ("running", evict.kv_tokens)
            assert len(evict.block_ids) == -(-evict.kv_tokens // self.block_size)
            known.where, known.copy = "leaving", evict
            self.to_pool[evict.key] = evict.to_pool
        for join in plan.joins:
            known = self.known[join.key]
            assert known.where == "candidate"
            assert len(join.block_ids) == -(-known.tokens // self.block_size)
            for block in join.block_ids[join.resident_blocks :]:
                assert self.allocator.holders(block) == (join.key,)  # no other request's KV is overwritten
            self.note_content(join)
            known.where, known.copy = "entering", join
        for move in plan.moves:
            self.take_move(move)
        if plan.joins and self.objective_s is not None:
            members = self.where("running", "entering", "moving")
            assert len(members) == 1 or sum(map(most_tokens, members)) <= self.objective_s
        for item in plan.run:
            known = self.known[item.key]
            assert (known.where, known.tokens) == ("running", item.kv_tokens)  # its copy has completed
            assert len(item.block_ids) * self.block_size > item.kv_tokens
            written = item.block_ids[item.kv_tokens // self.block_size]
            assert self.allocator.holders(written) == (item.key,)
            self.content.pop(written, None)
        assert len({item.key for item in plan.run}) == len(plan.run)
        gone = len(plan.moves) + len(plan.evictions)  # one that stalled may go for an overdue candidate
        assert len(plan.run) + plan.stalled <= len(self.where("running")) + gone
        assert len(self.where("running", "entering", "moving")) <= self.max_running + self.failed_out
        assert not plan.moves or self.ranks > 1

    def take_move(self, move: Relocate) -> None:
        """A request that runs is copied to another rank, without what requests have there already."""
        known = self.known[move.key]
        assert known.where == "running"
        blocks = -(-known.tokens // self.block_size)
        assert len(move.source_ids) == len(move.block_ids) == blocks - move.shared_blocks
        sides = [{block // self.capacity for block in side} for side in (move.source_ids, move.block_ids)]
        assert move.shared_blocks == blocks or (len(sides[0]) == len(sides[1]) == 1 and sides[0] != sides[1])
        for block in move.block_ids:
            assert self.allocator.holders(block) == (move.key,)
            self.content.pop(block, None)
        for index, block in enumerate(self.scheduler._batch.entering[move.key].block_ids[: move.shared_blocks]):
            assert self.content[block] == self.content_of(move.key, index)
        known.where, known.copy = "moving", move

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "known"):
            return
        self.scheduler.check_integrity()
        status = self.scheduler.status()
        assert status.running == len(self.where("running", "entering", "moving"))
        assert status.batch_buffer_requests + status.requests_buffer_requests == len(self.where("candidate"))
        assert 1 <= status.max_running <= self.max_running
        assert status.max_running == self.max_running or self.objective_s is not None
        assert self.scheduler.holds_nothing() == (not self.known)
        assert bool(self.allocator.owned_blocks) == bool(self.where("running", *COPYING))

    def teardown(self) -> None:
        """No new requests, and copies end: all remaining requests run to their end."""
        if not hasattr(self, "known"):
            return
        for _ in range(2000):
            if not self.known:
                break
            before = {key: (known.where, known.tokens) for key, known in self.known.items()}
            self.iterate(1.0, [], [])
            for _ in self.where(*COPYING):
                self.end_copy(0, fails=False)
            after = {key: (known.where, known.tokens) for key, known in self.known.items()}
            assert before != after, f"stuck: {after}"
        assert not self.known
        assert self.allocator.free_blocks == self.ranks * self.capacity
