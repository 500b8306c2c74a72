"""The contract of a decode engine: an iteration is launched, and its tokens are requested later.

Before that the caller may launch the next iteration, in which a request's last token need not be known to the host yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.engine.sampling.sampler import SampledToken, SampleRow
from alignedserve.metrics import Page


@dataclass(slots=True)  # frozen ones take twice as long to create, one per request and iteration
class DecodeItem:
    """One request's part of an iteration: its last token, at position `kv_tokens`, whose KV is computed here.

    `token_id` None: the token that the previous step chooses for its item `previous`. `position`: the place in the
    answer of the token to be chosen. It is `len(row.output_token_ids)`, plus one if the last token is not known yet.
    `rank`: which of the ranks that share experts computes it.
    `block_ids` is the scheduler's own list: read it in `launch` only. A list only grows at its end; after an eviction
    the request has another.
    """

    row: SampleRow
    token_id: int | None
    previous: int
    kv_tokens: int
    block_ids: Sequence[int]
    position: int
    rank: int = 0


class DecodeStep(ABC):
    """An iteration that was launched."""

    @abstractmethod
    def tokens(self) -> list[SampledToken | Exception]:
        """Each item's token, or the error for which it has none. Waits for the device; called once.

        Raises the error if the whole iteration failed: then none of its items has a token.
        """


class DecodeEngine(ABC):
    """Computes iterations over one store, in the order in which they are launched. One thread calls it."""

    @property
    @abstractmethod
    def overlaps(self) -> bool:
        """Whether `launch` returns before the device is done, so that launching ahead is worthwhile."""

    @property
    def depth(self) -> int:
        """How many iterations are computed at the same time, of disjoint requests: one in each stage of a pipeline."""
        return 1

    @abstractmethod
    def ahead(self, rows: Sequence[SampleRow]) -> bool:
        """Whether the step after one with these rows can be launched before its tokens are known to the host.

        False if a row's choice needs them there (penalties, a bias, a minimum length not reached, log-probabilities).
        A row under a grammar alone does not: its choice is delayed until the mask is filled, from the tokens that are
        known when the following step is launched.
        """

    @abstractmethod
    def launch(self, items: Sequence[DecodeItem]) -> DecodeStep:
        """Begin an iteration. Items without a token need a previous step that was launched and did not fail.

        Never raises the errors of an iteration: `tokens` does. Copies that this thread requests afterwards follow it on
        the device.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Run what is slow the first time, over block 0, whose content is lost."""

    def device_fault(self) -> Exception | None:
        """The error that permanently keeps this process from using its device; None if the next iteration may succeed.

        To be called when an iteration has failed as a whole.
        """
        return None

    @property
    def graph_memory_bytes(self) -> int:
        """What graphs and their buffers take on the device; 0 without graphs."""
        return 0

    def show_metrics(self, page: Page) -> None:  # noqa: B027
        """What this kind of engine counts. Any thread may ask."""
