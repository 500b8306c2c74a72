"""Sampling: order of processing, reproducibility in any batch, distributions, log-probabilities."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from alignedserve.engine.sampling.noise import exponential_noise, row_keys
from alignedserve.engine.sampling.penalties import PenaltyState
from alignedserve.engine.sampling.sampler import SampledToken, Sampler, SampleRow
from alignedserve.errors import NumericsError
from alignedserve.request import SamplingParams

VOCAB = 3000


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=100, **sampling), prompt or [], output or [])


def tokens(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [token.token_id for token in Sampler().sample(logits, rows)]


def only(values: dict[int, float], vocab: int = 10) -> torch.Tensor:
    """One row of logits: `values`, and 0 elsewhere."""
    logits = torch.zeros(1, vocab)
    for token, value in values.items():
        logits[0, token] = value
    return logits


def test_no_rows_give_no_tokens() -> None:
    assert Sampler().sample(torch.empty(0, 5), []) == []


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 1}])
def test_greedy_takes_the_largest(sampling: dict[str, Any]) -> None:
    logits = logits_of(5)
    assert tokens(logits, [row(**sampling) for _ in range(5)]) == logits.argmax(-1).tolist()


def test_logits_are_left_as_they_are() -> None:
    logits = logits_of(3)
    before = logits.clone()
    tokens(logits, [row(logit_bias=((3, 5.0),)), row(repetition_penalty=1.5, prompt=[1]), row(top_p=0.5)])
    assert torch.equal(logits, before)


def test_logit_bias_moves_the_choice() -> None:
    assert tokens(only({3: 1.0}), [row(temperature=0.0, logit_bias=((7, 2.0), (3, -5.0)))]) == [7]


@pytest.mark.parametrize(
    ("prompt", "output", "sampling", "chosen"),
    [
        ([3], [], {"repetition_penalty": 2.0}, 5),  # a positive logit is divided, also for prompt tokens
        ([], [3], {"repetition_penalty": 2.0}, 5),
        ([3], [], {"presence_penalty": 2.0, "frequency_penalty": 2.0}, 3),  # these count the output alone
        ([], [3], {"presence_penalty": 1.5}, 5),
        ([], [3, 3], {"frequency_penalty": 0.7}, 5),
        ([], [3], {"frequency_penalty": 0.7}, 3),
        ([], [3, 3, 3], {"presence_penalty": 0.9}, 3),  # once, however often
    ],
)
def test_penalties(prompt: list[int], output: list[int], sampling: dict[str, Any], chosen: int) -> None:
    logits = only({3: 4.0, 5: 3.0})
    assert tokens(logits, [row(prompt, output, temperature=0.0, **sampling)]) == [chosen]


def test_repetition_penalty_makes_a_negative_logit_smaller() -> None:
    logits = torch.full((1, 3), -1.0)
    logits[0, 1] = -0.9
    assert tokens(logits, [row([1], temperature=0.0, repetition_penalty=1.5)]) == [0]


def test_penalty_state_that_is_kept_equals_one_built_anew() -> None:
    draw = random.Random(1)
    prompt = [draw.randrange(VOCAB) for _ in range(50)]
    kept = PenaltyState(prompt)
    output: list[int] = []
    sampling = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    for _ in range(200):
        output.append(draw.randrange(VOCAB))
        kept.update(output)
    anew = PenaltyState(prompt)
    anew.update(output)
    first, second = logits_of(1)[0], logits_of(1)[0]
    kept.apply(first, sampling)
    anew.apply(second, sampling)
    assert torch.equal(first, second)
    changed = (first != logits_of(1)[0]).nonzero().flatten().tolist()
    assert set(changed) == {*prompt, *output}


def test_min_tokens_hides_end_and_stop_tokens_until_then() -> None:
    logits = only({2: 9.0, 4: 8.0, 6: 7.0})
    sampling = {"temperature": 0.0, "min_tokens": 2, "eos_token_ids": (2,), "stop_token_ids": (4, 99)}
    assert tokens(logits, [row([], [1], **sampling)]) == [6]
    assert tokens(logits, [row([], [1, 1], **sampling)]) == [2]
    assert tokens(logits, [row([], [1], ignore_eos=True, **sampling)]) == [6]


def frequencies(logits: torch.Tensor, count: int = 20_000, **sampling: Any) -> torch.Tensor:
    rows = [row(seed=seed, **sampling) for seed in range(count)]
    found = torch.tensor(tokens(logits.expand(count, -1), rows))
    return torch.bincount(found, minlength=logits.shape[1]) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = logits_of(1, 12, seed=3)
    expected = torch.softmax(logits[0] / temperature, -1)
    assert (frequencies(logits, temperature=temperature) - expected).abs().max() < 0.015


def test_draws_at_successive_positions_follow_the_softmax() -> None:
    logits = logits_of(1, 12, seed=3)
    rows = [row(output=[0] * position, seed=5) for position in range(4000)]
    found = torch.bincount(torch.tensor(tokens(logits.expand(4000, -1), rows)), minlength=12) / 4000
    assert (found - torch.softmax(logits[0], -1)).abs().max() < 0.03


def filtered(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The definition: top_k, then top_p of the rest, then min_p, over sorted probabilities."""
    probabilities = torch.softmax(logits[0].double(), -1)
    order = probabilities.argsort(descending=True)
    if top_k:
        probabilities[order[top_k:]] = 0.0
        probabilities /= probabilities.sum()
    cumulative = probabilities[order].cumsum(-1)
    probabilities[order[cumulative - probabilities[order] >= top_p]] = 0.0
    probabilities[probabilities < min_p * probabilities.max()] = 0.0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(3, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (5, 0.8, 0.0), (6, 0.95, 0.1), (0, 0.01, 0.0), (50, 1.0, 0.0)],
)
def test_filters_leave_what_the_textbook_leaves(top_k: int, top_p: float, min_p: float) -> None:
    logits = logits_of(1, 12, seed=4)
    expected = filtered(logits, top_k, top_p, min_p)
    found = frequencies(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(found.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())
    assert (found - expected).abs().max() < 0.015


def test_top_p_over_more_tokens_than_are_looked_at_first() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :1500] = 0.5  # 1,500 likely tokens, tied; top_p = 0.5 keeps exactly these
    found = tokens(logits.expand(3000, -1), [row(seed=seed, top_p=0.5) for seed in range(3000)])
    assert max(found) < 1500
    assert len(set(found)) > 1100


def test_tokens_that_tie_with_the_last_kept_are_kept() -> None:
    logits = only({1: 5.0, 2: 4.0, 3: 4.0, 4: 4.0})
    found = {token for seed in range(300) for token in tokens(logits, [row(seed=seed, top_k=2)])}
    assert found == {1, 2, 3, 4}


MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"top_k": 2000, "top_p": 0.99},
    {"min_p": 0.02},
    {"top_p": 0.999, "temperature": 2.0},
    {"temperature": 0.9, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 0.0, "frequency_penalty": 1.0, "logprobs": 0},
]


def test_a_token_does_not_depend_on_its_batch() -> None:
    logits = logits_of(40, seed=8)
    draw = random.Random(2)
    rows = [row([1, 2], [draw.randrange(VOCAB)] * (i % 4), seed=i * 7919, **draw.choice(MIXTURE)) for i in range(40)]
    together = Sampler().sample(logits, rows)
    order = list(range(40))
    draw.shuffle(order)
    shuffled = Sampler().sample(logits[order], [rows[i] for i in order])
    assert [together[i] for i in order] == shuffled
    assert together == [Sampler().sample(logits[i : i + 1], [rows[i]])[0] for i in range(40)]


def test_a_token_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1, VOCAB)
    found = {tokens(logits, [row(output=[0] * position, seed=seed)])[0] for seed in range(10) for position in range(10)}
    assert len(found) > 90


def test_large_and_negative_seeds_are_taken() -> None:
    logits = logits_of(1)
    assert len({tokens(logits, [row(seed=seed, temperature=2.0)])[0] for seed in (2**64 - 1, 2**63, -1 << 40, 0)}) > 1


def test_tiny_temperature_is_greedy_and_finite() -> None:
    logits = logits_of(4)
    assert tokens(logits, [row(temperature=1e-30, seed=i) for i in range(4)]) == logits.argmax(-1).tolist()


def test_noise_is_exponential_and_uncorrelated() -> None:
    keys = torch.tensor([row_keys(seed, position) for seed in range(20) for position in range(20)], dtype=torch.int32)
    noise = exponential_noise(keys, torch.arange(500, dtype=torch.int32)[None])
    assert noise.min() > 0
    assert abs(float(noise.mean()) - 1.0) < 0.01
    assert abs(float(noise.var()) - 1.0) < 0.03
    centred = noise - 1.0
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(20, 0)):
        assert abs(float((centred * other).mean())) < 0.01
    assert abs(float((noise < 0.001).float().mean()) - 0.001) < 0.0003


def test_logprobs_are_the_models_own_whatever_changes_the_choice() -> None:
    logits = logits_of(2)
    expected = torch.log_softmax(logits, -1)
    sampled = Sampler().sample(
        logits, [row(temperature=0.0, logit_bias=((17, 100.0),), logprobs=4), row(temperature=0.3, logprobs=0, seed=1)]
    )
    first, second = sampled[0].logprobs, sampled[1].logprobs
    assert first is not None
    assert second is not None
    assert sampled[0].token_id == 17
    assert first.logprob == pytest.approx(float(expected[0, 17]), abs=1e-5)
    values, ids = expected[0].topk(4)
    assert [token for token, _ in first.top] == ids.tolist()
    assert [value for _, value in first.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert second.top == ()
    assert second.logprob == pytest.approx(float(expected[1, sampled[1].token_id]), abs=1e-5)


def test_prompt_logprobs() -> None:
    logits = logits_of(3)
    found = Sampler().prompt_logprobs(logits, [5, 6, 7], 2)
    expected = torch.log_softmax(logits, -1)
    assert [entry.logprob for entry in found] == pytest.approx([float(expected[i, 5 + i]) for i in range(3)], abs=1e-5)
    assert all(len(entry.top) == 2 for entry in found)
    assert Sampler().prompt_logprobs(torch.empty(0, 5), [], 2) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_their_rows(bad: float) -> None:
    logits = logits_of(4)
    logits[1, 5] = logits[3, 0] = bad
    with pytest.raises(NumericsError) as raised:
        Sampler().sample(logits, [row(temperature=0.0) for _ in range(4)])
    assert raised.value.rows == (1, 3)


def test_masked_vocabulary_is_no_error() -> None:
    logits = logits_of(1)
    logits[0, 100:] = float("-inf")
    assert Sampler().sample(logits, [row(temperature=0.0)]) == [SampledToken(int(logits[0].argmax()))]
    assert tokens(logits, [row(seed=3)])[0] < 100


def test_logits_all_minus_infinity_are_an_error() -> None:
    with pytest.raises(NumericsError):
        Sampler().sample(torch.full((1, 4), float("-inf")), [row(temperature=0.0)])
