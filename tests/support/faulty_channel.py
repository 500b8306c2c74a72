"""A channel with faults from a seeded plan: errors, delays, copies that never end, short copies and flipped bits.

In one process, wrap a channel: `FaultyChannel(channel, FaultPlan(flip=1.0))`. For a cluster, start the worker processes
with the environment from `fault_environment(plan)`: `transfer.links.connect` then wraps every channel.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from alignedserve.errors import ConfigError, TransferError
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.channel import Channel, ChannelCounters, PageLocked
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.links import WRAPPER_VARIABLE

logger = logging.getLogger(__name__)

PLAN_VARIABLE = "ALIGNEDSERVE_TEST_FAULTS"
FAULTS = ("refuse", "error", "delay", "stuck", "short", "flip")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The probability of each fault for a copy. A copy has at most one fault.

    `refuse`: `copy` raises. `error`: the blocks are copied, but the completion fails. `delay`: the copy begins up to
    `delay_s` later. `stuck`: the copy does not begin until `release` or `close`. `short`: the last block, or the second
    half of its layers, is left out, and the completion succeeds. `flip`: `flipped_bits` bits of the destination are
    inverted after the copy, and the completion succeeds. `only`: faults only on channels whose "source>destination"
    contains this. `after`: no faults in this many first copies of a channel. `most`: the largest number of faults of a
    channel; 0: no limit.
    """

    refuse: float = 0.0
    error: float = 0.0
    delay: float = 0.0
    stuck: float = 0.0
    short: float = 0.0
    flip: float = 0.0
    delay_s: float = 0.05
    flipped_bits: int = 1
    seed: int = 0
    only: str = ""
    after: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        rates = [getattr(self, fault) for fault in FAULTS]
        if min(rates) < 0 or sum(rates) > 1:
            raise ConfigError(f"the rates of faults must be at least 0 and add up to 1 at most, not {rates}")


class FaultyChannel(Channel):
    """Does the same as `inner`, with the faults of `plan`. `injected` counts them by kind."""

    def __init__(self, inner: Channel, plan: FaultPlan, *, salt: str = "") -> None:
        """The same plan, stores and `salt` give the same faults in the same copies."""
        self._inner = inner
        self._plan = plan
        pair = f"{inner.source.store_id}>{inner.destination.store_id}"
        self._random = random.Random(f"{plan.seed} {pair} {salt}")
        self._active = plan.only in pair
        self._copies = itertools.count()
        self._lock = threading.Lock()
        self._held: dict[Completion, Callable[[], None]] = {}  # delayed or stuck copies, and how each begins
        self._closed = False
        self.injected: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def source(self) -> BlockStore:
        return self._inner.source

    @property
    def destination(self) -> BlockStore:
        return self._inner.destination

    @property
    def pending(self) -> int:
        return self._inner.pending + len(self._held)

    def counters(self) -> ChannelCounters:
        return self._inner.counters()

    @property
    def waits_for_peer(self) -> bool:
        return self._inner.waits_for_peer and not self._held

    def page_locked(self) -> PageLocked | None:
        return self._inner.page_locked()

    def trouble(self) -> TransferError | None:
        return self._inner.trouble()

    def copy(
        self,
        source_ids: Sequence[int],
        destination_ids: Sequence[int],
        *,
        layers: tuple[int, int] | None = None,
        settled: bool = False,
    ) -> Completion:
        with self._lock:
            fault = self._draw() if len(source_ids) else None
            draw = random.Random(self._random.random())
        pair = f"{self.source.store_id} to {self.destination.store_id}"
        if fault == "refuse":
            raise TransferError(f"injected: the copy {pair} is refused")
        outer = Completion(f"{pair} ({fault or 'sound'})")
        sources, destinations = list(source_ids), list(destination_ids)
        if fault == "short":
            self._copy_short(sources, destinations, layers, outer)
            return outer

        def ended(copy: Completion) -> None:
            error = copy.error
            if error is None and fault == "error":
                error = TransferError(f"injected: the copy {pair} failed")
            if error is None and fault == "flip":
                self._flip(destinations, draw)
            outer.finish(error)

        def begin() -> None:
            try:
                self._inner.copy(sources, destinations, layers=layers, settled=settled).add_callback(ended)
            except TransferError as error:
                outer.finish(error)

        if fault in ("delay", "stuck"):
            self._hold(outer, begin, draw.random() * self._plan.delay_s if fault == "delay" else None)
            return outer
        self._inner.copy(sources, destinations, layers=layers, settled=settled).add_callback(ended)
        return outer

    def release(self, most: int | None = None) -> None:
        """Begin the oldest `most` stuck or delayed copies, or all of them."""
        for outer in list(self._held)[:most]:
            self._let_go(outer)

    def close(self, timeout_s: float = 10.0) -> None:
        with self._lock:
            self._closed = True
            held, self._held = list(self._held), {}
        for outer in held:
            outer.finish(TransferError(f"the channel {outer.label} was closed"))
        self._inner.close(timeout_s)

    def _draw(self) -> str | None:
        number = next(self._copies)
        point = self._random.random()
        if not self._active or number < self._plan.after:
            return None
        if self._plan.most and self.injected.total() >= self._plan.most:
            return None
        for fault in FAULTS:
            point -= getattr(self._plan, fault)
            if point < 0:
                self.injected[fault] += 1
                return fault
        return None

    def _hold(self, outer: Completion, begin: Callable[[], None], delay_s: float | None) -> None:
        with self._lock:
            if self._closed:
                raise TransferError(f"the channel {outer.label} is closed")
            self._held[outer] = begin
        if delay_s is not None:
            timer = threading.Timer(delay_s, self._let_go, (outer,))
            timer.daemon = True
            timer.start()

    def _let_go(self, outer: Completion) -> None:
        with self._lock:
            begin = self._held.pop(outer, None)
        if begin is not None:
            begin()

    def _copy_short(
        self, sources: list[int], destinations: list[int], layers: tuple[int, int] | None, outer: Completion
    ) -> None:
        """The blocks of a short copy: all but the last block, and the first half of its layers if it has several."""
        begin, end = layers or (self.source.slice.layer_begin, self.source.slice.layer_end)
        half = (begin + end) // 2
        parts = [(sources[:-1], destinations[:-1], layers)]
        if half > begin:
            parts.append((sources[-1:], destinations[-1:], (begin, half)))
        copies = [self._inner.copy(wanted, targets, layers=part) for wanted, targets, part in parts]
        copies[-1].add_callback(lambda copy: outer.finish(copy.error))

    def _flip(self, destinations: list[int], draw: random.Random) -> None:
        blocks: Any = self.destination  # a numpy array or a tensor, uint8 [capacity, block_bytes]
        for _ in range(self._plan.flipped_bits):
            block, byte = draw.choice(destinations), draw.randrange(self.destination.block_bytes)
            blocks.blocks[block, byte] ^= 1 << draw.randrange(8)


def fault_environment(plan: FaultPlan) -> dict[str, str]:
    """Environment variables that make each channel of a process follow `plan`."""
    return {WRAPPER_VARIABLE: f"{__name__}:wrap_by_environment", PLAN_VARIABLE: json.dumps(asdict(plan))}


def wrap_by_environment(channel: Channel) -> Channel:
    """`channel` with the faults of this process's environment. A restarted process draws other faults."""
    return FaultyChannel(channel, _plan_of_environment(), salt=f"{os.getpid()} {time.time_ns()}")


@functools.cache
def _plan_of_environment() -> FaultPlan:
    """The plan in this process's environment. Raises ConfigError if the variable is not a plan."""
    text = os.environ.get(PLAN_VARIABLE, "{}")
    try:
        plan = FaultPlan(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{PLAN_VARIABLE} is not a plan of faults: {text!r}: {error}") from error
    logger.warning("faults are injected: %s", plan)
    return plan
