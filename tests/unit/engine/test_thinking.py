"""A budget of reasoning in the sampler: the end is forced, drawn or greedy, with a grammar or without, and resumed."""

from __future__ import annotations

import json

import pytest
import torch

from alignedserve.control.convert import sampling_from_proto, sampling_to_proto
from alignedserve.engine.live import LiveRequest
from alignedserve.engine.sampling.sampler import Sampler
from alignedserve.gateway.dialects.composing import AnswerForm, grammar_of
from alignedserve.gateway.dialects.families import REASONING
from alignedserve.gateway.dialects.model_dialects import ModelDialects
from alignedserve.grammar.compiled import Grammars
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason, GrammarKind, GrammarSpec, RequestKey, RequestSpec, SamplingParams
from alignedserve.text import Tokenizer
from alignedserve.thinking import ThinkingLimit

VOCAB_SIZE, EOS, BUDGET = 2048, 0, 12
TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
assert TOKENIZER is not None
CLOSE = tuple(TOKENIZER.encode("</think>"))
LIMIT = ThinkingLimit(BUDGET, (), CLOSE, begun=True)
WORD = GrammarSpec(GrammarKind.CHOICE, json.dumps(["yes", "no"]))


def write(sampling: SamplingParams, output: list[int]) -> tuple[list[int], FinishReason | None]:
    """Goes on after `output` until the answer ends or has 60 tokens. Logits depend on the position alone."""
    assert TOKENIZER is not None
    grammars = Grammars.of(TOKENIZER, VOCAB_SIZE)
    live = LiveRequest(RequestSpec(RequestKey("a"), [5], sampling, list(output)), TOKENIZER, grammars)
    tokens = live.spec.output_token_ids
    while len(tokens) < 60:
        random = torch.Generator().manual_seed(len(tokens))
        logits = torch.randn(1, VOCAB_SIZE, generator=random) * 3
        logits[0, EOS] = -50.0
        (chosen,) = Sampler().sample(logits, [live.row])
        if (finish := live.push(chosen)) is not None:
            return tokens, finish
    return tokens, None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bound", [False, True])
def test_reasoning_ends_when_its_budget_is_spent(temperature: float, bound: bool) -> None:
    form = AnswerForm(WORD, begun=True)
    grammar = grammar_of(form, ModelDialects(reasoning=REASONING["qwen3"])) if bound else None
    sampling = SamplingParams(
        temperature=temperature, seed=3, max_tokens=100, eos_token_ids=(EOS,), grammar=grammar, thinking=LIMIT
    )
    assert sampling_from_proto(sampling_to_proto(sampling)) == sampling
    tokens, finish = write(sampling, [])
    assert tuple(tokens[BUDGET : BUDGET + len(CLOSE)]) == CLOSE
    for cut in (1, BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + len(CLOSE)):
        assert write(sampling, tokens[:cut]) == (tokens, finish)
    if bound:
        assert TOKENIZER is not None
        assert finish is FinishReason.STOP
        assert TOKENIZER.decode(tokens).partition("</think>")[2].strip("\n") in ("yes", "no")


def test_reasoning_that_ends_in_time_is_not_cut() -> None:
    begun = [65, *CLOSE]
    tokens, _ = write(SamplingParams(temperature=0.0, max_tokens=100, thinking=LIMIT), begun)
    assert tuple(tokens[BUDGET : BUDGET + len(CLOSE)]) != CLOSE
