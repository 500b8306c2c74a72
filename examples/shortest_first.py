"""A policy of one's own, in the cluster and in the simulator: --policy examples.shortest_first:ShortestFirst"""

from bisect import bisect_left, insort
from itertools import chain, takewhile

from alignedserve.errors import AccountingError
from alignedserve.scheduler.policies.base import BatchPolicy, as_many_as_fit


class ShortestFirst(BatchPolicy):
    """The shortest prefixes first, as many as fit."""

    def __init__(self, config):
        self.waiting, self.blocks, self.order = {}, 0, []  # `order`: sorted, so that a batch is read off its front

    def insert(self, entry):
        if entry.key in self.waiting:
            raise AccountingError(f"{entry.key} waits already")
        self.waiting[entry.key] = entry
        self.blocks += entry.blocks
        insort(self.order, (entry.tokens, entry.since_s, entry.key))  # found in O(log n); the list moves up behind it

    def remove(self, key):
        if key not in self.waiting:
            raise AccountingError(f"{key} does not wait")
        entry = self.waiting.pop(key)
        self.blocks -= entry.blocks
        del self.order[bisect_left(self.order, (entry.tokens, entry.since_s, key))]

    def totals(self):
        return len(self.waiting), self.blocks

    def form(self, limits, seed, now_s):
        order = chain((seed,) if seed else (), (key for _, _, key in self.order if key != seed))
        batch = as_many_as_fit((self.waiting[key] for key in order), limits)
        return batch or [self.waiting[seed or key] for _, _, key in self.order[:1]]  # too large: a batch alone

    def matches(self, tokens, shortest_tokens, longest_tokens):
        return tokens <= longest_tokens

    def matching(self, shortest_tokens, longest_tokens, limits):
        short_enough = takewhile(lambda place: place[0] <= longest_tokens, self.order)
        return as_many_as_fit((self.waiting[key] for _, _, key in short_enough), limits)

    def check_integrity(self):
        order = sorted((entry.tokens, entry.since_s, key) for key, entry in self.waiting.items())
        if self.order != order or self.blocks != sum(entry.blocks for entry in self.waiting.values()):
            raise AccountingError("the order or the blocks do not match the requests that wait")
