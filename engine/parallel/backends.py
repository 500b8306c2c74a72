"""One attention backend for all ranks of an instance: one that each has proved, by the slowest rank's times."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch

from alignedserve.engine.backends.choice import BackendCandidate
from alignedserve.engine.parallel.group import RankGroup


def agreed(group: RankGroup, own: Sequence[BackendCandidate]) -> list[BackendCandidate]:
    """The candidates as all ranks have measured them: each time is the greatest of all ranks.

    A backend that some rank does not use is refused. All ranks call it, with the same names in
    the same order, and get the same, so that they choose the same. Raises RankLostError.
    """
    times = torch.tensor([_times(each) for each in own], dtype=torch.float64).flatten()
    ranks = group.concatenated(times).view(group.size, len(own), 2)
    found = []
    for candidate, of_ranks in zip(own, ranks.unbind(1), strict=True):
        decode_us, prefill_us = (float(each) for each in of_ranks.amax(0))
        refusing = of_ranks[:, 0].isinf().nonzero().flatten().tolist()
        if not refusing:
            found.append(BackendCandidate(candidate.name, None, decode_us, prefill_us))
        elif candidate.refusal is not None:
            found.append(candidate)
        else:
            ranks_text = ", ".join(map(str, refusing))
            found.append(BackendCandidate(candidate.name, f"it is not used in rank {ranks_text}"))
    return found


def _times(candidate: BackendCandidate) -> tuple[float, float]:
    """Infinite for one that is not used here."""
    if candidate.refusal is not None or candidate.decode_us is None or candidate.prefill_us is None:
        return inf, inf
    return candidate.decode_us, candidate.prefill_us
