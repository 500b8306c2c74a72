"""The chunk scheduler beside a model: arrivals, passes, cancellations and releases in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alignedserve.errors import AccountingError, InvalidRequestError
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.prefill_chunks import Chunk, ChunkScheduler
from support.chains import chain_of
from support.machines import machine_settings

KEYS = st.integers(0, 5).map(lambda number: RequestKey(str(number)))
CAPACITY, BLOCK = 8, 4


def words(key: RequestKey, count: int) -> list[str]:
    """The first tokens of a prompt: some are everybody's, some those of every other prompt."""
    number = int(key.request_id)
    return ["all" if at < 4 else f"half {number % 2}" if at < 10 else f"own {number}" for at in range(count)]


@dataclass
class Prompt:
    tokens: int
    planned: int
    computed: int
    cancelled: bool = False
    done: bool = False  # computed; its blocks are held until they are released
    started: bool = False
    to_fetch: bool = False  # the KV of its first tokens must be fetched, or is being fetched
    fetching: bool = False
    shared: int = 0  # tokens in blocks of others


@dataclass
class Model:
    prompts: dict[RequestKey, Prompt] = field(default_factory=dict)  # in order of arrival
    in_flight: list[Chunk] = field(default_factory=list)

    def waiting(self, key: RequestKey) -> bool:
        return key in self.prompts and not self.prompts[key].done


class ChunksMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(CAPACITY, "prefill-0")
        self.chunks = ChunkScheduler(self.allocator, BLOCK)
        self.model = Model()
        self.content: dict[int, list[str]] = {}  # block -> the tokens up to its end, of blocks that were fetched

    def note_starts(self) -> None:
        """What a prompt shares is the KV of its own tokens, and has been fetched."""
        for key, prompt in self.model.prompts.items():
            if prompt.started or not (blocks := self.chunks.blocks_of(key)):
                continue
            prompt.started = True
            shared = self.chunks.shared_blocks(key)
            prompt.shared = shared * BLOCK
            prompt.to_fetch = prompt.planned > prompt.shared
            assert prompt.shared <= prompt.planned
            for index, block in enumerate(blocks):
                if index < shared:
                    assert self.content[block] == words(key, (index + 1) * BLOCK)
                else:
                    self.content.pop(block, None)

    @rule(key=KEYS, tokens=st.integers(0, 40), start=st.integers(-1, 12))
    def add(self, key: RequestKey, tokens: int, start: int) -> None:
        if self.model.waiting(key):
            with pytest.raises(AccountingError):
                self.chunks.add(key, tokens, start)
        elif not 0 <= start < tokens or tokens > CAPACITY * BLOCK:
            with pytest.raises(InvalidRequestError):
                self.chunks.add(key, tokens, start)
        elif key not in self.model.prompts:
            self.chunks.add(key, tokens, start, chain=chain_of(words(key, start), BLOCK))
            self.model.prompts[key] = Prompt(tokens, start, start, to_fetch=start > 0)

    @rule(budget=st.integers(0, 20), most=st.integers(0, 4))
    def plan(self, budget: int, most: int) -> None:
        chunks = self.chunks.plan(budget, most)
        self.note_starts()
        assert sum(chunk.count for chunk in chunks) <= budget
        assert len(chunks) <= most
        for chunk in chunks:
            prompt = self.model.prompts[chunk.key]
            assert not prompt.cancelled
            assert not prompt.to_fetch
            assert chunk.start == prompt.planned
            assert chunk.count > 0
            prompt.planned += chunk.count
            assert prompt.started
            assert chunk.last == (prompt.planned == prompt.tokens) == (prompt.planned >= prompt.tokens)
        self.model.in_flight += chunks
        for key in self.chunks.take_fetches():
            prompt = self.model.prompts[key]
            assert prompt.to_fetch
            prompt.fetching = True
        wanted = [k for k, p in self.model.prompts.items() if not (p.cancelled or p.done) and p.planned < p.tokens]
        wanted = [k for k in wanted if self.model.prompts[k].started or not self.may_wait(k)]
        started = [key for key in wanted if self.model.prompts[key].started]
        assert wanted[: len(started)] == started  # first come, first served: no prompt overtakes

    @rule(key=KEYS)
    def compute_whole(self, key: RequestKey) -> None:
        prompt = self.model.prompts.get(key)
        not_begun = prompt is not None and not prompt.started and not prompt.cancelled
        assert self.chunks.compute_whole(key) == not_begun
        if prompt is not None and not_begun:
            prompt.planned = prompt.computed = 0
            prompt.to_fetch = False

    @rule(key=KEYS, start=st.sampled_from((4, 8, 12)))
    def add_and_fetch(self, key: RequestKey, start: int) -> None:
        """So that others often find something."""
        self.add(key, 14, start)
        self.plan(4, 4)
        self.fetched(failed=False)

    def may_wait(self, key: RequestKey) -> bool:
        """Whether others are fetching, so that the prompt may wait for what both begin with."""
        return self.model.prompts[key].to_fetch and any(other.fetching for other in self.model.prompts.values())

    @precondition(lambda self: self.model.in_flight)
    @rule()
    def computed(self) -> None:
        """A worker has one pass in flight, and reports `done` in order."""
        chunk = self.model.in_flight.pop(0)
        prompt = self.model.prompts[chunk.key]
        prompt.computed += chunk.count
        complete = self.chunks.done(chunk)
        assert complete == (not prompt.cancelled and prompt.computed == prompt.tokens)
        prompt.done = complete
        if prompt.cancelled and prompt.computed == prompt.planned:
            del self.model.prompts[chunk.key]

    @rule(failed=st.booleans())
    def fetched(self, *, failed: bool) -> None:
        key = next((key for key, prompt in self.model.prompts.items() if prompt.fetching), None)
        if key is None:
            return
        prompt = self.model.prompts[key]
        assert self.chunks.fetched(key, failed=failed) == (not prompt.cancelled)
        prompt.to_fetch = prompt.fetching = False
        if prompt.cancelled:
            del self.model.prompts[key]
        elif failed:
            prompt.planned = prompt.computed = prompt.shared
        else:
            blocks = self.chunks.blocks_of(key)[: prompt.planned // BLOCK]
            self.content |= {block: words(key, (index + 1) * BLOCK) for index, block in enumerate(blocks)}

    @rule(key=KEYS)
    def done_out_of_turn(self, key: RequestKey) -> None:
        if not any(chunk.key == key for chunk in self.model.in_flight):
            with pytest.raises(AccountingError):
                self.chunks.done(Chunk(key, 1000, 1))

    @rule(key=KEYS)
    def cancel(self, key: RequestKey) -> None:
        prompt = self.model.prompts.get(key)
        ends = prompt is not None and not prompt.done and not prompt.cancelled
        assert self.chunks.cancel(key) == ends
        if not ends or prompt is None:
            return
        if prompt.planned > prompt.computed or prompt.fetching:
            prompt.cancelled = True
        else:
            del self.model.prompts[key]

    @rule(key=KEYS)
    def cut(self, key: RequestKey) -> None:
        """A prompt with computed tokens and no work in flight counts as completed with these."""
        prompt = self.model.prompts.get(key)
        quiet = prompt is not None and prompt.started and not (prompt.to_fetch or prompt.done or prompt.cancelled)
        ends = prompt is not None and quiet and prompt.planned == prompt.computed
        assert self.chunks.cut(key) == (prompt.computed if prompt is not None and ends else 0)
        if prompt is not None and ends and prompt.computed:
            prompt.done = True

    @rule(key=KEYS)
    def release(self, key: RequestKey) -> None:
        if self.model.waiting(key):
            with pytest.raises(AccountingError):
                self.chunks.release(key)
            return
        self.chunks.release(key)
        self.model.prompts.pop(key, None)

    @invariant()
    def adds_up(self) -> None:
        self.chunks.check_integrity()
        prompts = self.model.prompts
        assert self.chunks.pending_prompts == sum(not p.done for p in prompts.values())
        pending = [p.tokens - p.computed for p in prompts.values() if not (p.cancelled or p.done)]
        assert self.chunks.pending_tokens == sum(pending)
        held = {key: -(-p.tokens // BLOCK) for key, p in prompts.items() if p.started}
        assert {key: len(self.chunks.blocks_of(key)) for key in held} == held
        assert self.allocator.owned_blocks == len({block for key in held for block in self.chunks.blocks_of(key)})

    def teardown(self) -> None:
        """Every remaining prompt is computed once the blocks of the completed ones are released."""
        for _ in range(1000):
            if not self.model.prompts:
                break
            self.plan(16, 4)
            self.fetched(failed=False)
            while self.model.in_flight:
                self.computed()
            for key in [key for key, prompt in self.model.prompts.items() if prompt.done]:
                self.release(key)
        assert not self.model.prompts
        assert self.allocator.owned_blocks == self.chunks.pending_tokens == 0


TestChunks = ChunksMachine.TestCase
TestChunks.settings = machine_settings(60, 40)
