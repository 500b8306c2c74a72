"""An answer as its client sees it: tokens turned into text, cut at a stop string, with logprobs and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.gateway.calls import Answer, Delta
from alignedserve.gateway.planning import CallPlan, ServedModel
from alignedserve.request import FinishReason, TokenLogprobs
from alignedserve.text import IncrementalDetokenizer, StoppableText, Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability (None for a prompt's first) and where its text begins in the answer's."""

    token_id: int
    offset: int
    logprob: TokenLogprobs | None


@dataclass(slots=True)
class Part:
    """What is new of one answer. `scored` is None unless log-probabilities were asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] | None = None
    finish: FinishReason | None = None


class AnswerView:
    """Turns an answer's deltas into parts. With echo, the first part begins with the prompt."""

    def __init__(self, answer: Answer, plan: CallPlan, tokenizer: Tokenizer | None) -> None:
        sampling, prompt = answer.sampling, answer.prompt
        self.answer = answer
        self.parts = 0
        self.tokens = 0  # that the client got
        self.finish: FinishReason | None = None
        self._tokenizer = tokenizer
        self._drop_tokens = plan.scored_only
        self._scored = sampling.logprobs is not None
        self._length = 0
        self._echo = plan.reply.echo
        self._ends = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else sampling.eos_token_ids)
        self._text: StoppableText | None = None
        if tokenizer is not None:
            self._text = StoppableText(tokenizer, sampling.stop, prompt.token_ids, sampling.min_tokens)

    def push(self, delta: Delta, prompt_logprobs: Sequence[TokenLogprobs] = ()) -> Part:
        """The next part; `prompt_logprobs` (from the prompt's second token on) are wanted with the first one."""
        part = Part(scored=[] if self._scored else None)
        if self._echo:
            self._echo = False
            self._push_prompt(part, prompt_logprobs)
        if self._drop_tokens:
            self.finish = part.finish = FinishReason.LENGTH if delta.finish is not None else None
        else:
            self._push_tokens(part, delta)
        self.parts += 1
        self.tokens += len(part.token_ids)
        return part

    def _push_tokens(self, part: Part, delta: Delta) -> None:
        texts: list[str] = []
        last = len(delta.token_ids) - 1
        for number, token in enumerate(delta.token_ids):
            part.token_ids.append(token)
            if part.scored is not None:
                logprob = delta.logprobs[number] if number < len(delta.logprobs) else None
                part.scored.append(ScoredToken(token, self._length, logprob))
            if self._text is None or (number == last and delta.finish is FinishReason.STOP and token in self._ends):
                continue
            texts.append(self._text.push(token))
            self._length = self._prompt_length + self._text.length
            if self._text.stopped:
                self.finish = FinishReason.STOP
                break
        if self.finish is None and delta.finish is not None:
            self.finish = delta.finish
            if self._text is not None:
                texts.append(self._text.finish())
        part.text += "".join(texts)
        part.finish = self.finish

    @property
    def _prompt_length(self) -> int:
        return self._prompt_characters

    def _push_prompt(self, part: Part, logprobs: Sequence[TokenLogprobs]) -> None:
        return


def prompt_text(tokens: Sequence[int], text: str | None, tokenizer: Tokenizer | None) -> str:
    """A prompt as it is echoed: as the client wrote it, or decoded from the token ids that it sent."""
    if text is not None:
        return text
    return "" if tokenizer is None else tokenizer.decode(tokens)
