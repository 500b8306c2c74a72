"""Lengths shared out: each open decode instance has a contiguous range of prefix lengths, and a policy for it alone.

The ranges have equal shares of the predicted cost of what waits and decodes. A request counts at the length at which it
waits or last began to decode, because by that length it is given to an instance, and costs what a token of it costs now
(`scheduler/cost/worth.py`). An instance takes from its own range first. A request that grows past its range stays until
it is evicted. An instance with room whose range is empty helps another: none idles while requests wait.

Ranges change slowly, and waiting requests follow in small steps. While sharing would not pay, or not every instance can
hold every request, all instances take from one common share, as with `scheduler.sharing: none`.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from alignedserve.config import Config
from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.by_priority import ByPriority
from alignedserve.scheduler.core.decode_times import DecodeTimes
from alignedserve.scheduler.core.instances import DecodeView, Instances
from alignedserve.scheduler.core.request_table import Record
from alignedserve.scheduler.core.sharing import Prepare, Share, Sharing, by_place
from alignedserve.scheduler.cost.cost_of_lengths import CostOfLengths
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.deadlines import Deadlines
from alignedserve.scheduler.length_ranges import cell_of, divide, first_tokens
from alignedserve.scheduler.policies.base import BatchPolicy, Entry
from alignedserve.scheduler.priorities import BACKGROUND

logger = logging.getLogger(__name__)
REFRESH_S = 1.0  # between two computations of the ranges
MOST_MOVES = 32  # waiting requests that follow a boundary after one event
GAIN = 0.05  # of the mean costs: about the last twenty computations
COMMON = ""  # the key of the common share


class RangeShare(Share):
    """The waiting requests of one range. `cells`: by the cell of their length."""

    def __init__(self, policy: ByPriority) -> None:
        super().__init__(policy)
        self.cells: dict[int, dict[RequestKey, Entry]] = {}
        self.background: dict[int, int] = {}  # how many in each cell have no hurry; a cell without any may be missing
        self.overdue = Deadlines[RequestKey]()

    def __len__(self) -> int:
        return self.policy.totals()[0]

    def seed(self) -> RequestKey | None:
        first = self.overdue.first()
        return None if first is None else first[1]

    def insert(self, entry: Entry, cell: int) -> None:
        self.policy.insert(entry)
        self.cells.setdefault(cell, {})[entry.key] = entry
        if entry.rank >= BACKGROUND:
            self.background[cell] = self.background.get(cell, 0) + 1

    def remove(self, key: RequestKey, cell: int) -> Entry:
        self.policy.remove(key)
        self.overdue.discard(key)
        held = self.cells[cell]
        entry = held.pop(key)
        if entry.rank >= BACKGROUND:
            self.background[cell] -= 1
        if not held:
            del self.cells[cell]
        return entry


class LengthShares(Sharing):
    """`new_policy`: makes an empty policy, for the common share and each range. `cost`: of an iteration, if known."""

    def __init__(
        self,
        config: Config,
        block_size: int,
        new_policy: Callable[[], BatchPolicy],
        instances: Instances,
        decode_times: DecodeTimes,
        cost: StepCost | None = None,
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._new_policy = new_policy
        self._instances = instances
        self._decode_times = decode_times
        self._prepare: list[Prepare] = []
        self._shares = {COMMON: RangeShare(ByPriority(config.scheduler, new_policy))}  # by decode instance
        self._at: dict[RequestKey, tuple[RangeShare, int]] = {}  # of every waiting request: its share and cell
        self._members: list[DecodeView] = []  # instances by range, shortest first
        self._places: dict[str, int] = {}  # of the members: which range each has
        self._firsts: list[int] = []  # the first cells of their ranges but the first
        self._stale: dict[tuple[str, int], None] = {}  # (share, cell) whose requests belong elsewhere
        self._lengths = CostOfLengths(config, cost)
        self._means: list[float] = []  # mean cost by cell
        self._refreshes = 0
        self._sharing = False
        self._divisible = True  # the policy can be created for each range
        self._longest_tokens = 0  # that a request may become
        self._next_s = 0.0
        self._changed = True

    # the waiting requests

    def insert(self, entry: Entry, max_total_tokens: int) -> None:
        if entry.key in self._at:
            raise AccountingError(f"{entry.key} is already waiting", request_id=entry.key.request_id)
        if max_total_tokens > self._longest_tokens:
            self._longest_tokens = max_total_tokens
            self._changed |= self._sharing and not self._all_can_hold_it()
        cell = cell_of(entry.tokens)
        share = self._shares[self._owner(cell)]
        share.insert(entry, cell)
        self._at[entry.key] = share, cell

    def remove(self, key: RequestKey) -> None:
        share, cell = self._at.pop(key)
        share.remove(key, cell)

    def totals(self) -> tuple[int, int]:
        found = [share.policy.totals() for share in self._shares.values()]
        return sum(requests for requests, _ in found), sum(blocks for _, blocks in found)

    def mark_overdue(self, key: RequestKey, due_s: float) -> None:
        share, _ = self._at[key]
        share.overdue.set(key, due_s)

    # which instance takes what

    def share_of(self, decode: DecodeView) -> Share:
        return self._shares[decode.decode_id if self.takes_own(decode) else COMMON]

    def takes(self, decode: DecodeView, key: RequestKey) -> bool:
        return self._at[key][0] is self.share_of(decode)

    def helps(self, decode: DecodeView) -> Share | None:
        """The share with the most blocks; unless the instance is idle, of its neighbours'."""
        own = self.share_of(decode)
        waiting = [share for share in self._shares.values() if share is not own and len(share)]
        if not decode.idle and self.takes_own(decode):
            waiting = [share for share in waiting if self._steps(decode, share) <= 1]
        return max(waiting, key=lambda share: share.policy.totals()[1], default=None)

    def takers(self, decode: DecodeView) -> Sequence[DecodeView]:
        return [decode] if self.takes_own(decode) else self._instances.open_decode()

    def order(self, decodes: Sequence[DecodeView], tokens: int) -> list[DecodeView]:
        """The instance of its range first, then its neighbours; those with much more load last."""
        if not self._sharing:
            return sorted(decodes, key=DecodeView.load_s) if len(decodes) > 1 else list(decodes)
        own = self._place(cell_of(tokens))
        last = len(self._places)
        steps = [abs(self._places.get(decode.decode_id, last + own) - own) for decode in decodes]
        return by_place(decodes, steps, self._config.scheduler.balance_slack)

    def takes_own(self, decode: DecodeView) -> bool:
        return self._sharing and decode.decode_id in self._places

    def _steps(self, decode: DecodeView, share: RangeShare) -> int:
        """Between the range of the instance and the shortest length that waits in the share."""
        return abs(self._places[decode.decode_id] - self._place(min(share.cells)))

    def _place(self, cell: int) -> int:
        """The range that the cell is in."""
        return bisect_right(self._firsts, cell)

    def _owner(self, cell: int) -> str:
        return self._members[self._place(cell)].decode_id if self._sharing else COMMON

    # the ranges

    def instances_changed(self) -> None:
        self._changed = True

    def update(self, now_s: float) -> None:
        if self._changed or (now_s >= self._next_s and len(self._instances.decode) > 1):
            self._refresh(now_s)
        if self._stale:
            self._follow()

    def _refresh(self, now_s: float) -> None:
        """Compute the ranges anew, and note which waiting requests have to follow."""
        self._next_s = now_s + REFRESH_S * max(1.0, len(self._members) / 16)
        self._line_up()
        self._sharing = False
        if len(self._members) > 1 and self._all_can_hold_it():
            only = self._only_background()
            held = [
                (cell_of(record.kv_tokens), record.kv_tokens + _grown(view, record))
                for view in self._members
                for record in view.held()
                if only or not record.background
            ]
            self._weigh(held, only)
            self._firsts = divide(self._means, len(self._members))
            groups: list[list[int]] = [[] for _ in self._members]
            for cell, tokens in sorted(held):
                groups[self._place(cell)].append(tokens)
            self._sharing = self._lengths.pays(groups, waiting=bool(self._at))
        self._changed = False
        for name, share in self._shares.items():
            for cell in share.cells:
                if self._owner(cell) != name:
                    self._stale[name, cell] = None

    def _only_background(self) -> bool:
        """Whether all requests only take what others leave. Otherwise these have no weight: a backlog may be long."""
        if any(view.size > view.background.requests for view in self._members):
            return False
        return all(sum(share.background.values()) == len(share) for share in self._shares.values())

    def _all_can_hold_it(self) -> bool:
        """Whether each instance's cache can hold the longest request that has waited."""
        return all(view.request_blocks * self._block_size >= self._longest_tokens for view in self._members)

    def _line_up(self) -> None:
        """The instances that have a range, by the mean length that they hold; shares of others end when empty."""
        views = [view for view in self._instances.open_decode() if view.report is not None]
        views = views if self._with_policies(views) else []
        if {view.decode_id for view in views} != self._places.keys() or self._changed:
            self._members = sorted(views, key=DecodeView.mean_held)
            self._places = {view.decode_id: place for place, view in enumerate(self._members)}
        names = {view.decode_id for view in views} | {COMMON}
        self._shares = {name: share for name, share in self._shares.items() if name in names or len(share)}

    def _with_policies(self, views: Sequence[DecodeView]) -> bool:
        """Whether each of several instances has a share. False for good if a user's policy cannot be created again."""
        for view in views if len(views) > 1 and self._divisible else ():
            if view.decode_id in self._shares:
                continue
            try:
                policy = ByPriority(self._config.scheduler, self._new_policy)
            except ConfigError as error:
                logger.error("lengths are not shared out among decode instances: %s", error)
                self._divisible = False
                break
            for prepare in self._prepare:
                policy.prepare(prepare)
            self._shares[view.decode_id] = RangeShare(policy)
        return self._divisible

    def _weigh(self, held: Sequence[tuple[int, int]], background: bool) -> None:
        """Add the present costs to the mean costs by cell. `held`: (cell, tokens) of requests at instances.

        `background`: waiting requests that only take what others leave have a weight.
        """
        lengths = self._lengths
        first = self._members[0]
        cache_tokens = first.cache_blocks * self._block_size
        lengths.learn(first.cost.predict_iteration_s, cache_tokens, first.max_running(self._config))
        waiting: dict[int, int] = {}
        for share in self._shares.values():
            for cell, entries in share.cells.items():
                count = len(entries) - (0 if background else share.background.get(cell, 0))
                waiting[cell] = waiting.get(cell, 0) + count
        cells = [*waiting, *(cell for cell, _ in held)]
        self._means += [0.0] * (max(cells, default=0) + 1 - len(self._means))
        now = [0.0] * len(self._means)
        more = int(self._decode_times.mean_tokens / 2)  # tokens that it will have on average while it decodes
        for cell, count in waiting.items():
            now[cell] += count * lengths.of(first_tokens(cell) + more)
        for cell, tokens in held:
            now[cell] += lengths.of(tokens)
        if any(now):
            self._refreshes += 1
            gain = max(GAIN, 1.0 / self._refreshes)
            self._means = [mean + gain * (cost - mean) for mean, cost in zip(self._means, now, strict=True)]

    def _follow(self) -> None:
        """Move some of the requests whose range has changed."""
        left = MOST_MOVES
        while self._stale and left > 0:
            name, cell = next(iter(self._stale))
            share, owner = self._shares.get(name), self._owner(cell)
            entries = share.cells.get(cell) if share is not None else None
            if share is None or not entries or owner == name:
                del self._stale[name, cell]
                continue
            for key in list(zip(range(left), entries, strict=False)):
                self._move(key[1], share, self._shares[owner], cell)
                left -= 1

    def _move(self, key: RequestKey, share: RangeShare, to: RangeShare, cell: int) -> None:
        due_s = share.overdue.get(key)
        to.insert(share.remove(key, cell), cell)
        if due_s is not None:
            to.overdue.set(key, due_s)
        self._at[key] = to, cell

    # the policies

    def prepare(self, prepare: Prepare) -> None:
        self._prepare.append(prepare)
        for share in self._shares.values():
            share.policy.prepare(prepare)

    def use_cost(self, cost: StepCost) -> None:
        super().use_cost(cost)
        self._lengths.use_cost(cost)

    def policies(self) -> Iterable[BatchPolicy]:
        return chain.from_iterable(share.policy.policies() for share in self._shares.values())

    def check_integrity(self) -> None:
        for share in self._shares.values():
            share.policy.check_integrity()
            for cell, entries in share.cells.items():
                if share.background.get(cell, 0) != sum(entry.rank >= BACKGROUND for entry in entries.values()):
                    raise AccountingError(f"the requests without hurry of cell {cell} do not match a recount")
        held = {
            key: (share, cell)
            for share in self._shares.values()
            for cell, entries in share.cells.items()
            for key in entries
        }
        if held != self._at or len(held) != self.totals()[0]:
            raise AccountingError("the shares do not hold the waiting requests, each once")
        for share in self._shares.values():
            if any(self._at.get(key, (None, 0))[0] is not share for key in share.overdue):
                raise AccountingError("a share has an overdue request that does not wait there")
        for name, share in self._shares.items():
            for cell in share.cells:
                if self._owner(cell) != name and (name, cell) not in self._stale:
                    raise AccountingError(f"requests of cell {cell} wait in the wrong share and would never move")


def _grown(view: DecodeView, record: Record) -> int:
    """Tokens that the request has decoded there."""
    return max(0, view.iterations - record.joined_iteration) if record.key in view.decoding else 0
