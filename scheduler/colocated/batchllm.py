"""BatchLLM: prefix-sharing groups in the order of their ratio of answers to prompts, batches bounded by memory.

The file is analysed before anything runs (`src/alignedserve/prefix_groups.py`). A pass takes decodes first, then what
prompts have of their own, then shared prefixes. There is no limit on requests: a prompt is admitted while its KV fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.colocated.base import MixedPlan, MixedRequest, Options
from alignedserve.scheduler.colocated.continuous import ActiveRequest, ContinuousScheduler, Draft, whole
from alignedserve.scheduler.instance.block_allocator import BlockAllocator


@dataclass(slots=True)
class _Group:
    """Requests that share `tokens` tokens, in whole blocks, which are held under `key` while it has users."""

    key: RequestKey
    tokens: int
    ready: bool = False  # they are computed
    leader: RequestKey | None = None  # the user that computes them
    users: set[RequestKey] = field(default_factory=set)  # running members


class BatchLlmScheduler(ContinuousScheduler):
    """`token_budget`: of a pass. `memory_share`: of the cache, which admitted prompts may fill.

    The first member of a group computes its prefix with its own part; the others follow when it is computed. The prefix
    is kept until no running request uses it. The latest admitted request is preempted first, and computed again.
    """

    WHOLE_FILE: ClassVar[bool] = True

    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        super().__init__(options, allocator, block_size)
        self._budget = whole(options, "token_budget")
        share = float(options["memory_share"])
        if not 0 < share <= 1:
            raise ConfigError(f"option memory_share must be above 0 and at most 1, not {share:g}")
        self._reserve = int(allocator.capacity * (1.0 - share))
        self._groups: dict[int, _Group] = {}  # by turn; those with a member here
        self._turns: list[tuple[int, RequestKey]] = []  # heap of what waits, by turn; also of what no longer does
        self._members: dict[int, int] = {}  # by turn: members here

    def add(self, request: MixedRequest) -> None:
        super().add(request)
        tokens = request.shared_tokens // self._block_size * self._block_size
        self._groups.setdefault(request.turn, _Group(RequestKey(f"prefix of group {request.turn}"), tokens))
        self._members[request.turn] = self._members.get(request.turn, 0) + 1
        heapq.heappush(self._turns, (request.turn, request.key))

    def cancel(self, key: RequestKey) -> bool:
        member = self._waiting.get(key) or self._running.get(key)
        found = super().cancel(key)
        if found and member is not None:
            self._forget(member)
        return found

    def done(self, plan: MixedPlan, finished: Collection[RequestKey]) -> None:
        for chunk in plan.chunks:
            member = self._running.get(chunk.key)
            if member is not None:
                group = self._group(member)
                if group.leader == chunk.key and chunk.cached_tokens + chunk.tokens >= group.tokens:
                    group.ready, group.leader = True, None
        ended = [member for key in finished if (member := self._waiting.get(key) or self._running.get(key)) is not None]
        super().done(plan, finished)
        for member in ended:
            self._forget(member)

    def _fill(self, draft: Draft, now_s: float) -> None:
        for member in [one for one in self._running.values() if one.decoding]:
            if member.request.key in self._running:
                if not self._cover_by_preempting(member, 1, self._latest_first(), draft):
                    break
                draft.add(member, 1)
        unfinished = [one for one in self._running.values() if not one.decoding]
        for member in unfinished:
            if self._group(member).ready:
                self._add_chunk(member, draft)
        room = self._admit_in_turn(draft, prefix_ready=True)
        for member in unfinished:
            if not self._group(member).ready:
                self._add_chunk(member, draft)
        if room:
            self._admit_in_turn(draft, prefix_ready=False)
        if not self._running and self._waiting and not draft.preempted:
            raise AccountingError("an empty cache has no room for the next request")

    def _admit_in_turn(self, draft: Draft, *, prefix_ready: bool) -> bool:
        """Admit waiting requests in turn: those whose prefix is there, or those that compute it first.

        Returns False if one found no room.
        """
        passed: list[tuple[int, RequestKey]] = []
        room = True
        while self._turns and draft.tokens < self._budget and not draft.preempted:
            turn, key = entry = heapq.heappop(self._turns)
            member = self._waiting.get(key)
            if member is None:
                continue
            group = self._groups[turn]
            if group.leader is not None or group.ready != prefix_ready:
                passed.append(entry)
                if prefix_ready and not group.ready and group.leader is None:
                    break  # groups are begun in turn: those after it have no prefix here either
                continue
            if not self._begin(member, group):
                passed.append(entry)
                room = False
                break
            self._add_chunk(member, draft)
        for entry in passed:
            heapq.heappush(self._turns, entry)
        return room

    def _begin(self, member: ActiveRequest, group: _Group) -> bool:
        """Admit the member if all its tokens, and the prefix, fit beside the reserve. An empty cache needs none."""
        missing = -(-(member.known - group.tokens) // self._block_size)
        shared = 0 if group.ready else group.tokens // self._block_size
        reserve = self._reserve if self._running else 0
        if self._allocator.available_blocks - missing - shared < reserve:
            return False
        self._admit(member)
        group.users.add(member.request.key)
        if group.ready:
            member.computed = group.tokens
            self.hit_tokens += group.tokens * (member.known == member.request.prompt_tokens)
        elif shared:
            self._allocator.allocate(shared, group.key)
            group.leader = member.request.key
        else:
            group.ready = True
        return self._cover(member, member.left)

    def _add_chunk(self, member: ActiveRequest, draft: Draft) -> None:
        tokens = min(member.left, self._budget - draft.tokens)
        if tokens > 0:
            draft.add(member, tokens)

    def quiet_passes(self, plan: MixedPlan) -> int:
        running = len(self._running)
        if not self._settled or plan.chunks or plan.preempted or not running or len(plan.decodes) != running:
            return 0
        size = self._block_size
        slack = min(
            member.blocks * size + self._group(member).tokens - member.computed for member in self._running.values()
        )
        return slack + self._allocator.available_blocks // running * size

    def _cover(self, member: ActiveRequest, tokens: int) -> bool:
        own = member.computed + tokens - self._group(member).tokens
        missing = -(-own // self._block_size) - member.blocks
        if missing <= 0:
            return True
        if self._allocator.allocate(missing, member.request.key) is None:
            return False
        member.blocks += missing
        return True

    def _preempt(self, member: ActiveRequest, draft: Draft) -> None:
        super()._preempt(member, draft)
        heapq.heappush(self._turns, (member.request.turn, member.request.key))

    def _remove(self, key: RequestKey) -> None:
        group = self._group(self._running[key])
        super()._remove(key)
        group.users.discard(key)
        if group.leader == key:
            group.leader = None
        if not group.users:
            self._allocator.release_all(group.key)
            group.ready = False

    def _forget(self, member: ActiveRequest) -> None:
        """The request has left for good."""
        turn = member.request.turn
        self._members[turn] -= 1
        if not self._members[turn]:
            del self._members[turn], self._groups[turn]

    def _group(self, member: ActiveRequest) -> _Group:
        return self._groups[member.request.turn]

    def _latest_first(self) -> Iterator[ActiveRequest]:
        """The last admitted first. Each must be removed before the next is requested."""
        while self._running:
            yield next(reversed(self._running.values()))

    def check_integrity(self) -> None:
        for key, member in self._running.items():
            group = self._group(member)
            held = member.blocks * self._block_size
            if member.blocks != len(self._allocator.blocks_of(key)) or held + group.tokens < member.computed:
                raise AccountingError(f"{key} does not hold the blocks that it counts", request_id=key.request_id)
            if key not in group.users:
                raise AccountingError(f"{key} does not use its group's prefix", request_id=key.request_id)
        for group in self._groups.values():
            held = len(self._allocator.blocks_of(group.key))
            if held != (group.tokens // self._block_size if group.users else 0):
                raise AccountingError(f"{group.key.request_id} holds {held} blocks for {group.tokens} tokens")
        keys = {*self._running, *(group.key for group in self._groups.values())}
        unknown = self._allocator.holders_but(keys)
        if unknown is not None:
            raise AccountingError(f"{unknown} holds blocks but is not here")
        self._allocator.check_integrity()
