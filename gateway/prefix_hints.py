"""Asks the shards of the pool what their prefix caches have of a prompt, before it is submitted.

With the answers, and marks of the prompt's beginnings, the scheduler computes it where least of it is missing, and
predicts only what must be computed.
They are hints: what is reused is decided where the prompt is computed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from alignedserve.control.prefixes import cached_prefix
from alignedserve.control.rpc import TokenChannel, one_answer, open_channel
from alignedserve.errors import UnavailableError
from alignedserve.gateway.body.planning import CallPlan, PromptPlan
from alignedserve.gateway.ledger.calls import caller
from alignedserve.prefix_marks import LEAST_TOKENS, prefix_marks
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

ANSWER_WITHIN_S = 0.05
LEAST_OF_SEVERAL = 128  # tokens of a prompt that several shards are asked about: where it is computed depends on it


class PrefixHints:
    """For one event loop. Of a shard that does not answer within ANSWER_WITHIN_S nothing is known."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._shards: dict[str, tuple[str, TokenChannel]] = {}  # by shard: its address, and a channel to it

    async def follow(self, view: sv.ClusterView) -> None:
        """Opens channels to the view's shards, and closes those to shards that have moved or ended."""
        addresses = {
            peer.process.id: peer.address for peer in view.peers if peer.process.role == "kv_pool" and peer.address
        }
        for pool_id in [name for name, (address, _) in self._shards.items() if addresses.get(name) != address]:
            await self._shards.pop(pool_id)[1].close()
        for pool_id in sorted(addresses.keys() - self._shards.keys()):
            self._shards[pool_id] = addresses[pool_id], open_channel(addresses[pool_id], self._token)

    @property
    def channels(self) -> dict[str, TokenChannel]:
        """A channel to each shard of the last view, by its id."""
        return {pool_id: channel for pool_id, (_, channel) in self._shards.items()}

    async def add(self, plan: CallPlan) -> CallPlan:
        """The plan with what the shards have of its prompts."""
        if plan.cache is None or plan.resume or not self._shards:
            return plan
        salt = plan.cache.whole_salt(caller.get())
        return replace(plan, prompts=tuple(await asyncio.gather(*(self._ask(one, salt) for one in plan.prompts))))

    async def close(self) -> None:
        while self._shards:
            await self._shards.popitem()[1][1].close()

    async def _ask(self, prompt: PromptPlan, salt: bytes) -> PromptPlan:
        least = LEAST_TOKENS if len(self._shards) == 1 else LEAST_OF_SEVERAL
        if len(prompt.token_ids) < least or prompt.sampling.prompt_logprobs is not None:
            return prompt
        prefix = cached_prefix(prompt.token_ids, salt)
        shards = list(self._shards.items())
        found = await asyncio.gather(*(self._match(channel, prefix) for _, (_, channel) in shards))
        marks = prefix_marks(prefix.token_ids, salt)  # where they say that a shard has it, its "nothing" counts too
        known = {pool_id: one for (pool_id, _), one in zip(shards, found, strict=True) if one is not None}
        answers = {pool_id: one for pool_id, one in known.items() if one.tokens or marks}
        cached = tuple((pool_id, one.tokens) for pool_id, one in answers.items())
        reads = tuple((pool_id, one.ready_s) for pool_id, one in answers.items() if one.ready_s)
        return replace(prompt, cached=cached, reads=reads, marks=marks)

    async def _match(self, channel: TokenChannel, prefix: kp.CachedPrefix) -> kp.PrefixFound | None:
        try:
            asked = kp_grpc.KvPoolStub(channel).Match(prefix, timeout=ANSWER_WITHIN_S)
            found: kp.PrefixFound = await one_answer(asked)
        except UnavailableError as error:
            logger.debug("a shard did not say what it has of a prompt: %s", error.message)
            return None
        return found
