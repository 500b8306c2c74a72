"""Observers of a small cell's policies: what the waiting rules `rounds` and `paper` promise, counted beside them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from alignedserve.request import RequestKey
from alignedserve.scheduler.batch_generator import BatchLimits
from alignedserve.scheduler.policies.base import BatchPolicy, Entry
from alignedserve.scheduler.policies.paper_rule import PaperRulePolicy
from alignedserve.scheduler.policies.rounds import RoundsPolicy
from alignedserve.scheduler.quad_tree import Node
from support.small_cell.cell import SmallCell


class Observer:
    """Is told what enters and leaves each policy of the cell, and of each batch without a seed."""

    def __init__(self, cell: SmallCell) -> None:
        self.counts: Counter[str] = Counter()
        cell.core.prepare_policies(self._watch)

    def _watch(self, policy: BatchPolicy) -> None:
        insert, remove, form = policy.insert, policy.remove, policy.form
        self.begin(policy)

        def inserting(entry: Entry) -> None:
            insert(entry)
            self.entered(policy, entry)

        def removing(key: RequestKey) -> None:
            remove(key)
            self.left(policy, key)

        def forming(limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
            due = self.expect(policy, now_s)
            found = form(limits, seed, now_s)
            self.counts["batches" if seed is None else "batches with a seed"] += 1
            self.formed(policy, found, now_s, due if seed is None else None)
            return found

        watched: Any = policy
        watched.insert, watched.remove, watched.form = inserting, removing, forming

    def begin(self, policy: Any) -> None:
        """The policy is empty."""

    def entered(self, policy: Any, entry: Entry) -> None: ...

    def left(self, policy: Any, key: RequestKey) -> None: ...

    def expect(self, policy: Any, now_s: float) -> Any:
        """What must hold for a batch without a seed that is formed now; None: nothing."""
        return True

    def formed(self, policy: Any, batch: list[Entry], now_s: float, due: Any) -> None: ...


@dataclass(slots=True)
class Stay:
    """The time in which a request waits in one policy. `turns`: that it has seen. `before`: in earlier policies."""

    entry: Entry
    turns: int = 0
    before: int = 0
    moves: int = 0


class Turns(Observer):
    """Rounds: a request sees at most one turn in each range that it waits in.

    Batches hold no newcomers: what entered after the turn, except what has waited since before it or was evicted.
    `in_order_of_age`: whether the rounds go in order of arrival, by their number; the policies' own judgement is not
    asked.
    """

    def __init__(self, cell: SmallCell, in_order_of_age: tuple[bool, ...] = (False,)) -> None:
        self.broken: list[str] = []
        self._stays: dict[int, dict[RequestKey, Stay]] = {}  # by policy
        self._last: dict[RequestKey, Stay] = {}
        self._in_order_of_age = in_order_of_age
        super().__init__(cell)

    def begin(self, policy: RoundsPolicy) -> None:
        self._stays[id(policy)] = {}

        def turn(limits: BatchLimits) -> float:
            for stay in self._stays[id(policy)].values():
                stay.turns += 1
            self.counts["turns"] += 1
            return 1.0 - self._in_order_of_age[self.counts["turns"] % len(self._in_order_of_age)]

        watched: Any = policy
        watched._loss = turn  # asked once in each turn

    def entered(self, policy: RoundsPolicy, entry: Entry) -> None:
        stay, last = Stay(entry), self._last.pop(entry.key, None)
        if last is not None and last.entry is entry:  # it has not left the pool
            stay.before, stay.moves = last.before + last.turns, last.moves + 1
            self.counts["moves"] += 1
        self.counts["evicted"] += entry.evicted
        self._stays[id(policy)][entry.key] = stay

    def left(self, policy: RoundsPolicy, key: RequestKey) -> None:
        stay = self._last[key] = self._stays[id(policy)].pop(key)
        self.counts[f"waits for {stay.before + stay.turns} turns"] += 1
        if stay.turns > 1 or stay.before + stay.turns > 1 + stay.moves:
            self.broken.append(f"{key} saw {stay.turns} turns, {stay.before} before {stay.moves} moves")

    def formed(self, policy: RoundsPolicy, batch: list[Entry], now_s: float, due: Any) -> None:
        for stay in map(self._stays[id(policy)].__getitem__, (entry.key for entry in batch)):
            late = not stay.turns and not stay.entry.evicted and stay.entry.since_s > policy._begun_s
            if due and late:
                self.broken.append(f"{stay.entry.key} is a newcomer in a batch of the round")


class Stamps(Observer):
    """The paper's rule: the batch after a node is due contains requests of the node that has been due for longest."""

    def __init__(self, cell: SmallCell) -> None:
        self.broken: list[str] = []
        self._after_s = cell.config.scheduler.starvation_after_s
        self._stamps: dict[int, dict[Node, float]] = {}  # by policy
        self._waiting: dict[int, dict[RequestKey, int]] = {}  # the leaf of each request
        super().__init__(cell)

    def begin(self, policy: PaperRulePolicy) -> None:
        self._stamps[id(policy)], self._waiting[id(policy)] = {}, {}

    def entered(self, policy: PaperRulePolicy, entry: Entry) -> None:
        leaf = policy.tree.leaf_of(entry.tokens)
        self._waiting[id(policy)][entry.key] = leaf
        for node in policy.tree.above([leaf]):
            self._stamps[id(policy)].setdefault(node, entry.since_s)

    def left(self, policy: PaperRulePolicy, key: RequestKey) -> None:
        leaf = self._waiting[id(policy)].pop(key)
        held = set(policy.tree.above(self._waiting[id(policy)].values()))
        for node in set(policy.tree.above([leaf])) - held:
            del self._stamps[id(policy)][node]

    def expect(self, policy: PaperRulePolicy, now_s: float) -> float | None:
        oldest_s = min(self._stamps[id(policy)].values(), default=now_s)
        return oldest_s if oldest_s + self._after_s <= now_s else None

    def formed(self, policy: PaperRulePolicy, batch: list[Entry], now_s: float, due: float | None) -> None:
        stamps, leaves = self._stamps[id(policy)], [policy.tree.leaf_of(entry.tokens) for entry in batch]
        nodes = set(policy.tree.above(leaves))
        if due is not None:
            self.counts["due"] += 1
            if due not in [stamps[node] for node in nodes]:
                self.broken.append(f"at {now_s} the batch has no request of what was due since {due}")
        stamps.update(dict.fromkeys(nodes, now_s))
