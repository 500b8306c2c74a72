"""The scheduler's core under any order of events, likely and absurd ones: `CoreModel` checks the invariants."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from alignedserve.config import ClusterConfig, Config, DecodeConfig, KvPoolConfig, PrefillConfig, SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.instance.plan import BufferKind
from support.core_cell import BLOCK
from support.core_model import CoreModel, Entry
from support.machines import machine_settings

NUMBERS = st.integers(0, 7)
MANY = st.lists(NUMBERS, min_size=1, max_size=3)
INDEX = st.integers(0, 20)
SHIFTS = st.sampled_from((0, 0, 0, -1, 1))
TOKENS = st.integers(1, 60)
INSTANCES = st.integers(0, 1)
POOLS = st.integers(0, 3)  # the last is gone
BLOCKS = st.sampled_from((0, 1, 5, 20, 40))
BATCH = BufferKind.BATCH
BATCH_BUFFER, REQUESTS_BUFFER, CACHE = 16, 10, 40


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


class CoreMachine(RuleBasedStateMachine):
    """Up to two instances of each role, and eight requests in any number of epochs."""

    @initialize(
        prefetch=st.booleans(),
        policy=st.sampled_from(("aligned", "fcfs")),
        sharing=st.sampled_from(("auto", "quantiles", "quantiles", "nearest")),
        pool=st.sampled_from((20, 30, 60, 400)),
        max_running=st.sampled_from((1, 2, 16)),
        min_batch=st.sampled_from((1, 3)),
        max_queue=st.sampled_from((3, 100)),
        queue_tokens=st.sampled_from((1, 100)),
        reserve=st.sampled_from((0.0, 0.1, 0.3)),
        flush_after_s=st.sampled_from((0.0, 0.3)),
        starvation_after_s=st.sampled_from((0.5, 5.0)),
        drain=st.booleans(),
        shards=st.sampled_from((0, 0, 1, 2, 3)),
        reported=st.sampled_from((0, 0, 1, 2)),
    )
    def start(
        self,
        prefetch: bool,
        policy: str,
        sharing: str,
        pool: int,
        max_running: int,
        min_batch: int,
        max_queue: int,
        queue_tokens: int,
        reserve: float,
        flush_after_s: float,
        starvation_after_s: float,
        drain: bool,
        shards: int,
        reported: int,
    ) -> None:
        config = Config(
            cluster=ClusterConfig(prefetch=prefetch),
            kv_pool=KvPoolConfig(block_size=BLOCK, growth_reserve=reserve),
            prefill=PrefillConfig(queue_tokens=queue_tokens),
            decode=DecodeConfig(max_running=max_running),
            scheduler=SchedulerConfig(
                leaf_tokens=4,
                max_prefix_tokens=128,
                policy=policy,
                sharing=sharing,
                min_batch_requests=min_batch,
                max_queue=max_queue,
                flush_after_s=flush_after_s,
                starvation_after_s=starvation_after_s,
            ),
        )
        self.model = CoreModel(SchedulerCore(config, BLOCK))
        self.prefetch, self.pool_blocks, self.max_running, self.drain = prefetch, pool, max_running, drain
        self.reported = reported  # `max_running` of healthy instances; 0: as configured
        self.named = shards  # number of named shards; 0: one unnamed shard
        self.pools = [f"pool-{number}" for number in range(shards)] or ["pool"]
        self.pools_ever = len(self.pools)
        self.now_s = 0.0
        self.name_shards()
        self.epochs = [0] * 8
        self.heal()

    def name_shards(self) -> None:
        """With three shards, one is on a node with decode instances only."""
        homes = {"p0": 0, "p1": 1, "d0": 0, "d1": -1}
        if self.named:
            named = [(name, self.pools[number % self.named]) for name, number in homes.items()]
            self.homes = dict(named)
            self.do(ev.ShardsChanged(tuple(self.pools), tuple(named)))
        else:
            self.homes = dict.fromkeys(homes, "")

    def pool(self, number: int) -> str:
        """Mostly an existing shard."""
        return self.pools[number] if number < len(self.pools) else "pool-gone"

    def do(self, event: ev.Event) -> None:
        self.went_wrong = True
        self.model.do(event, self.now_s)
        self.went_wrong = False

    def key(self, number: int, shift: int = 0) -> RequestKey:
        return RequestKey(f"r{number}", max(0, self.epochs[number] + shift))

    def picked(self, index: int, *states: str) -> Entry | None:
        found = [entry for entry in self.model.open.values() if entry.state in states]
        return found[index % len(found)] if found else None

    # gateways

    @rule(numbers=MANY, shift=SHIFTS, tokens=TOKENS, more=st.integers(1, 30), gateway=st.sampled_from("gh"))
    def submit(self, numbers: list[int], shift: int, tokens: int, more: int, gateway: str) -> None:
        keys = [self.key(number, shift) for number in numbers]
        for number, key in zip(numbers, keys, strict=True):
            self.epochs[number] = max(self.epochs[number], key.epoch)
        metas = [ev.RequestMeta(key, tokens, tokens + more, f"group-{numbers[0]}", gateway) for key in keys]
        self.do(ev.Submitted(tuple(metas)))

    @rule(number=NUMBERS, tokens=TOKENS, more=st.integers(1, 30), missing=st.integers(1, 20), pool=POOLS)
    def submit_again(self, number: int, tokens: int, more: int, missing: int, pool: int) -> None:
        """Submit a new epoch, which adopts the pool's KV of an older epoch."""
        self.epochs[number] += 1
        base = max(0, tokens - missing)
        whole = base > 0 and missing == 1
        key, blocks = self.key(number), blocks_of(base)
        meta = ev.RequestMeta(key, tokens, tokens + more, "", "g", base, blocks, blocks, whole, self.pool(pool))
        self.do(ev.Submitted((meta,)))

    @rule(numbers=MANY, shift=SHIFTS)
    def cancel(self, numbers: list[int], shift: int) -> None:
        self.do(ev.CancelRequested(tuple(self.key(number, shift) for number in numbers)))

    @rule(gateway=st.sampled_from("gh"))
    def lose_gateway(self, gateway: str) -> None:
        self.do(ev.GatewayLost(gateway))

    # workers, as they should be

    @rule(index=INDEX, how=st.sampled_from(("goes on", "goes on", "goes on", "finishes", "is lost", "returns")))
    def work(self, index: int, how: str) -> None:
        """An instance continues with one of its requests."""
        entry = self.picked(index, "prefilling", "prefetched", "decoding")
        if entry is not None:
            self.go_on(entry, how)

    def go_on(self, entry: Entry, how: str) -> None:
        key, tokens = entry.meta.key, max(entry.kv_tokens, entry.meta.prefix_tokens)
        grown = min(tokens + 3, entry.meta.max_total_tokens) if entry.state == "decoding" else tokens
        if how == "finishes":
            self.do(ev.Finished((key,)))
        elif how == "is lost":
            self.do(ev.Lost((key,), "a test"))
        elif entry.state == "prefilling":
            home = self.homes[entry.prefill_id]
            self.do(ev.Prefilled(key, tokens, blocks_of(tokens), blocks_of(tokens), home))
        elif how == "returns":
            stays = entry.pool_id if entry.pool_id in self.pools else self.homes[entry.decode_id]
            home = self.homes[entry.decode_id] if entry.state == "decoding" else stays
            self.do(ev.Returned(key, grown, blocks_of(grown), pool_id=home))
        elif entry.state == "prefetched":
            self.do(ev.Joined(entry.decode_id, (key,)))
        else:
            self.do(ev.Finished((key,)))

    # workers that are late, confused or busy

    @rule(
        kind=st.sampled_from((ev.Prefilled, ev.Finished, ev.Lost, ev.Joined, ev.Returned)),
        numbers=MANY,
        shift=SHIFTS,
        tokens=TOKENS,
        new_blocks=st.integers(0, 15),
        instance=INSTANCES,
        pool=POOLS,
    )
    def stray(
        self, kind: type, numbers: list[int], shift: int, tokens: int, new_blocks: int, instance: int, pool: int
    ) -> None:
        keys = tuple(self.key(number, shift) for number in numbers)
        if kind is ev.Prefilled:
            new_blocks = min(new_blocks, blocks_of(tokens))
            self.do(ev.Prefilled(keys[0], tokens, blocks_of(tokens), new_blocks, self.pool(pool)))
        elif kind is ev.Returned:
            self.do(ev.Returned(keys[0], tokens, blocks_of(tokens), pool_id=self.pool(pool)))
        elif kind is ev.Joined:
            self.do(ev.Joined(f"d{instance}", keys))
        elif kind is ev.Finished:
            self.do(ev.Finished(keys))
        else:
            self.do(ev.Lost(keys, "a stray word"))

    @rule(instance=INSTANCES, free=st.tuples(BLOCKS, BLOCKS), waits=st.sampled_from((0, 0, 3)))
    def prefill_reports(self, instance: int, free: tuple[int, int], waits: int) -> None:
        batch, requests = min(free[0], BATCH_BUFFER), min(free[1], REQUESTS_BUFFER)
        self.do(ev.PrefillReported(f"p{instance}", 0, 100, BATCH_BUFFER, batch, REQUESTS_BUFFER, requests, waits))

    @rule(
        instance=INSTANCES,
        free=BLOCKS,
        running=st.integers(0, 4),
        lengths=st.tuples(TOKENS, TOKENS),
        batch_id=st.integers(0, 3),
        waits=st.sampled_from((0, 0, 3)),
        most=st.sampled_from((0, 1, 3)),
    )
    def decode_reports(
        self,
        instance: int,
        free: int,
        running: int,
        lengths: tuple[int, int],
        batch_id: int,
        waits: int,
        most: int,
    ) -> None:
        shortest, longest = sorted(lengths) if running else (0, 0)
        report = ev.DecodeReported(f"d{instance}", CACHE, free, running, shortest, longest, batch_id, 0, 0, waits)
        self.do(replace(report, max_running=most))

    @rule(free=BLOCKS, pool=POOLS)
    def pool_reports(self, free: int, pool: int) -> None:
        self.report_pool(self.pool(pool if self.named else 0), free)

    def report_pool(self, pool_id: str, free: int) -> None:
        self.do(ev.InstanceJoined("kv_pool", pool_id))
        self.do(ev.PoolReported(pool_id, self.pool_blocks, min(free, self.pool_blocks)))

    # inventories

    @rule(instance=INSTANCES, strangers=MANY, shift=SHIFTS, tokens=TOKENS, running=st.booleans(), restore=st.booleans())
    def decode_inventory(
        self, instance: int, strangers: list[int], shift: int, tokens: int, *, running: bool, restore: bool
    ) -> None:
        """Requests of the instance that the core knows, and some that it does not know."""
        name = f"d{instance}"
        mine = [e for e in self.model.open.values() if e.decode_id == name and e.state in ("prefetched", "decoding")]
        held = [
            ev.HeldRequest(e.meta, e.state == "decoding", e.kv_tokens, blocks_of(e.kv_tokens), e.prefill_id, BATCH)
            for e in mine
        ]
        for number in strangers:
            key = self.key(number, shift)
            self.epochs[number] = max(self.epochs[number], key.epoch)
            meta = ev.RequestMeta(key, tokens, tokens + 10, "", "g")
            prefill_id = "p0" if self.prefetch and tokens % 2 else ""
            held.append(ev.HeldRequest(meta, running, tokens, blocks_of(tokens), prefill_id, BATCH))
        self.do(ev.InventoryTaken(name, tuple(held), restore))

    @rule(missing=MANY, tokens=TOKENS, pool=POOLS, strays=st.booleans(), whole=st.booleans())
    def pool_inventory(self, missing: list[int], tokens: int, pool: int, *, strays: bool, whole: bool) -> None:
        """The pool's copies that the core knows, except some; other requests have a copy of an earlier length."""
        copies = {}
        pool_id = self.pool(pool if self.named else 0)
        for key, entry in self.model.open.items():
            if not strays and self.named and entry.pool_tokens and entry.pool_id != pool_id:
                continue
            if entry.state in ("waiting", "prefetched", "decoding") and int(key.request_id[1:]) not in missing:
                length = entry.pool_tokens or min(tokens, entry.kv_tokens)
                copies[key] = length, blocks_of(length)
        self.do(ev.PoolInventoryTaken(copies, pool_id) if whole else ev.CopiesFound(pool_id, copies))

    # instances come and go

    @rule(role=st.sampled_from(("prefill", "decode", "kv_pool")), instance=INSTANCES)
    def lose(self, role: str, instance: int) -> None:
        self.do(ev.InstanceLost(role, self.name(role, instance)))

    def name(self, role: str, instance: int) -> str:
        return self.pools[instance % len(self.pools)] if role == "kv_pool" else f"{role[0]}{instance}"

    @precondition(lambda self: self.named)
    @rule(pool=st.integers(0, 2), another=st.booleans())
    def lose_node(self, pool: int, *, another: bool) -> None:
        """A shard is lost for good. Another node replaces it, or only the others are left."""
        gone = self.pools.pop(pool % len(self.pools))
        if another or not self.pools:
            self.pools.append(f"pool-{self.pools_ever}")
            self.pools_ever += 1
        self.named = len(self.pools)
        self.model.instances["kv_pool"].discard(gone)
        self.name_shards()

    @rule(role=st.sampled_from(("prefill", "decode", "kv_pool")), instance=INSTANCES)
    def join(self, role: str, instance: int) -> None:
        self.do(ev.InstanceJoined(role, self.name(role, instance)))

    @precondition(lambda self: self.prefetch)
    @rule(pairs=st.lists(st.lists(INSTANCES, max_size=2, unique=True), max_size=2), far=INSTANCES)
    def change_pairs(self, pairs: list[list[int]], far: int) -> None:
        named = [(f"d{d}", tuple(f"p{p}" for p in prefills)) for d, prefills in enumerate(pairs)]
        ranks = [(f"d{d}", f"p{far}", 1) for d, prefills in enumerate(pairs) if far in prefills]
        self.do(ev.PairsChanged(tuple(named), tuple(ranks)))

    @rule(seconds=st.sampled_from((0.1, 0.6, 6.0)))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(ev.Tick())

    # the end

    @rule()
    def heal(self) -> None:
        """Every instance is up and reports the truth, as far as requests are known here."""
        for role, name in (
            ("prefill", "p0"),
            ("prefill", "p1"),
            ("decode", "d0"),
            ("decode", "d1"),
        ):
            self.do(ev.InstanceJoined(role, name))
        entries = list(self.model.open.values())
        for name in "p0", "p1":
            taken = sum(blocks_of(e.kv_tokens) for e in entries if e.state == "prefetched" and e.prefill_id == name)
            free = max(0, BATCH_BUFFER - taken), max(0, REQUESTS_BUFFER - taken)
            self.do(ev.PrefillReported(name, 0, 100, BATCH_BUFFER, free[0], REQUESTS_BUFFER, free[1]))
        pairs = (("d0", ("p0",)), ("d1", ("p1",))) if self.prefetch else (("d0", ()), ("d1", ()))
        self.do(ev.PairsChanged(pairs))
        for name in "d0", "d1":
            running = [e.kv_tokens for e in entries if e.state == "decoding" and e.decode_id == name]
            free_blocks = max(0, CACHE - sum(map(blocks_of, running)))
            lengths = min(running, default=0), max(running, default=0)
            report = ev.DecodeReported(name, CACHE, free_blocks, len(running), *lengths, 1, 0, 0)
            self.do(replace(report, max_running=self.reported))
        for pool_id in self.pools:
            mine = [e for e in self.model.open.values() if e.pool_id == pool_id or not self.named]
            held = sum(blocks_of(e.kv_tokens) for e in mine if e.state in ("waiting", "prefetched", "decoding"))
            self.report_pool(pool_id, max(0, self.pool_blocks - held))

    def teardown(self) -> None:
        if not hasattr(self, "model") or self.went_wrong:
            return
        if self.drain:
            self.serve_all()
        else:
            self.cancel_all()
        self.model.check_empty()
        self.heal()
        assert self.model.core._state.ledger.free == self.pool_blocks * len(self.pools)

    def cancel_all(self) -> None:
        self.do(ev.CancelRequested(tuple(self.model.open)))
        for key in list(self.model.open):
            self.do(ev.Finished((key,)))

    def serve_all(self) -> None:
        """A healthy cluster serves all open requests: nothing is stuck."""
        for _ in range(60):
            if not self.model.open:
                return
            self.heal()
            for entry in list(self.model.open.values()):
                if entry.state in ("prefilling", "prefetched", "decoding"):
                    self.go_on(entry, "goes on")
            self.now_s += 0.2
            self.do(ev.Tick())
        states = {key.request_id: entry.state for key, entry in self.model.open.items()}
        error = AssertionError(f"still open, with nothing in the way: {states}")
        error.add_note("\n".join(self.model.history))
        raise error


TestCore = CoreMachine.TestCase
TestCore.settings = machine_settings(150, 50)
