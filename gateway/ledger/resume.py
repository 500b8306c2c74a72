"""Resumes a call after its connection broke: the tokens that its client already has count as generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.planning import CallPlan, ServedModel
from alignedserve.proto import inference_pb2 as inf
from alignedserve.request import FinishReason, SamplingParams
from alignedserve.text import StoppableText

_PARAM = "resume"


@dataclass(frozen=True, slots=True)
class Delivered:
    """The tokens of one answer that the client has. `finish`: the reason for which these tokens end the answer (None:
    they do not). `told`: whether the client knows it; the chunk with the finish reason may have been lost.
    """

    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    told: bool = False


def with_resume(plan: CallPlan, request: inf.GenerateRequest, model: ServedModel) -> CallPlan:
    """The plan, continued after the tokens in `request.resume`.

    Raises InvalidRequestError if these tokens cannot be the beginnings of the plan's answers.
    """
    if not request.resume:
        return plan
    if len(request.resume) != plan.answers:
        message = f"resume must have an entry for each of the {plan.answers} answers, got {len(request.resume)}"
        raise InvalidRequestError(message, param=_PARAM)
    if any(entry.token_ids for entry in request.resume) and not request.HasField("seed"):
        message = "resume needs the seed of the call that it resumes: the first chunk has it"
        raise InvalidRequestError(message, param="seed")
    info = model.require(None)
    delivered = []
    for index, entry in enumerate(request.resume):
        prompt = plan.prompts[index // plan.n]
        tokens = tuple(entry.token_ids)
        _check_tokens(tokens, prompt.sampling, info.vocab_size, f"resume[{index}]")
        told = _finish_reason(entry.finish_reason, f"resume[{index}]")
        finish = told or _ends(tokens, prompt.sampling, prompt.token_ids, model)
        delivered.append(Delivered(tokens, finish, told is not None))
    return replace(plan, resume=tuple(delivered))


def _check_tokens(tokens: Sequence[int], sampling: SamplingParams, vocab_size: int, where: str) -> None:
    if len(tokens) > sampling.max_tokens:
        message = f"{where} has {len(tokens)} tokens, more than max_tokens, {sampling.max_tokens}"
        raise InvalidRequestError(message, param=_PARAM)
    if tokens and max(tokens) >= vocab_size:
        message = f"{where}: token id {max(tokens)} is outside the vocabulary of {vocab_size}"
        raise InvalidRequestError(message, param=_PARAM)


def _finish_reason(word: str, where: str) -> FinishReason | None:
    if word and word not in (FinishReason.STOP, FinishReason.LENGTH):
        message = f'{where}: finish_reason must be "", "stop" or "length", got {word[:60]!r}'
        raise InvalidRequestError(message, param=_PARAM)
    return FinishReason(word) if word else None


def _ends(
    tokens: Sequence[int], sampling: SamplingParams, prompt: Sequence[int], model: ServedModel
) -> FinishReason | None:
    """The reason for which these tokens end their answer; None if they do not."""
    if tokens and sampling.ended_by(tokens[-1], len(tokens)):
        return FinishReason.STOP
    if sampling.stop and model.tokenizer is not None:
        text = StoppableText.of(model.tokenizer, sampling, prompt)
        for token in tokens:
            text.push(token)
        if text.stopped:
            return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= sampling.max_tokens else None
