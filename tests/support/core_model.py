"""Checks every action of a scheduler core against a model, for events in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import actions as act
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.scheduler_core import SchedulerCore

FULL = "the KV pool is full"


@dataclass
class Entry:
    """An open request. `state` has the names of `SchedulerCore.describe`, except that WAITING is "waiting"."""

    meta: ev.RequestMeta
    state: str = "queued"
    prefill_id: str = ""
    decode_id: str = ""
    kv_tokens: int = 0
    pool_tokens: int = 0  # tokens of the copy in the pool
    pool_id: str = ""  # the current or last shard of the copy
    cancelled: bool = False


@dataclass
class _Turn:
    """The allowed results of one event."""

    must_end: set[RequestKey] = field(default_factory=set)
    silent: set[RequestKey] = field(default_factory=set)  # may end without a message to the gateway
    strangers: set[RequestKey] = field(default_factory=set)  # not open: cancelled where they are reported
    asked_to_end: set[RequestKey] = field(default_factory=set)
    rejected: list[RequestKey] = field(default_factory=list)
    lost: list[RequestKey] = field(default_factory=list)
    released: list[RequestKey] = field(default_factory=list)
    forgotten: list[RequestKey] = field(default_factory=list)
    cancelled_at: set[RequestKey] = field(default_factory=set)
    kept: set[RequestKey] = field(default_factory=set)  # the pool keeps their KV for their next epoch
    moved: dict[tuple[RequestKey, str], int] = field(default_factory=dict)  # older copies, by shard
    found: dict[RequestKey, tuple[int, int]] = field(default_factory=dict)  # copies in the shard of the event


class CoreModel:
    """Feed the core through `do`. Raises AssertionError, with all events as notes, if an action is wrong."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core
        self.open: dict[RequestKey, Entry] = {}
        self.instances: dict[str, set[str]] = {"prefill": set(), "decode": set(), "kv_pool": set()}
        self.pools: tuple[str, ...] = ()  # named shards; empty: there is one shard
        self.homes: dict[str, str] = {}
        self.max_running: dict[str, int] = {}  # as decode instances reported it
        self.history: list[str] = []
        self.ended: Counter[str] = Counter()

    def do(self, event: ev.Event, now_s: float) -> list[act.Action]:
        self.history.append(f"({now_s:g}, {event!r}),")
        try:
            actions = self.core.handle(event, now_s)
            turn = _Turn()
            self._expect(event, turn)
            for action in actions:
                self._check(action, turn)
            self._settle(turn)
            self.core.check_integrity()
        except Exception as error:
            error.add_note("\n".join(self.history))
            raise
        return actions

    def latest(self, request_id: str) -> RequestKey | None:
        return next((key for key in self.open if key.request_id == request_id), None)

    # effects of the event

    def _expect(self, event: ev.Event, turn: _Turn) -> None:
        match event:
            case ev.Submitted(requests):
                self._submitted(requests, turn)
            case ev.CancelRequested(keys):
                self._cancelled(keys, turn)
            case ev.GatewayLost(gateway_id):
                self._cancelled([key for key, e in self.open.items() if e.meta.gateway_id == gateway_id], turn)
            case ev.Prefilled(key, kv_tokens, pool_id=pool_id):
                self._placed(key, ("prefilling",), kv_tokens, pool_id, turn)
            case ev.Returned(key, kv_tokens, pool_id=pool_id):
                self._placed(key, ("prefetched", "decoding"), kv_tokens, pool_id, turn)
            case ev.Joined(decode_id, keys):
                turn.strangers = set(keys) - self.open.keys()
                for entry in self._entries(keys):
                    if entry.state == "prefetched" and entry.decode_id == decode_id:
                        entry.state, entry.prefill_id = "decoding", ""
            case ev.Finished(keys) | ev.Lost(keys):
                turn.must_end |= self.open.keys() & set(keys)
                turn.silent |= turn.must_end if isinstance(event, ev.Finished) else set()
            case _:
                self._expect_of_instance(event, turn)

    def _expect_of_instance(self, event: ev.Event, turn: _Turn) -> None:
        match event:
            case ev.InventoryTaken(decode_id, requests, restore):
                self._restored(decode_id, requests, restore, turn)
            case ev.PoolInventoryTaken(copies, pool_id) if self._is_named(pool_id):
                self._inventory(copies, pool_id, turn)
            case ev.CopiesFound(_, copies):
                turn.found = dict(copies)
            case ev.ShardsChanged(pool_ids, homes):
                self._shards_changed(pool_ids, dict(homes), turn)
            case ev.InstanceJoined(role, instance_id):
                self.instances[role].add(instance_id)
            case ev.DecodeReported(decode_id) if decode_id in self.instances["decode"]:
                self.max_running[decode_id] = event.max_running or self.core._state.config.decode.max_running
            case ev.InstanceLost(role, instance_id):
                self.instances[role].discard(instance_id)
                self.max_running.pop(instance_id, None)
                turn.must_end |= {key for key, e in self.open.items() if self._was_behind(e, role, instance_id)}

    def _is_named(self, pool_id: str) -> bool:
        return not self.pools or pool_id in self.pools

    def _inventory(self, copies: Mapping[RequestKey, tuple[int, int]], pool_id: str, turn: _Turn) -> None:
        here = [e for e in self.open.values() if e.pool_id == pool_id or not self.pools]
        gone = [e for e in here if e.meta.key not in copies]
        turn.must_end |= {e.meta.key for e in gone if e.state == "waiting"}
        turn.found = dict(copies)
        for entry in (e for e in gone if e.state == "queued"):
            entry.kv_tokens = entry.pool_tokens = 0
        for key in self.open.keys() & copies.keys():
            entry = self.open[key]
            if not entry.pool_tokens and entry.state in ("prefetched", "decoding"):
                entry.pool_tokens, entry.pool_id = copies[key][0], pool_id

    def _shards_changed(self, pool_ids: tuple[str, ...], homes: dict[str, str], turn: _Turn) -> None:
        self.pools, self.homes = pool_ids, homes
        for key, entry in self.open.items():
            if not entry.pool_tokens or entry.pool_id in pool_ids:
                continue
            if entry.state == "waiting" or (entry.state == "prefetched" and not entry.prefill_id):
                turn.must_end.add(key)
            else:
                entry.pool_tokens = 0
                entry.kv_tokens = 0 if entry.state == "queued" else entry.kv_tokens

    def _entries(self, keys: tuple[RequestKey, ...]) -> list[Entry]:
        return [self.open[key] for key in keys if key in self.open]

    def _was_behind(self, entry: Entry, role: str, instance_id: str) -> bool:
        if role == "kv_pool":  # the shard's memory stays
            return False
        return instance_id == (entry.prefill_id if role == "prefill" else entry.decode_id)

    def _submitted(self, requests: tuple[ev.RequestMeta, ...], turn: _Turn) -> None:
        for meta in requests:
            known = self.latest(meta.key.request_id)
            if known is not None and known.epoch >= meta.key.epoch:
                continue
            if known is not None:
                turn.must_end.add(known)
                turn.silent.add(known)
            base_tokens = meta.base_tokens if self._is_named(meta.base_pool_id) else 0
            state = "waiting" if meta.whole and base_tokens else "queued"
            self.open[meta.key] = Entry(meta, state, kv_tokens=base_tokens, pool_id=meta.base_pool_id)
            self.open[meta.key].pool_tokens = base_tokens

    def _cancelled(self, keys: tuple[RequestKey, ...] | list[RequestKey], turn: _Turn) -> None:
        for key in self.open.keys() & set(keys):
            entry = self.open[key]
            if entry.state in ("queued", "waiting"):
                turn.must_end.add(key)
            else:
                entry.cancelled = True
                turn.asked_to_end.add(key)

    def _placed(self, key: RequestKey, states: tuple[str, ...], kv_tokens: int, pool_id: str, turn: _Turn) -> None:
        entry = self.open.get(key)
        if entry is None or entry.state not in states:
            return
        if not self._is_named(pool_id):
            turn.must_end.add(key)
            return
        if self.pools and entry.pool_tokens and entry.pool_id != pool_id:
            turn.moved[key, entry.pool_id] = entry.pool_tokens
        entry.state, entry.kv_tokens, entry.pool_tokens, entry.pool_id = "waiting", kv_tokens, kv_tokens, pool_id
        entry.prefill_id = entry.decode_id = ""
        if entry.cancelled:
            turn.must_end.add(key)

    def _restored(self, decode_id: str, requests: tuple[ev.HeldRequest, ...], restore: bool, turn: _Turn) -> None:
        if decode_id not in self.instances["decode"]:
            return
        for held in requests:
            key = held.meta.key
            known = self.latest(key.request_id)
            if known is None and restore:
                prefill_id = held.prefill_id if held.prefill_id in self.instances["prefill"] else ""
                state = "decoding" if held.running else "prefetched"
                entry = Entry(held.meta, state, "" if held.running else prefill_id, decode_id, held.kv_tokens)
                self.open[key] = entry
            elif known != key:
                turn.strangers.add(key)

    # allowed actions of the core

    def _check(self, action: act.Action, turn: _Turn) -> None:
        match action:
            case act.StartPrefill(prefill_id, keys, base_tokens):
                assert prefill_id in self.instances["prefill"]
                if len(self.pools) > 1:
                    assert self.homes[prefill_id] in self.instances["kv_pool"]
                assert base_tokens == self.open[keys[0]].kv_tokens
                self._move(keys, ("queued",), "prefilling", prefill_id, "")
            case act.Prefetch(decode_id, prefill_id, _, _, keys):
                assert decode_id in self.instances["decode"]
                assert len(keys) <= self.max_running.get(decode_id, len(keys))
                assert prefill_id is None or prefill_id in self.instances["prefill"]
                self._move(keys, ("waiting",), "prefetched", prefill_id or "", decode_id)
            case act.Recall(decode_id, keys) | act.MarkUrgent(decode_id, keys):
                assert decode_id in self.instances["decode"]
                for key in keys:
                    assert (self.open[key].state, self.open[key].decode_id) == ("prefetched", decode_id), key
            case act.CancelAt(role, instance_id, keys):
                assert instance_id in self.instances[role]
                for key in set(keys) - turn.strangers:
                    entry = self.open[key]
                    assert instance_id == (entry.prefill_id if role == "prefill" else entry.decode_id), key
                turn.cancelled_at.update(keys)
            case _:
                self._check_word(action, turn)

    def _check_word(self, action: act.Action, turn: _Turn) -> None:
        """Check actions for requests that end, or for their copies."""
        match action:
            case act.ReleasePool(keys, True, kv_tokens, pool_id):
                for key, tokens in zip(keys, kv_tokens, strict=True):
                    entry = self.open[key]
                    if turn.moved.get((key, pool_id)) == tokens:
                        del turn.moved[key, pool_id]
                        continue
                    if self.pools and (entry.pool_id != pool_id or not entry.pool_tokens):  # a stray
                        assert turn.found[key][0] == tokens, key
                        assert entry.state in ("waiting", "queued"), key
                        continue
                    assert entry.pool_tokens == tokens > 0, key
                    entry.pool_tokens = 0
                    assert entry.state in ("decoding", "queued"), key
                    if entry.state == "queued":  # it is prefilled from its first token
                        entry.kv_tokens = 0
            case act.ReleasePool(keys, pool_id=""):  # all shards
                turn.released += keys
            case act.Reject(keys):
                turn.rejected += keys
            case act.ReportLost(keys, reason):
                if reason != FULL:
                    turn.kept.update(keys)
                assert not any(self.open[key].cancelled for key in keys)
                turn.lost += keys
            case act.Forget(keys):
                turn.forgotten += keys

    def _move(
        self, keys: tuple[RequestKey, ...], states: tuple[str, ...], state: str, prefill_id: str, decode_id: str
    ) -> None:
        assert len(set(keys)) == len(keys) > 0
        for key in keys:
            entry = self.open[key]
            assert entry.state in states, f"{key} is {entry.state}"
            assert not entry.cancelled
            entry.state, entry.prefill_id, entry.decode_id = state, prefill_id, decode_id

    def _settle(self, turn: _Turn) -> None:
        """A request ends once, with at most one message to the gateway, and its copy in the pool is released."""
        gone = set(turn.forgotten)
        told = [*turn.rejected, *turn.lost]
        assert len(gone) == len(turn.forgotten), "forgotten twice"
        assert len(set(told)) == len(told), "told twice"
        assert len(set(turn.released)) == len(turn.released), "released twice"
        assert not turn.moved, "an older copy stays in another shard"
        assert gone == turn.must_end | set(told), f"{gone ^ (turn.must_end | set(told))}"
        assert gone <= self.open.keys()
        assert gone - turn.silent <= set(told), "ended without a message to the gateway"
        assert not turn.silent & set(told)
        assert turn.asked_to_end <= turn.cancelled_at
        in_pool = {key for key in gone if self.open[key].state != "queued" or self.open[key].kv_tokens}
        assert set(turn.released) == in_pool - turn.kept
        for key in gone:
            del self.open[key]
        self.ended.update(rejected=len(turn.rejected), lost=len(turn.lost), all=len(gone))
        counts = Counter(entry.state for entry in self.open.values())
        described = self.core.describe()
        described["waiting"] = described.pop("waiting_in_pool")
        assert {state: count for state, count in described.items() if count} == counts

    def check_empty(self) -> None:
        """Check that no request is open in the core's state either. Raises AssertionError."""
        assert not self.open
        assert not any(self.core.describe().values())
        books = self.core._state
        ledger = books.ledger
        left = {
            "committed": ledger.committed,
            "reserved": ledger.reserved,
            "clock": len(books.clock),
            "policy": books.sharing.totals()[1],
            "queue": books.queue.tokens,
            "pending": sum(view.load.pending_tokens for view in books.instances.prefill.values()),
            "buffers": sum(b.committed for view in books.instances.prefill.values() for b in view.buffers.values()),
            "candidates": sum(sum(view.candidate_blocks.values()) for view in books.instances.decode.values()),
            "overdue": sum(len(view.overdue) for view in books.instances.decode.values()),
        }
        if any(left.values()):
            error = AccountingError(f"no request is open, but the state holds {left}")
            error.add_note("\n".join(self.history))
            raise error
