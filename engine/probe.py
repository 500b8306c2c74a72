"""The start-up probe: a few tokens through paged attention, against the model's own attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alignedserve.engine.loader import LoadedModel


def probe(loaded: LoadedModel) -> None:
    """Raises UnsupportedModelError unless paged attention gives the model's own logits."""
