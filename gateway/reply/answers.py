"""Converts an answer's tokens to what its client gets: text, cut at a stop string, with logprobs and offsets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from alignedserve.gateway.body.planning import CallPlan, PromptPlan
from alignedserve.gateway.dialects.pieces import CallArguments, CallStart, Content, Parser, Piece, Reasoning
from alignedserve.gateway.ledger.calls import Answer, Delta
from alignedserve.gateway.ledger.resume import Delivered
from alignedserve.request import FinishReason, TokenLogprobs
from alignedserve.text import IncrementalDetokenizer, MarkedText, StoppableText, Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, its log-probability (None for a prompt's first token) and its text's offset in the choice's text."""

    token_id: int
    offset: int
    logprob: TokenLogprobs | None


@dataclass(slots=True)
class Part:
    """The new part of one answer. `scored` is empty unless the client asked for log-probabilities.

    `pieces`: the same text, reasoning and calls in the order written, each token's score before what its text adds.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[CallStart | CallArguments] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    pieces: list[Piece | ScoredToken] = field(default_factory=list)
    finish: FinishReason | None = None

    def extend(self, other: Part) -> None:
        """Adds another part, but not its `pieces`: a whole reply that needs them reads them part by part."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.calls += other.calls
        self.token_ids += other.token_ids
        self.scored += other.scored
        self.finish = other.finish


class AnswerView:
    """Converts an answer's deltas to parts. With echo, the first part begins with the prompt."""

    def __init__(self, answer: Answer, plan: CallPlan, tokenizer: Tokenizer | None) -> None:
        sampling = answer.sampling
        self.answer = answer
        self.parts = 0
        self.tokens = 0  # number of tokens that the client has
        self.finish: FinishReason | None = None
        self.scored = sampling.logprobs is not None and plan.reply.scored
        self.logprob_sum = 0.0  # of the tokens that the client has, if log-probabilities are computed
        self.prompt_scores: Sequence[TokenLogprobs] = ()
        self._echo = plan.reply.echo
        self._wants_scores = plan.reply.prompt_logprobs is not None
        self._include_stop = plan.reply.include_stop
        self._alternatives = sampling.logprobs or 0
        self._scored_only = plan.scored_only
        self._tokenizer = tokenizer
        self._base = 0  # length of the echoed prompt in characters
        self._ends = frozenset(sampling.end_token_ids)
        self._text: StoppableText | MarkedText | None = None
        self.reasoning_tokens = 0  # of those that the client has
        self.called = False  # whether a tool call has begun
        self.silent = 0  # number of the last parts that said nothing
        self._arguments: list[str] = []  # of the last call
        self._reading = plan.reading
        self._parser: Parser | None = None
        if tokenizer is not None:
            prompt = answer.prompt.token_ids
            self._text = StoppableText.of(tokenizer, sampling, prompt, include_stop=self._include_stop)
            if self._reading is not None:
                markers = self._reading.dialects.markers if sampling.skip_special_tokens else {}
                self._text = MarkedText(self._text, markers)
                self._parser = self._reading.parser(f"{plan.id}/{answer.index}")
        if plan.resume:
            self._go_on(plan.resume[answer.index])

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether the next part needs the prompt's log-probabilities."""
        return (self._echo and self.scored) or self._wants_scores

    @property
    def calls_whole(self) -> bool:
        """Whether there are tool calls, and the last one is complete."""
        if not self.called:
            return False
        try:
            return isinstance(json.loads("".join(self._arguments)), dict)
        except (ValueError, RecursionError):
            return False

    @property
    def stop_string(self) -> str | None:
        """The client's stop string that ended the answer."""
        return None if self._text is None else self._text.stop

    def push(self, delta: Delta, prompt_logprobs: Sequence[TokenLogprobs] = ()) -> Part:
        """The next part. `prompt_logprobs` starts with the prompt's second token."""
        part = Part()
        if self._wants_scores:
            self._wants_scores, self.prompt_scores = False, prompt_logprobs
        if self._echo:
            self._echo = False
            self._push_prompt(part, prompt_logprobs)
        if self._scored_only:  # the token that was generated to score the prompt is not delivered
            self.finish = FinishReason.LENGTH if delta.finish is not None else None
        else:
            self._push_tokens(part, delta)
        part.finish = self.finish
        self.parts += 1
        self.tokens += len(part.token_ids)
        return part

    def _go_on(self, delivered: Delivered) -> None:
        """Restores the state after a part with these tokens: what text was delivered, and what text is held back."""
        tokens = delivered.token_ids
        self.tokens = len(tokens)
        self.finish = delivered.finish if delivered.told else None
        if self._text is not None:
            ended = delivered.finish is FinishReason.STOP and bool(tokens) and tokens[-1] in self._ends
            for token in tokens[:-1] if ended and not self._include_stop else tokens:
                self._take(Part(), self._text.push(token))

    def _push_prompt(self, part: Part, logprobs: Sequence[TokenLogprobs]) -> None:
        prompt = self.answer.prompt
        part.text = echoed_text(prompt, self._tokenizer)
        self._base = len(part.text)
        if self.scored:
            detokenizer = None if self._tokenizer is None else IncrementalDetokenizer(self._tokenizer)
            offset = 0
            for number, token in enumerate(prompt.token_ids):
                logprob = logprobs[number - 1].most(self._alternatives) if 0 < number <= len(logprobs) else None
                part.scored.append(ScoredToken(token, min(offset, self._base), logprob))
                offset += 0 if detokenizer is None else len(detokenizer.push(token))

    def _push_tokens(self, part: Part, delta: Delta) -> None:
        text = self._text
        last, ends_here = len(delta.token_ids) - 1, False
        for number, token in enumerate(delta.token_ids):
            part.token_ids.append(token)
            hidden, offset = self.hides, self._base + (0 if text is None else text.length)
            before = len(part.pieces)
            if number < len(delta.logprobs):
                self.logprob_sum += delta.logprobs[number].logprob
            ends_here = number == last and delta.finish is FinishReason.STOP and token in self._ends
            if text is not None and not (ends_here and not self._include_stop):
                self._take(part, text.push(token))
            if self.scored and not (hidden or self.hides):
                logprob = delta.logprobs[number] if number < len(delta.logprobs) else None
                part.scored.append(ScoredToken(token, offset, logprob))
                part.pieces.insert(before, part.scored[-1])
            if text is not None and text.stopped:
                self.finish = FinishReason.STOP
                self._end(part)
                return
        if delta.finish is not None:
            self.finish = delta.finish
            self._take(part, "" if text is None else text.finish(), token=False)
            self._end(part, whole=ends_here)

    @property
    def reads(self) -> bool:
        """Whether a parser divides the text."""
        return self._reading is not None

    @property
    def hides(self) -> bool:
        """Whether the answer is within reasoning that the reply leaves out."""
        reading, parser = self._reading, self._parser
        left_out = reading is not None and reading.separate_reasoning and not reading.include_reasoning
        return left_out and parser is not None and parser.reasoning

    def _take(self, part: Part, text: str, *, token: bool = True) -> None:
        """Adds the text of one token (or the rest of an answer) to the part."""
        if self._parser is None:
            part.text += text
            part.pieces += [Content(text)] if text else []
            return
        thinks = self._parser.reasoning
        pieces = self._parser.feed(text)
        if token and (thinks or self._parser.reasoning):
            self.reasoning_tokens += 1
        self._add(part, pieces)

    def _end(self, part: Part, *, whole: bool = False) -> None:
        """Adds what the parser held back. `whole`: the model ended the answer."""
        if self._parser is not None:
            self._add(part, self._parser.end_whole() if whole else self._parser.end())
            self._parser = None

    def _add(self, part: Part, pieces: list[Piece]) -> None:
        assert self._reading is not None
        shown: Iterable[Piece] = pieces
        if not self._reading.separate_reasoning:
            shown = (Content(piece.text) if isinstance(piece, Reasoning) else piece for piece in pieces)
        elif not self._reading.include_reasoning:
            shown = (piece for piece in pieces if not isinstance(piece, Reasoning))
        for piece in shown:
            part.pieces.append(piece)
            if isinstance(piece, Content):
                part.text += piece.text
            elif isinstance(piece, Reasoning):
                part.reasoning += piece.text
            else:
                self.called = True
                if isinstance(piece, CallStart):
                    self._arguments = []
                else:
                    self._arguments.append(piece.text)
                part.calls.append(piece)


def echoed_text(prompt: PromptPlan, tokenizer: Tokenizer | None) -> str:
    """A prompt's text for echo: as the client sent it, or decoded from token ids ("" without a tokenizer)."""
    if prompt.text is not None:
        return prompt.text
    return "" if tokenizer is None else tokenizer.decode(prompt.token_ids)
