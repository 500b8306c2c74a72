"""Conversations are found again by their blocks or their name, and their blocks rank by when they are expected back."""

from __future__ import annotations

from itertools import count

import pytest

from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_chain import root_digest
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.kv_pool.table import AllocationTable
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache import sessions
from alignedserve.scheduler.cache.returns import STOP, TOOL_CALLS, UNKNOWN
from alignedserve.scheduler.cache.sessions import Note, Session, Sessions
from alignedserve.scheduler.cache.values import ValuePolicy
from support.kv_pool import PREFILL, drop_prefix, leased
from support.prefix_pool import GEOMETRY, index_memory

ROOT = root_digest("model")
CAPACITY = 40


class World:
    """A shard whose clock stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0
        table = AllocationTable(index_memory(CAPACITY), GEOMETRY, CAPACITY)
        index = PrefixIndex(table.open_index(), 4, ValuePolicy(float, 4))
        self.pool = KvPool("kv_pool-0", table, 4, index=index, clock=lambda: self.now_s)
        assert self.pool.sessions is not None
        self.sessions: Sessions = self.pool.sessions
        self.numbers = count()

    def ask(self, tokens: list[int], kind: str = STOP, name: str = "", *, note_first: bool = False) -> str:
        """A request from its prefill to its end; `tokens` with its answer. Returns its id."""
        key = RequestKey(f"r{next(self.numbers)}")
        held, _ = self.pool.pin(key, ROOT, tokens, len(tokens))
        kept = list(held.block_ids)
        fresh = leased(self.pool, PREFILL, -(-len(tokens) // 4) - len(kept))
        self.pool.commit(PREFILL, key, len(tokens), [*kept, *fresh], kept_blocks=len(kept), token_ids=tokens, root=ROOT)
        self.pool.give_back(PREFILL, self.pool._blocks.leased_to(PREFILL))
        note = Note(kind, name, self.now_s)
        if kind and note_first:
            self.pool.note_ending(key.request_id, note)
        self.pool.release([key])
        if kind and not note_first:
            self.pool.note_ending(key.request_id, note)
        self.pool.check_integrity()
        return key.request_id

    def session(self, request_id: str) -> Session:
        return next(one for one in self.sessions if one.request_id == request_id)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("note_first", [False, True])
def test_a_request_that_goes_on_is_the_next_turn_and_its_delay_is_learned(world: World, note_first: bool) -> None:
    tokens = list(range(12))
    first = world.ask(tokens, TOOL_CALLS, note_first=note_first)
    assert (world.session(first).kind, world.session(first).turns) == (TOOL_CALLS, 1)
    world.now_s += 11.0
    before_s = world.sessions.returns.expected_s(TOOL_CALLS, 1)
    for turn in range(2, 12):
        tokens = [*tokens, *range(100 * turn, 100 * turn + 8)]
        request_id = world.ask(tokens, TOOL_CALLS, note_first=note_first)
        assert world.session(request_id).turns == turn
        assert len(world.sessions) == 1
        world.now_s += 11.0
    after_s = world.sessions.returns.expected_s(TOOL_CALLS, 2)
    assert before_s is not None
    assert after_s is not None
    assert before_s < 6.0 < after_s < 16.0


def test_a_use_counts_once_a_conversation_and_once_for_each_of_others(world: World) -> None:
    uses = world.pool._cache.index.queue._uses  # type: ignore[union-attr]
    shared = list(range(8))
    for turn in range(3):
        world.ask([*shared, *range(50, 58 + 8 * turn)])
    blocks = world.pool.indexed(ROOT, shared)
    assert [uses[block] for block in blocks] == [1, 1]
    world.ask([*shared, *range(90, 98)])
    assert [uses[block] for block in blocks] == [2, 2]


def test_a_conversation_that_lost_its_blocks_is_known_by_their_digests(world: World) -> None:
    world.ask(list(range(16)), TOOL_CALLS)
    drop_prefix(world.pool, ROOT, [])
    world.now_s += 2.0
    request_id = world.ask([*range(16), *range(40, 48)], STOP)
    assert world.session(request_id).turns == 2
    assert len(world.sessions) == 1


def test_a_name_finds_a_conversation_whose_history_was_written_anew(world: World) -> None:
    world.ask(list(range(16)), STOP, "chat-7")
    world.now_s += 30.0
    request_id = world.ask([500, *range(16)], STOP, "chat-7")
    other = world.ask([600, *range(16)], STOP, "chat-8")
    assert [world.session(one).turns for one in (request_id, other)] == [2, 1]
    assert {one.name for one in world.sessions} == {"chat-7", "chat-8"}
    assert len(world.sessions) == 2


def test_an_answers_blocks_continue_the_session_of_their_request(world: World) -> None:
    tokens = list(range(16))
    key = RequestKey("a")
    blocks = leased(world.pool, PREFILL, 2)
    world.pool.commit(PREFILL, key, 8, blocks, token_ids=tokens[:8], root=ROOT)
    world.pool.release([key])
    answer = leased(world.pool, PREFILL, 2)
    world.pool.cache(PREFILL, ROOT, tokens, answer, 2, request_id="a")
    session = world.session("a")
    assert (session.block, session.blocks, session.turns) == (answer[-1], 4, 1)
    world.pool.note_ending("a", Note(STOP, "", world.now_s))
    assert world.session(world.ask([*tokens, *range(70, 78)])).turns == 2
    assert len(world.sessions) == 1


def test_an_answer_that_is_cached_before_its_prompt_is_released_leaves_nothing_behind(world: World) -> None:
    tokens = list(range(16))
    key = RequestKey("a")
    world.pool.commit(PREFILL, key, 8, leased(world.pool, PREFILL, 2), token_ids=tokens[:8], root=ROOT)
    answer = leased(world.pool, PREFILL, 2)
    world.pool.cache(PREFILL, ROOT, tokens, answer, 2, request_id="a")
    world.pool.release([key])
    session = world.session("a")
    assert (session.block, session.blocks) == (answer[-1], 4)
    world.pool.note_ending("a", Note(STOP, "", world.now_s))
    returned = sum(world.sessions.returns._of(STOP, 1).returned)
    for number in range(3):  # only the first of them is the next turn
        world.ask([*tokens[:8], *range(70 + 10 * number, 78 + 10 * number)])
    assert sum(world.sessions.returns._of(STOP, 1).returned) < returned + 1.0
    assert len(world.sessions) == 3
    assert set(world.sessions._by_digest) == {digest for one in world.sessions for digest in one.digests}


def test_what_a_tool_will_answer_outlives_what_ended_after_it(world: World) -> None:
    for _ in range(200):
        world.sessions.returns.ended(STOP, 1)  # and none went on
    world.ask(list(range(16)), TOOL_CALLS)
    for number in range(6):
        world.ask(list(range(1000 * number + 1000, 1000 * number + 1016)), STOP)
    leased(world.pool, PREFILL, CAPACITY - 8)
    assert world.pool.match(ROOT, list(range(16))) == 4
    assert world.pool.match(ROOT, list(range(6000, 6016))) <= 4


def test_an_ending_that_is_not_reported_is_kept_as_unknown_and_all_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    monkeypatch.setattr(sessions, "MOST_NOTES", 3)
    request_id = world.ask(list(range(8)), UNKNOWN)
    assert world.session(request_id).kind == UNKNOWN
    for number in range(1, 9):
        world.ask(list(range(100 * number, 100 * number + 8)), STOP, f"s{number}")
        world.pool.note_ending(f"never-{number}", Note(STOP, "", 0.0))
    assert [one.name for one in world.sessions] == ["s8", "s7", "s6"]
    inner = world.sessions
    assert max(len(inner._by_digest), len(inner._by_name), len(inner._notes)) == 3
