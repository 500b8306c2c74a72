"""`best_of`: which of the answers to a prompt are returned."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.gateway.body.planning import CallPlan
from alignedserve.gateway.reply.answers import AnswerView


def best_views(views: Sequence[AnswerView], plan: CallPlan) -> list[AnswerView]:
    """The views that are returned: all, or for each prompt those with the highest log-probability a token.

    Of equal ones the first are returned, and the best comes first.
    """
    best = plan.reply.best
    if best is None:
        return list(views)
    groups = (views[at : at + plan.n] for at in range(0, len(views), plan.n))
    return [view for group in groups for view in sorted(group, key=_logprob_a_token, reverse=True)[:best]]


def _logprob_a_token(view: AnswerView) -> float:
    return view.logprob_sum / max(1, view.tokens)
