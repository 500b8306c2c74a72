"""A policy of one's own, in the cluster and in the simulator: --policy examples.shortest_first:ShortestFirst"""

from bisect import insort

from alignedserve.scheduler.policies.base import BatchPolicy


class ShortestFirst(BatchPolicy):
    """The shortest prefixes first, as many as fit."""

    def __init__(self, config):
        self.waiting, self.order = {}, []

    def insert(self, entry):
        self.waiting[entry.key] = entry
        insort(self.order, (entry.tokens, entry.since_s, entry.key))

    def remove(self, key):
        entry = self.waiting.pop(key)
        self.order.remove((entry.tokens, entry.since_s, key))

    def totals(self):
        return len(self.waiting), sum(entry.blocks for entry in self.waiting.values())

    def form(self, limits, seed, now_s):
        """`seed` is overdue and goes first; a request larger than the limit is a batch alone."""
        first = seed or (self.order[0][2] if self.order else None)
        return [] if first is None else self.take(limits, [first]) or [self.waiting[first]]

    def matches(self, tokens, shortest_tokens, longest_tokens):
        return tokens <= longest_tokens

    def matching(self, shortest_tokens, longest_tokens, limits):
        return self.take(limits, [])

    def take(self, limits, first):
        batch, blocks = [], 0
        for key in dict.fromkeys(first + [key for _, _, key in self.order]):
            blocks += self.waiting[key].blocks
            if len(batch) == limits.max_requests or blocks > limits.max_blocks:
                break
            batch.append(self.waiting[key])
        return batch

    def check_integrity(self):
        assert len(self.order) == len(self.waiting)
