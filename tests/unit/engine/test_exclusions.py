"""Excluded tokens: those of transformers' and vLLM's own rules, in any batch, wherever a request is taken over."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from alignedserve.engine.sampling.exclusions import Exclusions
from alignedserve.engine.sampling.sampler import Sampler, SampleRow
from alignedserve.errors import InvalidRequestError
from alignedserve.request import SamplingParams

VOCAB, MOST = 9, 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=20)
FEW = st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple)
WORDS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4).map(tuple), max_size=4).map(tuple)


def kept(logits: torch.Tensor) -> set[int]:
    return set(torch.isfinite(logits).nonzero().flatten().tolist())


def ours(prompt: Sequence[int], output: Sequence[int], **options: Any) -> set[int]:
    logits = torch.zeros(VOCAB)
    Exclusions(SamplingParams(max_tokens=MOST, **options), prompt).apply(logits, output)
    return kept(logits)


def of_transformers(prompt: Sequence[int], output: Sequence[int], options: dict[str, Any]) -> set[int]:
    """As `generate` lists its processors; of forced tokens, which replace all others, only those."""
    processors, bos = LogitsProcessorList(), options["forced_bos_token_id"]
    if size := options["no_repeat_ngram_size"]:
        processors.append(NoRepeatNGramLogitsProcessor(size))
    if words := options["bad_words_ids"]:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in words]))
    if options["suppress_tokens"]:
        processors.append(SuppressTokensLogitsProcessor(options["suppress_tokens"]))
    if options["begin_suppress_tokens"]:
        begin = len(prompt) if len(prompt) > 1 or not bos else len(prompt) + 1
        processors.append(SuppressTokensAtBeginLogitsProcessor(options["begin_suppress_tokens"], begin))
    forced = LogitsProcessorList()
    if bos:
        forced.append(ForcedBOSTokenLogitsProcessor(bos[0]))
    if options["forced_eos_token_id"]:
        forced.append(ForcedEOSTokenLogitsProcessor(len(prompt) + MOST, list(options["forced_eos_token_id"])))
    ids, scores = torch.tensor([[*prompt, *output]]), torch.ones(1, VOCAB)
    found = forced(ids, scores)
    return kept((found if not torch.equal(found, scores) else processors(ids, scores))[0])


@settings(max_examples=150, deadline=None)
@given(
    prompt=TOKENS.filter(bool),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=MOST - 1),
    options=st.fixed_dictionaries(
        {
            "no_repeat_ngram_size": st.integers(0, 4),
            "bad_words_ids": WORDS,
            "suppress_tokens": FEW,
            "begin_suppress_tokens": FEW,
            "forced_bos_token_id": st.sampled_from([(), (3,)]),
            "forced_eos_token_id": FEW,
        }
    ),
)
def test_what_may_follow_is_what_may_follow_in_transformers(
    prompt: list[int], output: list[int], options: dict[str, Any]
) -> None:
    assert ours(prompt, output, **options) == of_transformers(prompt, output, options)


@settings(max_examples=100, deadline=None)
@given(prompt=TOKENS, output=st.lists(st.integers(0, VOCAB - 1), max_size=MOST), words=WORDS, allowed=FEW)
def test_bad_words_and_allowed_tokens_are_those_of_vllm(
    prompt: list[int], output: list[int], words: tuple[tuple[int, ...], ...], allowed: tuple[int, ...]
) -> None:
    """A word ends with a token that is forbidden after the word's other tokens, in the answer alone."""
    bad = {word[-1] for word in words if tuple(output[len(output) - len(word) + 1 :]) == word[:-1] or len(word) == 1}
    expected = (set(allowed) if allowed else set(range(VOCAB))) - bad
    assert ours(prompt, output, bad_words=words, allowed_token_ids=allowed) == expected


@settings(max_examples=60, deadline=None)
@given(prompt=TOKENS, output=TOKENS, size=st.integers(1, 4), words=WORDS)
def test_state_that_followed_an_answer_equals_state_made_for_it_anew(
    prompt: list[int], output: list[int], size: int, words: tuple[tuple[int, ...], ...]
) -> None:
    sampling = SamplingParams(max_tokens=99, no_repeat_ngram_size=size, bad_words=words, bad_words_ids=words)
    kept_on = Exclusions(sampling, prompt)
    for count in range(len(output) + 1):
        followed, anew = torch.zeros(VOCAB), torch.zeros(VOCAB)
        kept_on.apply(followed, output[:count])
        Exclusions(sampling, prompt).apply(anew, output[:count])
        assert torch.equal(followed, anew)


def test_long_n_grams_in_a_prompt_that_repeats_one_token_take_no_time() -> None:
    exclusions = Exclusions(SamplingParams(max_tokens=50, no_repeat_ngram_size=5000), [3] * 10_000)
    began_s = time.thread_time()
    for count in range(20):
        logits = torch.zeros(VOCAB)
        exclusions.apply(logits, [3] * count)
        assert kept(logits) == set(range(VOCAB)) - {3}
    assert time.thread_time() - began_s < 1


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"allowed_token_ids": (3, 5, 7, 11), "seed": 1},
    {"bad_words": ((4,), (3, 3)), "allowed_token_ids": (3, 4, 5), "seed": 2},
    {"no_repeat_ngram_size": 2, "temperature": 0.0},
    {"suppress_tokens": tuple(range(50)), "begin_suppress_tokens": tuple(range(50, 60)), "top_k": 5, "seed": 3},
    {"forced_eos_token_id": (2,), "top_p": 0.7, "seed": 4},
    {"temperature": 1.0, "seed": 5},
)


def test_a_row_gets_the_same_tokens_alone_and_in_a_batch() -> None:
    draw, vocab = torch.Generator().manual_seed(3), 64

    def rows() -> list[SampleRow]:
        return [SampleRow(SamplingParams(max_tokens=8, **options), [1, 2, 3], []) for options in SAMPLINGS]

    together, alone = rows(), rows()
    for _ in range(8):
        logits = torch.randn(len(SAMPLINGS), vocab, generator=draw) * 2
        for row, token in zip(together, Sampler().sample(logits, together), strict=True):
            row.output_token_ids.append(token.token_id)  # type: ignore[attr-defined]
        for number, row in enumerate(alone):
            (token,) = Sampler().sample(logits[number : number + 1], [row])
            row.output_token_ids.append(token.token_id)  # type: ignore[attr-defined]
    answers = [list(row.output_token_ids) for row in together]
    assert answers == [list(row.output_token_ids) for row in alone]
    assert set(answers[0]) <= {3, 5, 7, 11}
    assert set(answers[1]) <= {3, 5}
    assert all(pair != (3, 3) for pair in zip(answers[1], answers[1][1:], strict=False))
    assert min(answers[3]) >= 50
    assert answers[3][0] >= 60
    assert answers[4][-1] == 2


def test_a_request_whose_options_leave_no_token_fails_and_says_why() -> None:
    row = SampleRow(SamplingParams(max_tokens=8, allowed_token_ids=(3,), suppress_tokens=(3,)), [1], [])
    with pytest.raises(InvalidRequestError, match="exclude all"):
        Sampler().sample(torch.randn(1, VOCAB), [row])


def test_a_forced_end_keeps_to_the_allowed_tokens_of_a_client() -> None:
    ends, last = {"forced_eos_token_id": (2,)}, [0] * (MOST - 1)
    assert ours([1], last, **ends) == {2}
    assert ours([1], last, allowed_token_ids=(3, 4), **ends) == {3, 4}
    assert ours([1], last[:-1], **ends) == set(range(VOCAB))


def test_rows_adjust_only_where_something_may_be_excluded() -> None:
    def adjusts(outputs: int, **options: Any) -> bool:
        return SampleRow(SamplingParams(max_tokens=9, **options), [1], [2] * outputs).adjusts

    assert not adjusts(0)
    assert adjusts(5, no_repeat_ngram_size=3)
    assert (adjusts(0, begin_suppress_tokens=(1,)), adjusts(1, begin_suppress_tokens=(1,))) == (True, False)


def test_long_prompts_are_searched_for_their_ngrams() -> None:
    draw = random.Random(4)
    prompt = [draw.randrange(20) for _ in range(3000)]
    sampling = SamplingParams(max_tokens=9, no_repeat_ngram_size=3)
    logits = torch.zeros(20)
    Exclusions(sampling, prompt).apply(logits, [7, 8])
    expected = {c for a, b, c in zip(prompt, prompt[1:], prompt[2:], strict=False) if (a, b) == (7, 8)}
    assert set(torch.isneginf(logits).nonzero().flatten().tolist()) == expected
    assert expected


def test_log_probabilities_of_listed_tokens_are_in_their_order() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    listed = SamplingParams(temperature=0.0, logprobs=3, logprob_token_ids=(7, 2, 29))
    rows = [SampleRow(listed, [1], []), SampleRow(SamplingParams(temperature=0.0, logprobs=2), [1], [])]
    first, second = Sampler().sample(logits, rows)
    truth = torch.log_softmax(logits, dim=-1)
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert [token for token, _ in first.logprobs.top] == [7, 2, 29]
    assert [value for _, value in first.logprobs.top] == pytest.approx(truth[0, [7, 2, 29]].tolist())
    assert first.logprobs.logprob == pytest.approx(float(truth[0].max()))
    assert [token for token, _ in second.logprobs.top] == truth[1].topk(2).indices.tolist()
