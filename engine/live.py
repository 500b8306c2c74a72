"""A request while a worker generates for it: its tokens, the sampler's view of them, and its end."""

from __future__ import annotations

from alignedserve.engine.sampling.sampler import SampledToken, SampleRow
from alignedserve.errors import GrammarError
from alignedserve.grammar.compiled import Grammars
from alignedserve.request import FinishReason, RequestKey, RequestSpec
from alignedserve.text import StopChecker, Tokenizer


class LiveRequest:
    """Wraps a `RequestSpec`, whose `output_token_ids` grow only here.

    `tokenizer` is needed for stop strings only, `grammars` for a grammar. Raises GrammarError.
    """

    __slots__ = ("_ends", "_stops", "row", "spec", "told_ns")

    def __init__(self, spec: RequestSpec, tokenizer: Tokenizer | None, grammars: Grammars | None = None) -> None:
        self.spec = spec
        self.told_ns = 0  # when the stage of which the gateway was told last had begun
        sampling = spec.sampling
        self.row = SampleRow(sampling, spec.prompt_token_ids, spec.output_token_ids)
        if sampling.grammar is not None:
            if grammars is None:
                raise GrammarError("this worker's model has no tokenizer: it has no structured output")
            self.row.grammar = grammars.row(sampling)
        self._ends = frozenset(sampling.end_token_ids)
        self._stops: StopChecker | None = None
        if sampling.stop and tokenizer is not None:
            self._stops = StopChecker(
                tokenizer,
                sampling.stop,
                spec.output_token_ids,
                spec.prompt_token_ids,
                sampling.min_tokens,
                skip_special=sampling.skip_special_tokens,
                spaces=sampling.spaces_between_special_tokens,
            )

    @property
    def key(self) -> RequestKey:
        return self.spec.key

    def push(self, sampled: SampledToken) -> FinishReason | None:
        """Append a token. Returns the finish reason if the request ends with it, else None."""
        spec = self.spec
        spec.output_token_ids.append(sampled.token_id)
        stopped = self._stops is not None and self._stops.push(sampled.token_id)
        token, count = sampled.token_id, len(spec.output_token_ids)
        if stopped or (token in self._ends and spec.sampling.ended_by(token, count)):
            return FinishReason.STOP
        if spec.remaining_tokens <= 0:
            return FinishReason.LENGTH
        return None
