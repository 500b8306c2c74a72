"""The eager decode engine: launching ahead gives the same tokens as one step at a time; failures of a step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.engine.decoding import DecodeItem, DecodeStep
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import SampledToken, SampleRow
from alignedserve.errors import AccountingError, NumericsError
from alignedserve.request import SamplingParams
from alignedserve.testing.models import VOCAB_SIZE, make_model

BLOCK_SIZE, BLOCKS, NEW_TOKENS = 8, 40, 12
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "seed": 6, "min_p": 0.02},
    {"temperature": 0.8, "seed": 7, "top_k": 9},
    {"temperature": 1.0, "seed": 8, "top_p": 0.7},
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_model("qwen3", tmp_path_factory.mktemp("model"), seed=1)
    return load_model(inspect_model("test", folder, "float32", "cpu"), "cpu")


@dataclass
class Served:
    row: SampleRow
    blocks: list[int]
    prompt: list[int]
    output: list[int] = field(default_factory=lambda: [3])

    def item(self, previous: int | None) -> DecodeItem:
        """Its next row; `previous`: its row in the running step, whose token is not known yet."""
        ahead = previous is not None
        position = len(self.output) + ahead
        kv_tokens = len(self.prompt) + position - 1
        return DecodeItem(self.row, None if ahead else self.output[-1], previous or 0, kv_tokens, self.blocks, position)


def prefilled(loaded: LoadedModel, settings: Sequence[dict[str, Any]] = SETTINGS) -> tuple[ModelRunner, list[Served]]:
    runner = ModelRunner(loaded, allocate_cache(loaded.info.geometry(BLOCK_SIZE), BLOCKS, "cpu"))
    draw, served = random.Random(3), []
    for number, options in enumerate(settings):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(5 + 4 * number)]
        blocks = list(range(6 * number, 6 * number + 6))
        output = [3]
        row = SampleRow(SamplingParams(max_tokens=100, **options), prompt, output)
        served.append(Served(row, blocks, prompt, output))
        runner.forward([ForwardItem(prompt, 0, blocks, "none")])
    return runner, served


def take(step: DecodeStep, served: Sequence[Served]) -> None:
    for one, token in zip(served, step.tokens(), strict=True):
        assert isinstance(token, SampledToken)
        one.output.append(token.token_id)


def one_at_a_time(loaded: LoadedModel) -> list[list[int]]:
    runner, served = prefilled(loaded)
    engine = EagerDecode(runner)
    assert not engine.overlaps
    for _ in range(NEW_TOKENS):
        take(engine.launch([one.item(None) for one in served]), served)
    return [one.output for one in served]


@pytest.mark.parametrize("overlaps", [None, True])
def test_tokens_launched_ahead_are_those_of_one_step_at_a_time(loaded: LoadedModel, overlaps: bool | None) -> None:
    """Every second step has the reverse order, so that `previous` must name the row."""
    runner, served = prefilled(loaded)
    engine = EagerDecode(runner, overlaps=overlaps)
    assert engine.overlaps == bool(overlaps)
    under_way = engine.launch([one.item(None) for one in served])
    order = list(range(len(served)))
    for _ in range(NEW_TOKENS - 1):
        following = order[::-1]
        step = engine.launch([served[number].item(order.index(number)) for number in following])
        take(under_way, [served[number] for number in order])
        under_way, order = step, following
    take(under_way, [served[number] for number in order])
    assert [one.output for one in served] == one_at_a_time(loaded)


def test_one_that_comes_in_runs_beside_those_whose_tokens_are_on_their_way(loaded: LoadedModel) -> None:
    runner, served = prefilled(loaded)
    engine = EagerDecode(runner, overlaps=True)
    first = engine.launch([one.item(None) for one in served[:2]])
    second = engine.launch([served[2].item(None), served[1].item(1), served[0].item(0)])
    take(first, served[:2])
    take(second, [served[2], served[1], served[0]])
    found = one_at_a_time(loaded)
    assert [one.output for one in served[:3]] == [found[0][:3], found[1][:3], found[2][:2]]


def test_rows_that_need_the_host_say_so(loaded: LoadedModel) -> None:
    engine = EagerDecode(prefilled(loaded)[0], overlaps=True)

    def row(outputs: int, **options: Any) -> SampleRow:
        return SampleRow(SamplingParams(max_tokens=9, **options), [1], [2] * outputs)

    assert engine.ahead([row(1, temperature=0.0), row(1, top_p=0.5), row(2, min_tokens=2, eos_token_ids=(4,))])
    needing = [{"logprobs": 0}, {"repetition_penalty": 1.2}, {"logit_bias": ((3, 1.0),)}, {"min_tokens": 2}]
    assert not any(engine.ahead([row(1), row(1, **options)]) for options in needing)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_row_without_finite_logits_fails_alone(loaded: LoadedModel, overlaps: bool) -> None:
    runner, served = prefilled(loaded)
    for block in served[1].blocks:
        runner.cache[block] = float("nan")
    engine = EagerDecode(runner, overlaps=overlaps)
    first = engine.launch([one.item(None) for one in served[:3]])
    second = engine.launch([one.item(number) for number, one in enumerate(served[:3])])
    found = one_at_a_time(loaded)
    for step in (first, second):
        bad = step.tokens()
        assert isinstance(bad[1], NumericsError)
        for number in (0, 2):
            token = bad[number]
            assert isinstance(token, SampledToken)
            served[number].output.append(token.token_id)
    assert [served[number].output for number in (0, 2)] == [found[number][:3] for number in (0, 2)]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_pass_that_fails_leaves_those_that_were_not_in_it(
    loaded: LoadedModel, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, served = prefilled(loaded)
    engine = EagerDecode(runner, overlaps=overlaps)

    def broken(items: Sequence[ForwardItem]) -> torch.Tensor:
        raise RuntimeError("the device says no")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", broken)
        failed = engine.launch([served[0].item(None)])
    following = engine.launch([served[0].item(0), served[1].item(None)])
    with pytest.raises(RuntimeError, match="the device says no"):
        failed.tokens()
    lost, token = following.tokens()
    assert isinstance(lost, RuntimeError)
    assert token == SampledToken(one_at_a_time(loaded)[1][1])


def test_a_token_of_no_step_is_a_bug(loaded: LoadedModel) -> None:
    runner, served = prefilled(loaded)
    with pytest.raises(AccountingError):
        EagerDecode(runner).launch([served[0].item(0)]).tokens()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_launched_ahead(tmp_path: Path) -> None:
    folder = make_model("qwen3", tmp_path, seed=1)
    loaded = load_model(inspect_model("test", folder, "float32", "cuda"), "cuda")
    runner = ModelRunner(loaded, allocate_cache(loaded.info.geometry(BLOCK_SIZE), BLOCKS, "cuda"))
    row = SampleRow(SamplingParams(max_tokens=100, temperature=0.0), [1] * 5, [3])
    tokens = []
    for ahead in (True, False):
        engine, output = EagerDecode(runner), [3]
        assert engine.overlaps
        runner.forward([ForwardItem([1] * 5, 0, [0, 1, 2], "none")])
        steps = []
        for position in range(1, 8):
            token = None if ahead and position > 1 else output[-1]
            steps.append(engine.launch([DecodeItem(row, token, 0, 4 + position, [0, 1, 2], position)]))
            if not ahead:
                output += [found.token_id for found in steps.pop().tokens() if isinstance(found, SampledToken)]
        output += [found.token_id for step in steps for found in step.tokens() if isinstance(found, SampledToken)]
        tokens.append(output)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 8
