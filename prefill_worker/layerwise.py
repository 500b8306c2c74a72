"""Step 2 of the paper while step 1 goes on: each layer's KV goes to the pool while the next layers compute.

The compute thread begins the copies, and waits for nothing: blocks of the pool are leased by the event loop, and as
long as there are none nothing is copied ahead. When the prompt is computed the `Offloader` takes over with what has
been begun, copies the rest as whole blocks, and commits. What was copied for a prompt that ends otherwise is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alignedserve.geometry import KvGeometry
from alignedserve.metrics import Page
from alignedserve.request import RequestKey
from alignedserve.transfer.completion import Completion

GROUP_BYTES = 16 << 20
"""Of one copy, at least, where there are layers enough: less is not worth a call, of more the last is not hidden."""

MIN_COPIES = 4
"""A pass's KV goes in at least so many copies, where there are layers enough: all but the last are hidden behind it."""

BeginPart = Callable[[RequestKey, Sequence[int], Sequence[int], "tuple[int, int] | None"], Completion]
"""Begin to copy blocks of the cache to blocks of the pool, some layers or all; never blocks and never raises."""


def layers_of_a_copy(layers: int, layer_bytes: int) -> int:
    """How many of a pass's `layers` go in one copy, if it fills `layer_bytes` of KV in each."""
    return max(1, min(-(-GROUP_BYTES // max(1, layer_bytes)), -(-layers // MIN_COPIES)))


@dataclass(slots=True, eq=False)
class Ahead:
    """What is copied of one job before it is computed.

    The compute thread alone has it until it hands it over; but `fresh` is assigned by the event loop.
    """

    lead: RequestKey
    kept: int  # blocks at the front that the pool holds already
    count: int  # blocks that it lacks
    fresh: list[int] | None = None  # blocks of the pool for those, once they are leased
    copied: int = 0  # blocks at the front, the kept ones among them, whose copies have all been begun
    parts: list[Completion] = field(default_factory=list)
    taking: asyncio.Task[list[int]] | None = None  # of the event loop


@dataclass(slots=True)
class Filling:
    """What a pass does to one job's blocks: those from `begin` up to `end` are full when it is over."""

    ahead: Ahead
    blocks: Sequence[int]
    begin: int
    end: int
    layers: int = 0  # of them that are on their way

    def copy(self, layers: int, begin: BeginPart) -> int:
        """Have the layers before `layers` copied. Returns how many are on their way that were not."""
        ahead = self.ahead
        if ahead.fresh is None:
            return 0
        if ahead.copied < self.begin:  # filled by earlier passes, when there was no block of the pool for them
            self._begin(ahead.copied, self.begin, None, begin)
            ahead.copied = self.begin
        if self.end > self.begin:
            self._begin(self.begin, self.end, (self.layers, layers), begin)
        more, self.layers = layers - self.layers, layers
        return more

    def _begin(self, first: int, end: int, layers: tuple[int, int] | None, begin: BeginPart) -> None:
        ahead = self.ahead
        assert ahead.fresh is not None
        targets = ahead.fresh[first - ahead.kept : end - ahead.kept]
        ahead.parts.append(begin(ahead.lead, self.blocks[first:end], targets, layers))


class PassCopies:
    """The copies of one pass, as its layers are computed."""

    def __init__(self, fillings: Sequence[Filling], begin: BeginPart, geometry: KvGeometry) -> None:
        self._fillings = fillings
        self._begin = begin
        self._layers = geometry.layers
        blocks = sum(filling.end - filling.begin for filling in fillings)
        self._group = layers_of_a_copy(geometry.layers, blocks * geometry.block_bytes // geometry.layers)
        self._next = 0
        self.layers = 0  # copied ahead, over all jobs

    def on_layer(self, layer: int) -> None:
        """The pass has been given the work that writes this layer's KV."""
        if layer != self._next:
            self._next = -1  # a model that computes its layers in another order: nothing more is copied ahead
            return
        self._next += 1
        if self._next % self._group == 0 or self._next == self._layers:
            self.layers += sum(filling.copy(self._next, self._begin) for filling in self._fillings)

    def end(self) -> None:
        """The pass went well."""
        for filling in self._fillings:
            if filling.layers == self._layers:
                filling.ahead.copied = filling.end


class Layerwise:
    """For the compute thread: which jobs are copied ahead, and how."""

    def __init__(
        self,
        tokens: int,
        geometry: KvGeometry,
        prepare: Callable[[Ahead], None],
        begin: BeginPart,
        abandon: Callable[[Ahead], None],
    ) -> None:
        """Jobs of at least `tokens` tokens to compute.

        `prepare` and `abandon` tell the event loop: to lease blocks of the pool, and that the job has been given up.
        """
        self.tokens = tokens
        self.layers_ahead = 0
        self._geometry = geometry
        self._prepare, self._begin, self.abandon = prepare, begin, abandon

    def show_metrics(self, page: Page) -> None:
        meaning = "layers copied while later ones were computed (prefill.layerwise_tokens)"
        page.counter("prefill_offload_ahead_layers_total", meaning, self.layers_ahead)

    def open(self, lead: RequestKey, tokens: int, computed: int, kept: int) -> Ahead | None:
        """For a job of `tokens` tokens that starts now; None: not ahead.

        `computed` of its tokens it has from the pool, and `kept` blocks of those stay where they are.
        """
        if tokens - computed < self.tokens:
            return None
        ahead = Ahead(lead, kept, -(-tokens // self._geometry.block_size) - kept, copied=kept)
        self._prepare(ahead)
        return ahead

    def filling(self, ahead: Ahead, blocks: Sequence[int], start: int, end: int, *, last: bool) -> Filling:
        """A chunk that computes tokens `start` to `end`; `last`: no other will write to the blocks."""
        size = self._geometry.block_size
        return Filling(ahead, blocks, start // size, len(blocks) if last else end // size)

    def watch(self, fillings: Sequence[Filling]) -> PassCopies:
        return PassCopies(fillings, self._begin, self._geometry)
