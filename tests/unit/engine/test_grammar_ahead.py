"""Rows under a grammar are launched ahead with the others: their choice waits for the mask, and is the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.graphs.decode import GraphDecode
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import SampledToken, SampleRow
from alignedserve.errors import GrammarError
from alignedserve.grammar.base import Bits, Grammar, GrammarLibrary, Matcher
from alignedserve.grammar.compiled import Grammars
from alignedserve.request import GrammarKind, GrammarSpec, SamplingParams
from alignedserve.testing.models import make_model
from support.graph_twins import TwinDevice

VOCAB_SIZE, BLOCK_SIZE, BLOCKS, TOKENS, END = 64, 4, 100, 10, 1
CYCLE = GrammarSpec(GrammarKind.REGEX, "cycle")  # token i leaves the remainder i when divided by 3
STUCK = GrammarSpec(GrammarKind.REGEX, "stuck")  # fails after three tokens


class Cycle(Matcher):
    """Refuses tokens that its own mask did not allow, so that a mask of a wrong state is noticed."""

    def __init__(self, text: str) -> None:
        self.text, self.count = text, 0

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if token % 3 != self.count % 3:
                raise GrammarError(f"token {token} after {self.count}")
            self.count += 1

    def mask(self) -> Bits:
        if self.text == "stuck" and self.count >= 3:
            raise GrammarError("stuck")
        allowed = np.arange(VOCAB_SIZE) % 3 == self.count % 3
        return np.packbits(allowed, bitorder="little").view(np.int32)


class Cycles(Grammar):
    def __init__(self, text: str) -> None:
        self.text = text

    def matcher(self) -> Matcher:
        return Cycle(self.text)


class CycleLibrary(GrammarLibrary):
    def compile(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar:
        return Cycles(spec.text)

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        for row, matcher in enumerate(matchers):
            assert isinstance(matcher, Cycle)
            bits[row] = matcher.mask()


SETTINGS = [
    SamplingParams(temperature=0.0, max_tokens=99),
    SamplingParams(temperature=0.0, max_tokens=99, grammar=CYCLE, eos_token_ids=(63,)),
    SamplingParams(temperature=1.1, seed=3, max_tokens=99),
    SamplingParams(temperature=1.3, seed=4, max_tokens=99, grammar=CYCLE, eos_token_ids=(63,), min_tokens=50),
    SamplingParams(temperature=0.9, seed=5, top_p=0.8, max_tokens=99, grammar=CYCLE, eos_token_ids=(63,)),
]


class Served:
    def __init__(self, runner: ModelRunner, number: int, sampling: SamplingParams) -> None:
        self.prompt = [(7 * number + place) % VOCAB_SIZE for place in range(4 + number)]
        self.output = [3]
        self.blocks = list(range(6 * number + 1, 6 * number + 7))
        self.row = SampleRow(sampling, self.prompt, self.output, grammar=Grammars(CycleLibrary()).row(sampling))
        self.error: Exception | None = None
        runner.forward([ForwardItem(self.prompt, 0, self.blocks, "none")])

    def item(self, before: list[Served] | None) -> DecodeItem:
        chained = before is not None and self in before
        position = len(self.output) + chained
        previous = before.index(self) if before is not None and chained else 0
        kv_tokens = len(self.prompt) + position - 1
        return DecodeItem(self.row, None if chained else self.output[-1], previous, kv_tokens, self.blocks, position)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_model("llama", Path(tmp_path_factory.mktemp("m")), seed=4, vocab_size=VOCAB_SIZE)
    return load_model(inspect_model("test", folder, "float32", "cpu"), "cpu")


def make_engine(kind: str, loaded: LoadedModel) -> tuple[ModelRunner, DecodeEngine]:
    runner = ModelRunner(loaded, allocate_cache(loaded.info.geometry(BLOCK_SIZE), BLOCKS, "cpu"))
    if kind == "graphs":
        engine = GraphDecode(runner, EagerDecode(runner), TwinDevice(), (2, 8), lambda done, count: None)
        engine.warm_up()
        return runner, engine
    return runner, EagerDecode(runner, overlaps=kind == "ahead")


def take(step: DecodeStep, batch: list[Served]) -> None:
    for one, result in zip(batch, step.tokens(), strict=True):
        if isinstance(result, SampledToken) and one.error is None:
            one.output.append(result.token_id)
        elif one.error is None:
            assert isinstance(result, Exception)
            one.error = result


def answers(kind: str, loaded: LoadedModel, settings: list[SamplingParams], seed: int = 0) -> list[Served]:
    """Launched ahead wherever the engine allows it, in random batches."""
    runner, engine = make_engine(kind, loaded)
    served = [Served(runner, number, sampling) for number, sampling in enumerate(settings)]
    draw = random.Random(seed)
    before: tuple[list[Served], DecodeStep] | None = None
    left = {id(one): TOKENS for one in served}
    while batch := [one for one in served if left[id(one)] and one.error is None]:
        batch = draw.sample(batch, draw.randint(1, len(batch)))
        step = engine.launch([one.item(before[0] if before else None) for one in batch])
        for one in batch:
            left[id(one)] -= 1
        if before is not None:
            take(before[1], before[0])
        before = batch, step
        if not engine.ahead([one.row for one in batch]) or not engine.overlaps:
            take(step, batch)
            before = None
    if before is not None:
        take(before[1], before[0])
    return served


@pytest.mark.parametrize(("kind", "seed"), [("ahead", 0), ("ahead", 1), ("ahead", 2), ("graphs", 0)])
def test_tokens_under_a_grammar_are_those_of_one_step_at_a_time(loaded: LoadedModel, kind: str, seed: int) -> None:
    engine = make_engine(kind, loaded)[1]
    settings = [one for one in SETTINGS if kind == "ahead" or one.greedy or one.grammar]  # drawing in graphs is slow
    served = answers(kind, loaded, settings, seed)
    assert engine.overlaps
    assert all(engine.ahead([one.row]) for one in served)
    expected = answers("eager", loaded, settings)
    assert [one.output for one in served] == [one.output for one in expected]
    for one in (one for one in served if one.row.grammar is not None):
        assert [token % 3 for token in one.output] == [place % 3 for place in range(1 + TOKENS)]


@pytest.mark.parametrize("kind", ["eager", "ahead", "graphs"])
def test_a_grammar_that_cannot_go_on_ends_its_own_request_only(loaded: LoadedModel, kind: str) -> None:
    stuck = SamplingParams(temperature=0.0, max_tokens=99, grammar=STUCK, eos_token_ids=(63,))
    served = answers(kind, loaded, [*SETTINGS[:2], stuck])
    assert isinstance(served[2].error, GrammarError)
    assert len(served[2].output) == 3
    expected = answers("eager", loaded, SETTINGS[:2])
    assert [one.output for one in served[:2]] == [one.output for one in expected]


def test_a_grammar_with_penalties_or_log_probabilities_still_needs_the_host(loaded: LoadedModel) -> None:
    runner, engine = make_engine("ahead", loaded)
    keys = {"max_tokens": 9, "grammar": CYCLE, "eos_token_ids": (63,)}
    for options in ({"logprobs": 0}, {"repetition_penalty": 1.2}, {"logit_bias": ((3, 1.0),)}):
        sampling = SamplingParams(**keys, **options)  # type: ignore[arg-type]
        assert not engine.ahead([Served(runner, 0, sampling).row])


def test_the_row_after_an_answers_end_is_harmless(loaded: LoadedModel) -> None:
    ends = SamplingParams(temperature=0.0, max_tokens=99, grammar=CYCLE, eos_token_ids=tuple(range(1, 64, 3)))
    runner, engine = make_engine("ahead", loaded)
    ended, other = Served(runner, 0, ends), Served(runner, 1, SETTINGS[1])
    first = engine.launch([ended.item(None), other.item(None)])
    second = engine.launch([ended.item([ended, other]), other.item([ended, other])])
    take(first, [ended, other])  # the first's token is an end token: its row of `second` is discarded
    third = engine.launch([other.item([ended, other])])
    take(second, [ended, other])
    take(third, [other])
    assert ended.row.grammar is not None
    assert ended.row.grammar.ended
    assert (ended.error, other.error) == (None, None)
    assert other.output == answers("eager", loaded, SETTINGS[:2])[1].output[:4]
