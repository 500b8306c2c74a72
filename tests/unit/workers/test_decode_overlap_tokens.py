"""A real model behind the decode loop: the same answers, launched ahead or one iteration at a time."""

from __future__ import annotations

import queue
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config import DecodeConfig
from alignedserve.control.convert import spec_to_proto
from alignedserve.decode_worker.held import Outcome
from alignedserve.decode_worker.loop import DecodeLoop
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.grammar.compiled import Grammars
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import GrammarKind, GrammarSpec, RequestKey, RequestSpec, SamplingParams
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.testing.models import make_model, make_tokenizer
from alignedserve.text import Tokenizer
from alignedserve.transfer.completion import Completion

BLOCK_SIZE, BLOCKS, VOCAB, MOST = 8, 120, 400, 24
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 6},
    {"temperature": 1.0, "seed": 2, "top_p": 0.8},
    {"temperature": 0.7, "seed": 3, "logprobs": 2, "max_tokens": 9},
    {"temperature": 1.2, "seed": 4, "top_k": 30},
    {"temperature": 0.0, "max_tokens": 2},
    {"temperature": 0.8, "seed": 5, "min_tokens": 10},
    {"temperature": 0.0, "no_repeat_ngram_size": 2, "bad_words": ((7, 8),)},
    {"temperature": 1.0, "seed": 6, "allowed_token_ids": tuple(range(5, 300, 2)), "max_tokens": 7},
    {"temperature": 0.9, "seed": 7, "forced_eos_token_id": (1,), "begin_suppress_tokens": (5,), "max_tokens": 8},
]


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    reason: str = ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Tokenizer]:
    folder = make_tokenizer(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)
    make_model("llama", folder, seed=2, vocab_size=VOCAB, eos_token_id=1)
    tokenizer = Tokenizer.from_folder(Path(folder))
    assert tokenizer is not None
    return load_model(inspect_model("test", folder, "float32", "cpu"), "cpu"), tokenizer


def serve(
    model: tuple[LoadedModel, Tokenizer], samplings: Sequence[SamplingParams], *, overlap: bool, overlaps: bool
) -> list[Answer]:
    """Serve all requests at once; each prompt's prefill is computed when the request is pulled."""
    loaded, tokenizer = model
    runner = ModelRunner(loaded, allocate_cache(loaded.info.geometry(BLOCK_SIZE), BLOCKS, "cpu"))
    scheduler = IterationScheduler(DecodeConfig(), BlockAllocator(BLOCKS, "cache"), BLOCK_SIZE)
    outcomes = queue.SimpleQueue[Outcome]()

    def pull(stored: pb.StoredRequest, block_ids: Sequence[int], resident: int, *, settled: bool = False) -> Completion:
        runner.forward([ForwardItem(list(stored.spec.prompt_token_ids), 0, list(block_ids), "none")])
        copied = Completion("hand-over")
        copied.finish()
        return copied

    engine = EagerDecode(runner, overlaps=overlaps)
    grammars = Grammars.of(tokenizer, VOCAB)
    loop = DecodeLoop("decode-0", engine, scheduler, tokenizer, pull, outcomes.put, overlap=overlap, grammars=grammars)
    draw, answers = random.Random(7), [Answer([], []) for _ in samplings]
    for number, sampling in enumerate(samplings):
        prompt = [draw.randrange(2, VOCAB) for _ in range(4 + 3 * number)]
        first = 5 if sampling.grammar is None else tokenizer.encode("a", special_tokens=False)[0]
        spec = RequestSpec(RequestKey(str(number)), prompt, sampling, output_token_ids=[first])
        stored = pb.StoredRequest(spec=spec_to_proto(spec), kv_tokens=len(prompt), store_id="pool")
        loop.offer(BufferKind.BATCH, 1, [stored])
    loop.start()
    try:
        while not all(answer.reason for answer in answers):
            outcome = outcomes.get(timeout=30.0)
            assert outcome.fatal is None
            for _, event in outcome.events:
                answer = answers[int(event.key.request_id)]
                assert event.position == 1 + len(answer.tokens)
                answer.tokens += event.token_ids
                answer.logprobs += [found.logprob for found in event.logprobs]
                answer.reason = event.finish_reason
    finally:
        loop.stop()
    assert scheduler.holds_nothing()
    return answers


def test_answers_are_the_same_with_stop_strings_too(model: tuple[LoadedModel, Tokenizer]) -> None:
    samplings = [SamplingParams(**{"max_tokens": MOST, "eos_token_ids": (1,), **options}) for options in SAMPLINGS]
    free = serve(model, samplings, overlap=False, overlaps=False)
    stops = []
    for sampling, answer in zip(samplings, free, strict=True):  # part of the middle of its text
        text = model[1].decode(answer.tokens[len(answer.tokens) // 2 :]) if len(answer.tokens) > 10 else ""
        stops.append(replace(sampling, stop=(text[:3],) if len(text) > 3 else ()))
    expected = serve(model, stops, overlap=False, overlaps=False)
    assert {answer.reason for answer in expected} == {"stop", "length"}
    assert sum(len(answer.tokens) for answer in expected) < sum(len(answer.tokens) for answer in free)
    for overlaps in (False, True):
        found = serve(model, stops, overlap=True, overlaps=overlaps)
        for one, other in zip(found, expected, strict=True):
            assert (one.tokens, one.reason) == (other.tokens, other.reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_answers_under_grammars_are_the_same_beside_others(model: tuple[LoadedModel, Tokenizer]) -> None:
    regexes = ("a[a-m ]{2,9}", "a([0-9]{2} )*", "ab?")
    bound = [
        SamplingParams(
            grammar=GrammarSpec(GrammarKind.REGEX, regex), temperature=number % 2, seed=number, max_tokens=MOST,
            eos_token_ids=(1,), **options,
        )
        for number, (regex, options) in enumerate(zip(regexes * 2, [{}, {}, {}, {}, {}, {"logprobs": 1}], strict=True))
    ]  # fmt: skip
    free = [SamplingParams(**{"max_tokens": MOST, "eos_token_ids": (1,), **options}) for options in SAMPLINGS[:4]]
    samplings = [*bound[:5], *free, bound[5]]
    expected = serve(model, samplings, overlap=False, overlaps=False)
    for answer, regex in zip([*expected[:5], expected[-1]], regexes * 2, strict=True):
        text = "a" + model[1].decode(answer.tokens)
        assert answer.reason == "length" or re.fullmatch(regex, text), text
    assert "stop" in {answer.reason for answer in expected[:5]}
    for overlaps in (False, True):
        for count in (len(samplings), len(samplings) - 1):  # with and without a row that needs the host
            found = serve(model, samplings[:count], overlap=True, overlaps=overlaps)
            assert [(one.tokens, one.reason) for one in found] == [(one.tokens, one.reason) for one in expected[:count]]
