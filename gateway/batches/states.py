"""The states of a batch, and which may follow which."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from alignedserve.errors import AccountingError


class BatchStatus(enum.StrEnum):
    """OpenAI's states of a batch. Each has a timestamp `<status>_at`."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # every line is answered, or the completion window has passed
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"  # the input file is not valid; no line was answered

    @property
    def ended(self) -> bool:
        return not NEXT[self]


NEXT: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset({BatchStatus.IN_PROGRESS, BatchStatus.FAILED, BatchStatus.CANCELLING}),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING}),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.EXPIRED}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
    BatchStatus.FAILED: frozenset(),
}
OPEN = tuple(status for status in BatchStatus if not status.ended)


def check_move(old: BatchStatus, new: BatchStatus) -> None:
    """Raises AccountingError if `new` may not follow `old`."""
    if new not in NEXT[old]:
        raise AccountingError(f"a batch cannot change from {old} to {new}")
