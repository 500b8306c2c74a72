"""The contract of what computes decode iterations: one is launched, and its tokens are asked for later.

Between the two the caller may launch the next, in which a request's last token need not be known to the host yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.engine.sampling.sampler import SampledToken, SampleRow
from alignedserve.metrics import Page


@dataclass(slots=True)  # frozen ones take twice as long to make, and there is one a request and iteration
class DecodeItem:
    """One request's part of an iteration: its last token, at position `kv_tokens`, whose KV is computed here.

    `token_id` None: the token that the step before this one chooses for its item `previous`. `position` is the place in
    the answer of the token to be chosen: `len(row.output_token_ids)`, and one more where the last is not known yet.
    `block_ids` are the scheduler's own book: to be read in `launch` only. A book grows at its end and nowhere else; who
    comes back after an eviction has another.
    """

    row: SampleRow
    token_id: int | None
    previous: int
    kv_tokens: int
    block_ids: Sequence[int]
    position: int


class DecodeStep(ABC):
    """An iteration that was launched."""

    @abstractmethod
    def tokens(self) -> list[SampledToken | Exception]:
        """Each item's token, or why there is none for it. Waits for the device; called once.

        Raises whatever made the whole iteration fail: then none of its items has a token.
        """


class DecodeEngine(ABC):
    """Computes iterations over one store, in the order in which they are launched. One thread calls it."""

    @property
    @abstractmethod
    def overlaps(self) -> bool:
        """Whether `launch` returns before the device is done, so that it is worth launching ahead."""

    @abstractmethod
    def ahead(self, rows: Sequence[SampleRow]) -> bool:
        """Whether the step after one of these rows can be launched before its tokens are known to the host.

        No: where a row's choice needs them there (penalties, a bias, a minimum length not reached, log-probabilities).
        """

    @abstractmethod
    def launch(self, items: Sequence[DecodeItem]) -> DecodeStep:
        """Begin an iteration. Items with no token need a step before this one that was launched and did not fail.

        Never raises for what an iteration may fail by: `tokens` does. Copies that this thread asks for afterwards come
        after it on the device.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Compute what is slow the first time, over block 0, whose content is lost."""

    def device_fault(self) -> Exception | None:
        """What keeps this process from computing on its device ever again; None where the next iteration may go well.

        To be asked when an iteration has failed as a whole.
        """
        return None

    @property
    def graph_memory_bytes(self) -> int:
        """What graphs and their buffers take on the device; 0 without graphs."""
        return 0

    def show_metrics(self, page: Page) -> None:  # noqa: B027
        """What this kind of engine counts. Any thread may ask."""
