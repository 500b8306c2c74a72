"""A policy of one's own, in the cluster and in the simulator: --policy examples.shortest_first:ShortestFirst"""

from alignedserve.scheduler.policies.base import BatchPolicy, as_many_as_fit


class ShortestFirst(BatchPolicy):
    """The shortest prefixes first, as many as fit."""

    def __init__(self, config):
        self.waiting = {}  # sorted anew for each batch: for many waiting requests, keep an order instead

    def insert(self, entry):
        self.waiting[entry.key] = entry

    def remove(self, key):
        del self.waiting[key]

    def totals(self):
        return len(self.waiting), sum(entry.blocks for entry in self.waiting.values())

    def form(self, limits, seed, now_s):
        order = sorted(self.waiting.values(), key=lambda entry: (entry.key != seed, entry.tokens, entry.since_s))
        return as_many_as_fit(order, limits) or order[:1]  # larger than the limit: a batch alone

    def matches(self, tokens, shortest_tokens, longest_tokens):
        return tokens <= longest_tokens

    def matching(self, shortest_tokens, longest_tokens, limits):
        return as_many_as_fit(sorted(self.waiting.values(), key=lambda entry: entry.tokens), limits)

    def check_integrity(self):
        assert all(entry.key == key for key, entry in self.waiting.items())
