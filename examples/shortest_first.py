"""A policy of one's own, in the cluster and in the simulator: --policy examples.shortest_first:ShortestFirst"""

from itertools import takewhile

from alignedserve.scheduler.policies.base import as_many_as_fit
from alignedserve.scheduler.policies.queue import QueuePolicy


class ShortestFirst(QueuePolicy):
    """The shortest prefixes first, as many as fit."""

    BY_LENGTH = True  # several decode instances share the lengths out; else each request goes where least is to do

    def rank(self, entry):
        """What those that wait are sorted by: length, then age. How long an answer will be, nobody is told."""
        return entry.tokens, entry.since_s

    def matches(self, tokens, shortest_tokens, longest_tokens):
        """Whether a request may join a running batch late: not one that would be its longest."""
        return tokens <= longest_tokens

    def matching(self, shortest_tokens, longest_tokens, limits):
        """Those that wait and may join: they are at the front."""
        short_enough = takewhile(lambda entry: entry.tokens <= longest_tokens, self)
        return as_many_as_fit(short_enough, limits)
