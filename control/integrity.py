"""Integrity checks: each process recounts its own stores and state, and reports the results to the supervisor."""

from __future__ import annotations

import logging
from collections.abc import Callable

from alignedserve.control.metrics import StoreCount
from alignedserve.errors import AlignedServeError
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)


def check_books(
    name: str, instance: str, check: Callable[[], None], count: Callable[[], StoreCount] | None = None
) -> sv.BookCheck:
    """Runs `check`, which raises an error for inconsistent state. `count` returns the store's blocks by state, whose
    sum is checked too. The result has the problem, or "" if there is none.

    Call it in the thread that owns the state, so that the state does not change meanwhile.
    """
    found = sv.BookCheck(store=name, instance=instance)
    try:
        check()
        if count is not None:
            blocks = count()
            found.capacity_blocks, found.free_blocks = blocks.capacity, blocks.free
            found.owned_blocks, found.cached_blocks = blocks.owned, blocks.cached
            if blocks.free + blocks.owned + blocks.cached != blocks.capacity:
                found.problem = f"free + owned + cached is not {blocks.capacity}"
    except AlignedServeError as error:
        found.problem = error.message
    except Exception as error:  # the state is too inconsistent to be recounted
        logger.exception("%s of %s cannot be recounted", name, instance)
        found.problem = f"it cannot be recounted: {type(error).__name__}: {error}"
    if found.problem:
        logger.error("%s of %s is inconsistent: %s", name, instance, found.problem)
    return found
