"""Shared parts of the colocated schedulers: members and their blocks, preemption by recompute, repeated passes."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator

from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.colocated.base import (
    InstanceScheduler,
    MixedPlan,
    MixedRequest,
    Options,
    PlannedChunk,
    PlannedDecode,
)
from alignedserve.scheduler.instance.block_allocator import BlockAllocator


def whole(options: Options, key: str, low: int = 1) -> int:
    """The option as an integer. Raises ConfigError if it is less than `low`."""
    value = int(options[key])
    if value < low:
        raise ConfigError(f"option {key} must be at least {low}, not {value}")
    return value


class ActiveRequest:
    """A request here. `known`: its tokens, including those that planned passes sample. `computed`: tokens with KV.

    `decoding`: everything known but the last token is computed. `blocks`: held in the allocator under its key.
    """

    __slots__ = ("blocks", "computed", "decoding", "known", "request")

    def __init__(self, request: MixedRequest) -> None:
        self.request = request
        self.known = request.prompt_tokens
        self.computed = 0
        self.decoding = False
        self.blocks = 0

    @property
    def left(self) -> int:
        return self.known - self.computed


class Draft:
    """A plan under construction."""

    def __init__(self) -> None:
        self.chunks: list[PlannedChunk] = []
        self.decodes: list[PlannedDecode] = []
        self.preempted: list[RequestKey] = []
        self.tokens = 0

    def add(self, member: ActiveRequest, tokens: int) -> None:
        """The pass computes `tokens` of the member's tokens; the member's blocks already cover them."""
        key = member.request.key
        if member.decoding:
            self.decodes.append(PlannedDecode(key, member.computed))
        else:
            last = tokens == member.left
            self.chunks.append(PlannedChunk(key, member.computed, tokens, last))
            member.decoding = last
        self.tokens += tokens
        member.computed += tokens
        member.known += member.decoding

    def finish(self) -> MixedPlan:
        return MixedPlan(tuple(self.chunks), tuple(self.decodes), tuple(self.preempted))


class ContinuousScheduler(InstanceScheduler):
    """A FCFS queue, and running members in order of admission. A subclass decides what a pass contains."""

    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._waiting: OrderedDict[RequestKey, ActiveRequest] = OrderedDict()
        self._running: dict[RequestKey, ActiveRequest] = {}
        self._settled = False  # no request was added or removed since the last plan

    def add(self, request: MixedRequest) -> None:
        if request.key in self._running or request.key in self._waiting:
            raise AccountingError(f"{request.key} is already here", request_id=request.key.request_id)
        self._waiting[request.key] = ActiveRequest(request)
        self._settled = False

    def cancel(self, key: RequestKey) -> bool:
        self._settled = False
        if self._waiting.pop(key, None) is not None:
            return True
        if key not in self._running:
            return False
        self._remove(key)
        return True

    def plan(self, now_s: float) -> MixedPlan:
        draft = Draft()
        self._fill(draft, now_s)
        self._settled = True
        return draft.finish()

    def done(self, plan: MixedPlan, finished: Collection[RequestKey]) -> None:
        for key in finished:
            self._settled = False
            if self._waiting.pop(key, None) is None and key in self._running:  # it is in the queue after a preemption
                self._remove(key)

    def load(self) -> tuple[int, int]:
        members = [*self._waiting.values(), *self._running.values()]
        return len(members), sum(member.left for member in members if not member.decoding)

    def quiet_passes(self, plan: MixedPlan) -> int:
        """All running requests decode until blocks run out. A request that was not admitted has no more room later."""
        running = len(self._running)
        if not self._settled or plan.chunks or plan.preempted or not running or len(plan.decodes) != running:
            return 0
        size = self._block_size
        slack = min(member.blocks * size - member.computed for member in self._running.values())
        return slack + self._allocator.available_blocks // running * size

    def repeat(self, plan: MixedPlan, passes: int) -> None:
        for decode in plan.decodes:
            member = self._running[decode.key]
            if not self._cover(member, passes):
                raise AccountingError(f"{decode.key} has no room for {passes} passes", request_id=decode.key.request_id)
            member.computed += passes
            member.known += passes

    def check_integrity(self) -> None:
        for key, member in self._running.items():
            if member.request.key != key or member.blocks != len(self._allocator.blocks_of(key)):
                raise AccountingError(f"{key} does not hold the blocks that it counts", request_id=key.request_id)
            if member.blocks * self._block_size < member.computed or member.left < member.decoding:
                raise AccountingError(f"{key}: {member.computed} tokens computed in {member.blocks} blocks")
        for key, member in self._waiting.items():
            if key in self._running or member.blocks or member.computed or self._allocator.blocks_of(key):
                raise AccountingError(f"{key} is queued but also runs or holds blocks", request_id=key.request_id)
        unknown = self._allocator.holders_but(self._running)
        if unknown is not None:
            raise AccountingError(f"{unknown} holds blocks but is not here")
        self._allocator.check_integrity()

    # for subclasses

    @abstractmethod
    def _fill(self, draft: Draft, now_s: float) -> None:
        """Add to the draft what the next pass computes, and allocate blocks for it."""

    def _cover(self, member: ActiveRequest, tokens: int) -> bool:
        """Allocate blocks for `tokens` tokens after the computed ones.

        Returns False, unchanged, if too few are free.
        """
        missing = -((member.computed + tokens) // -self._block_size) - member.blocks
        if missing <= 0:
            return True
        if self._allocator.allocate(missing, member.request.key) is None:
            return False
        member.blocks += missing
        return True

    def _admit(self, member: ActiveRequest) -> None:
        """Move the head of the queue to the running members."""
        del self._waiting[member.request.key]
        self._running[member.request.key] = member

    def _preempt(self, member: ActiveRequest, draft: Draft) -> None:
        """Drop its KV and move it to the head of the queue. All of its tokens are computed again."""
        key = member.request.key
        self._remove(key)
        member.computed = member.blocks = 0
        member.decoding = False
        self._waiting[key] = member
        self._waiting.move_to_end(key, last=False)
        draft.preempted.append(key)

    def _cover_by_preempting(
        self, member: ActiveRequest, tokens: int, victims: Iterator[ActiveRequest], draft: Draft
    ) -> bool:
        """`_cover`, preempting `victims` in their order. Returns False if the member itself was preempted."""
        while not self._cover(member, tokens):
            victim = next(victims)
            self._preempt(victim, draft)
            if victim is member:
                return False
        return True

    def _remove(self, key: RequestKey) -> None:
        del self._running[key]
        self._allocator.release_all(key)
