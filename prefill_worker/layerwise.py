"""Layer-wise offload: step 2 of the paper beside step 1. A layer's KV goes to the pool while later layers compute.

The compute thread begins the copies and never waits. The event loop leases the blocks of the pool; until they are
leased, nothing is copied ahead. When the prompt is computed, the `Offloader` takes over the copies that were begun,
copies the rest as whole blocks, and commits. If a prompt ends without an offload, its copies are dropped.
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
"""The size that a copy has at least, if there are enough layers.

A smaller copy is not worth the call. Of a larger one, the last copy takes longer after the pass.
"""

MIN_COPIES = 4
"""The least number of copies of a pass, if there are enough layers. All but the last run while the pass computes."""

BeginPart = Callable[[RequestKey, Sequence[int], Sequence[int], "tuple[int, int] | None"], Completion]
"""Begin to copy some or all layers of cache blocks to blocks of the pool. Never blocks and never raises."""


def layers_of_a_copy(layers: int, layer_bytes: int) -> int:
    """How many of the model's `layers` go in one copy, if a pass fills `layer_bytes` bytes of KV in each."""
    return max(1, min(-(-GROUP_BYTES // max(1, layer_bytes)), -(-layers // MIN_COPIES)))


@dataclass(slots=True, eq=False)
class Ahead:
    """The copies of one job that begin before it is computed.

    Only the compute thread uses it until it hands it over, except that the event loop assigns `fresh`.
    """

    lead: RequestKey
    kept: int  # leading blocks that the pool already holds
    count: int  # blocks that the pool lacks
    fresh: list[int] | None = None  # blocks of the pool for the lacking ones, once they are leased
    copied: int = 0  # leading blocks, including kept ones, whose copies have all begun
    parts: list[Completion] = field(default_factory=list)
    taking: asyncio.Task[list[int]] | None = None  # used by the event loop


@dataclass(slots=True)
class Filling:
    """The blocks of one job that a pass fills: `begin` (inclusive) to `end` (exclusive)."""

    ahead: Ahead
    blocks: Sequence[int]
    begin: int
    end: int
    layers: int = 0  # layers whose copies have begun

    def copy(self, layers: int, begin: BeginPart) -> int:
        """Begin the copies of the first `layers` layers. Returns the number of layers whose copies were begun."""
        ahead = self.ahead
        if ahead.fresh is None:
            return 0
        if ahead.copied < self.begin:  # filled by earlier passes, before blocks of the pool were leased
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
    """The copies of one pass, begun as its layers are computed."""

    def __init__(self, fillings: Sequence[Filling], begin: BeginPart, geometry: KvGeometry) -> None:
        self._fillings = fillings
        self._begin = begin
        self._layers = geometry.layers
        blocks = sum(filling.end - filling.begin for filling in fillings)
        self._group = layers_of_a_copy(geometry.layers, blocks * geometry.block_bytes // geometry.layers)
        self._next = 0
        self.layers = 0  # layers copied ahead, summed over all jobs

    def on_layer(self, layer: int) -> None:
        """Called when the work that writes this layer's KV has been submitted."""
        if layer != self._next:
            self._next = -1  # the model computes layers in another order: copy no more ahead
            return
        self._next += 1
        if self._next % self._group == 0 or self._next == self._layers:
            self.layers += sum(filling.copy(self._next, self._begin) for filling in self._fillings)

    def end(self) -> None:
        """Called when the pass has succeeded."""
        for filling in self._fillings:
            if filling.layers == self._layers:
                filling.ahead.copied = filling.end


class Layerwise:
    """Decides for the compute thread which jobs are copied ahead, and how."""

    def __init__(
        self,
        tokens: int,
        geometry: KvGeometry,
        prepare: Callable[[Ahead], None],
        begin: BeginPart,
        abandon: Callable[[Ahead], None],
    ) -> None:
        """Applies to jobs with at least `tokens` tokens to compute.

        `prepare` tells the event loop to lease blocks of the pool; `abandon` tells it that the job was given up.
        """
        self.tokens = tokens
        self.layers_ahead = 0
        self._geometry = geometry
        self._prepare, self._begin, self.abandon = prepare, begin, abandon

    def show_metrics(self, page: Page) -> None:
        meaning = "layers copied while later ones were computed (prefill.layerwise_tokens)"
        page.counter("prefill_offload_ahead_layers_total", meaning, self.layers_ahead)

    def open(self, lead: RequestKey, tokens: int, computed: int, kept: int) -> Ahead | None:
        """Begin for a job of `tokens` tokens that starts now; None if it is not copied ahead.

        `computed` of its tokens came from the pool, and `kept` of their blocks stay where they are.
        """
        if tokens - computed < self.tokens:
            return None
        ahead = Ahead(lead, kept, -(-tokens // self._geometry.block_size) - kept, copied=kept)
        self._prepare(ahead)
        return ahead

    def filling(self, ahead: Ahead, blocks: Sequence[int], start: int, end: int, *, last: bool) -> Filling:
        """The blocks that a chunk of tokens `start` to `end` fills. `last`: it is the last chunk of the job."""
        size = self._geometry.block_size
        return Filling(ahead, blocks, start // size, len(blocks) if last else end // size)

    def watch(self, fillings: Sequence[Filling]) -> PassCopies:
        return PassCopies(fillings, self._begin, self._geometry)
