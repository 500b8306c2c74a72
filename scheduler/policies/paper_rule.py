"""The paper's rule against starvation (section 3.5): a subtree that has yielded no batch for too long goes first."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.batch_generator import Selection
from alignedserve.scheduler.deadlines import Deadlines
from alignedserve.scheduler.policies.aligned import AlignedPolicy
from alignedserve.scheduler.policies.base import BatchLimits, Entry
from alignedserve.scheduler.quad_tree import Node


class PaperRulePolicy(AlignedPolicy):
    """Each node has a time stamp: when it last yielded a batch, or has got its first request since it was empty.

    Once the stamp of a node is `scheduler.starvation_after_s` old, the search for the next batch begins at that node,
    the one with the oldest stamp first. This bounds the wait of subtrees, not of requests: one that its subtree's
    batches leave out can wait for ever.
    """

    OVERDUE = False

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._after_s = config.starvation_after_s
        self._due = Deadlines[Node]()

    def insert(self, entry: Entry) -> None:
        tree = self.tree
        nodes = list(tree.above([tree.leaf_of(entry.tokens)]))
        first = [(level, index) for level, index in nodes if not tree.requests[level][index]]
        super().insert(entry)
        self._stamp(first, entry.since_s)

    def remove(self, key: RequestKey) -> None:
        tree = self.tree
        entry = tree.remove(key)
        for level, index in tree.above([tree.leaf_of(entry.tokens)]):
            if not tree.requests[level][index]:
                self._due.discard((level, index))

    def _select(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> Selection:
        due = self._due.first()
        if seed is None and due is not None and due[0] <= now_s:
            return self._generator.select(limits, within=due[1])
        return super()._select(limits, seed, now_s)

    def _yielded(self, leaves: Iterable[int], now_s: float) -> None:
        self._stamp(self.tree.above(leaves), now_s)

    def _stamp(self, nodes: Iterable[Node], now_s: float) -> None:
        for level, index in nodes:
            self.tree.last_batch_s[level][index] = now_s
            self._due.set((level, index), now_s + self._after_s)

    def check_integrity(self) -> None:
        super().check_integrity()
        levels = enumerate(self.tree.requests)
        held = {(level, index) for level, counts in levels for index, count in enumerate(counts) if count}
        if set(self._due) != held:
            raise AccountingError("the time stamps do not match the nodes that hold requests")
