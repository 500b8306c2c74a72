"""A decode loop without its thread, with a scripted engine. Copies end when a test says so. All steps are checked."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.config import DecodeConfig
from alignedserve.control.convert import key_from_proto, spec_to_proto
from alignedserve.decode_worker.endings import Ending, Endings
from alignedserve.decode_worker.held import EvictionOrder, Outcome
from alignedserve.decode_worker.loop import DecodeLoop
from alignedserve.errors import TransferError
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.scheduler.instance.ranged_allocator import RangedAllocator
from alignedserve.scheduler.instance.resident import BlockChain
from alignedserve.scheduler.ranks.base import Members, Move, Rank
from alignedserve.scheduler.ranks.group_scheduler import GroupScheduler
from alignedserve.scheduler.ranks.shared_pool import SharedPool
from alignedserve.transfer.completion import Completion
from support.scripted_decode import Script, ScriptedDecode

POOL, BUFFER = "pool", "requests"
MOST_CACHING = 6  # blocks of ended requests that are held until they are copied to the prefix cache


@dataclass
class Client:
    """What the gateway and the scheduler know of a request. `where`: pool, here, ended or lost."""

    script: Script
    stored: pb.StoredRequest
    tokens: list[int]
    where: str = POOL
    cancelled: bool = False
    reason: str = ""


@dataclass
class Pull:
    stored: pb.StoredRequest
    completion: Completion


@dataclass
class RankCopy:
    """A request on its way from one rank's cache to another's."""

    source_ids: Sequence[int]
    block_ids: Sequence[int]
    completion: Completion


class RestlessPool(SharedPool):
    """Moves a request whenever one may move and another rank has room, whatever it is worth."""

    def moves(self, ranks: Sequence[Rank], members: Members) -> list[Move]:
        for rank in ranks:
            for one in members.of(rank.number):
                for other in ranks:
                    if other is not rank and other.takes(one):
                        return [Move(one.key, rank.number, other.number)]
        return []


@dataclass
class ScriptedCell:
    """A decode loop with a cache of `blocks` blocks. `overlap` is the argument of the loop.

    `ranks`: that have an equal share of the blocks each; requests move between them all the time.
    `lanes`: iterations that are computed at one time, as in a pipeline.
    `caches`: requests that begin alike share blocks, and answers are cached.
    """

    blocks: int
    block_size: int
    overlap: bool | None
    config: DecodeConfig = field(default_factory=DecodeConfig)
    engine_overlaps: bool = True
    caches: bool = False
    lanes: int = 1
    ranks: int = 1

    def __post_init__(self) -> None:
        self.clients: dict[RequestKey, Client] = {}
        self.pulls: list[Pull] = []
        self.settled_pulls = 0  # pulls that wait for no iteration
        self.evictions: list[EvictionOrder] = []
        self.endings: list[Ending] = []
        self.shared_blocks = self.cached_blocks = 0
        self.drained = False
        self.copies: list[RankCopy] = []
        self.moved = 0
        self.allocator = BlockAllocator(self.blocks, "cache")
        self.scheduler = IterationScheduler(self.config, self.allocator, self.block_size)
        if self.ranks > 1:
            self.allocator = books = RangedAllocator(self.ranks, self.blocks // self.ranks, "cache")
            self.scheduler = GroupScheduler(self.config, books, self.block_size, RestlessPool(self.ranks))
        self.engine = ScriptedDecode({}, self.blocks, self.block_size, self.engine_overlaps, self.lanes)
        endings = Endings(self.allocator, self.block_size, POOL) if self.caches else None
        if endings is not None:
            endings._most = MOST_CACHING  # a share of this small cache would be nothing
        self.loop = DecodeLoop(
            "decode-0",
            self.engine,
            self.scheduler,
            None,
            self._pull,
            self._on_outcome,
            overlap=self.overlap,
            endings=endings,
            chain_of=self._chain_of,
            copy_within=self._copy if self.ranks > 1 else None,
        )

    # called by tests

    def add(self, script: Script) -> Client:
        """A prefilled request that waits in the pool."""
        self.engine.scripts[script.number] = script
        tokens = [script.token(0)]
        kv_tokens = len(script.prompt)
        stored = pb.StoredRequest(
            spec=spec_to_proto(script.spec()),
            kv_tokens=kv_tokens,
            store_id=POOL,
            pool_id=POOL,
            pool_tokens=kv_tokens,
        )
        client = self.clients[script.key] = Client(script, stored, tokens)
        return client

    def offer(self, client: Client, buffer: BufferKind = BufferKind.BATCH, batch_id: int = 1) -> None:
        if client.where == POOL and not client.cancelled:
            client.where = "here"
            self.loop.offer(buffer, batch_id, [client.stored])

    def cancel(self, client: Client) -> None:
        client.cancelled = True
        self.loop.cancel([client.script.key])

    def end_pull(self, index: int = 0, *, fails: bool = False) -> None:
        pull = self.pulls.pop(index)
        pull.completion.finish(TransferError("as it was told to") if fails else None)

    def end_move(self, index: int = 0, *, fails: bool = False) -> None:
        """Until here no other request has the blocks on either side."""
        copy = self.copies.pop(index)
        if fails:
            copy.completion.finish(TransferError("as it was told to"))
            return
        size = self.block_size
        kept = self.engine.read(copy.source_ids, len(copy.source_ids) * size)
        self.engine.write(copy.block_ids, 0, [token if token is not None else -1 for token in kept])
        self.moved += 1
        copy.completion.finish()

    def end_eviction(self, index: int = 0, *, fails: bool = False) -> None:
        """Copies read their source when they end: until then no other copy or iteration may write to it."""
        order = self.evictions.pop(index)
        if fails:
            self.loop.evicted(order, None)
            return
        client = self.clients[order.key]
        kept = self.engine.read(order.block_ids, order.stored.kv_tokens)
        assert kept == self._text(client, order.stored.kv_tokens)
        stored = copy.deepcopy(order.stored)
        stored.store_id = POOL if order.to_pool else BUFFER
        if order.to_pool:
            stored.pool_tokens = stored.kv_tokens
        self.loop.evicted(order, stored)

    def end_caching(self, index: int = 0) -> None:
        """An answer's blocks are copied to the prefix cache. Until then they must have its KV."""
        ending = self.endings.pop(index)
        client = self.clients[ending.key]
        first, end = ending.first_block * self.block_size, len(ending.tokens)
        assert end - first == len(ending.block_ids) * self.block_size > 0
        assert ending.tokens == self._text(client, end)
        assert self.engine.read(ending.block_ids, end - first) == ending.tokens[first:]
        self.cached_blocks += len(ending.block_ids)
        self.loop.cached(ending.key)

    def turn(self) -> bool:
        ran = self.loop.turn()
        self.check()
        return ran

    def settle(self) -> None:
        """Run to the end: copies end, and requests that returned to the pool are offered again."""
        for _ in range(500 + 40 * len(self.clients)):  # they may run one by one
            ran = self.turn()
            moved = bool(self.pulls or self.evictions or self.endings or self.copies)
            while self.copies:
                self.end_move()
            while self.endings:
                self.end_caching()
            while self.pulls:
                self.end_pull()
            while self.evictions:
                self.end_eviction()
            for client in self.clients.values():
                moved |= client.where == POOL and not client.cancelled and not self.drained
                if not self.drained:
                    self.offer(client)
            if not ran and not moved:
                return
        raise AssertionError(f"not at rest: {[(c.script.number, c.where) for c in self.clients.values()]}")

    def check(self) -> None:
        self.scheduler.check_integrity()

    def check_ended(self) -> None:
        """All requests have ended as scripted, and no block is held."""
        self.check()
        assert self.scheduler.holds_nothing()
        assert self.allocator.free_blocks == self.blocks
        assert all(step.taken for step in self.engine.steps)
        for client in self.clients.values():
            tokens, reason = client.script.answer()
            if client.cancelled or client.where == "lost" or client.reason == "error":
                assert client.tokens == tokens[: len(client.tokens)]
            else:
                assert (client.tokens, client.reason) == (tokens, reason)

    # called by the loop

    def _pull(
        self, stored: pb.StoredRequest, block_ids: Sequence[int], resident: int, *, settled: bool = False
    ) -> Completion:
        busy = not self.engine.busy_blocks().isdisjoint(block_ids[resident:])
        # The stages of a pipeline do not order copies behind their iterations, as a device does.
        assert not (busy and (settled or self.lanes > 1)), "a copy would write to what an iteration under way uses"
        self.settled_pulls += settled
        kept = stored.kv_tokens
        text = self._text(self.clients[key_from_proto(stored.spec.key)], kept)
        shared = resident * self.block_size
        self.shared_blocks += resident
        assert self.engine.read(block_ids, min(shared, kept)) == text[:shared]
        self.engine.write(block_ids, shared, text[shared:])
        self.pulls.append(Pull(stored, Completion("hand-over")))
        return self.pulls[-1].completion

    def _copy(self, source_ids: Sequence[int], block_ids: Sequence[int], label: str) -> Completion:
        assert self.engine.busy_blocks().isdisjoint([*source_ids, *block_ids])
        self.copies.append(RankCopy(source_ids, block_ids, Completion(label)))
        return self.copies[-1].completion

    def _chain_of(self, stored: pb.StoredRequest) -> BlockChain | None:
        if not self.caches:
            return None
        tokens = [*stored.spec.prompt_token_ids, *stored.spec.output_token_ids]
        return BlockChain.of(tokens[: stored.kv_tokens], stored.spec.cache_salt, self.block_size)

    def _text(self, client: Client, tokens: int) -> list[int]:
        return [*client.script.prompt, *client.tokens][:tokens]

    def _on_outcome(self, outcome: Outcome) -> None:
        assert outcome.fatal is None
        for held in outcome.inventory or ():
            client = self.clients[key_from_proto(held.key)]
            assert client.where == "here"
            assert held.prefix_tokens == len(client.script.prompt) + len(client.tokens)
        for address, event in outcome.events:
            assert address == "gateway"
            client = self.clients[key_from_proto(event.key)]
            assert client.where == "here"
            assert not client.reason, "an event behind the last"
            assert event.position == len(client.tokens)
            client.tokens += event.token_ids
            client.reason = event.finish_reason
        for order in outcome.evictions:
            self._check_stored(order.stored)
            self.evictions.append(order)
        for ending in outcome.endings:
            assert ending.key in outcome.finished
            self.endings.append(ending)
        for key in outcome.finished:
            client = self.clients[key]
            assert client.where == "here"
            assert client.cancelled or client.reason
            client.where = "ended"
        for key in (*outcome.lost, *outcome.unreadable):
            assert self.clients[key].where == "here"
            self.clients[key].where = "lost"
        for stored in (*outcome.give_back, *outcome.returned):
            self._check_stored(stored)
            client = self.clients[key_from_proto(stored.spec.key)]
            assert client.where == "here"
            client.where, client.stored = POOL, stored
            stored.store_id = POOL
        self.drained |= outcome.drained

    def _check_stored(self, stored: pb.StoredRequest) -> None:
        client = self.clients[key_from_proto(stored.spec.key)]
        assert list(stored.spec.output_token_ids) == client.tokens
        assert stored.kv_tokens == len(client.script.prompt) + len(client.tokens) - 1
