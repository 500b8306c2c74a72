"""A custom policy, for the cluster and the simulator: --policy examples.shortest_first:ShortestFirst"""

from itertools import takewhile

from alignedserve.scheduler.policies.base import as_many_as_fit
from alignedserve.scheduler.policies.queue import QueuePolicy


class ShortestFirst(QueuePolicy):
    """Forms batches from the shortest prefixes, as many as fit."""

    BY_LENGTH = True  # decode instances specialise by length; False: each request goes to the least loaded one

    def rank(self, entry):
        """Sort key of a waiting request: prefix length, then age. A policy never knows the length of the answer."""
        return entry.tokens, entry.since_s

    def matches(self, tokens, shortest_tokens, longest_tokens):
        """Whether a request may join a running batch late: it must not be longer than the longest there."""
        return tokens <= longest_tokens

    def matching(self, shortest_tokens, longest_tokens, limits):
        """The waiting requests that may join. They are at the front of the queue."""
        short_enough = takewhile(lambda entry: entry.tokens <= longest_tokens, self)
        return as_many_as_fit(short_enough, limits)
