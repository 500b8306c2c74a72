"""Decoding from graphs matches the eager engine. On a CPU, a twin replays what it recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.config import Config
from alignedserve.control.samples import value
from alignedserve.engine.backends.triton_backend import TritonBackend
from alignedserve.engine.decode_engine import decode_engine
from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.graphs.decode import GraphDecode
from alignedserve.engine.graphs.device import CudaGraphs
from alignedserve.engine.graphs.fixed_run import run_fixed
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import SampledToken, Sampler, SampleRow
from alignedserve.errors import AccountingError, NumericsError
from alignedserve.metrics import Page
from alignedserve.request import SamplingParams
from alignedserve.testing.models import make_model
from support.graph_twins import TwinDevice

VOCAB_SIZE = 64  # Triton's interpreter takes its time
BLOCK_SIZE = 4
BLOCKS = 100
SIZES = (2, 4)
TOKENS = 6  # of each answer
GREEDY = {"temperature": 0.0}


@dataclass
class Served:
    """A request whose prompt is in the store; `tokens` grows with each result."""

    row: SampleRow
    blocks: list[int]
    results: list[SampledToken] = field(default_factory=list)
    chosen: int = 0  # iterations launched for it

    def item(self, under_way: dict[int, int] | None) -> DecodeItem:
        """`under_way`: by id, the rows of the running iteration, whose tokens are not known yet."""
        prompt, output = len(self.row.prompt_token_ids), self.row.output_token_ids
        chained = under_way is not None and id(self) in under_way
        position = len(output) + chained
        return DecodeItem(
            self.row,
            None if chained else output[-1],
            under_way[id(self)] if under_way is not None and chained else 0,
            prompt + position - 1,
            self.blocks,
            position,
        )


def load(kind: str, folder: Path, device: str = "cpu", dtype: str = "float32", **overrides: Any) -> LoadedModel:
    overrides.setdefault("vocab_size", VOCAB_SIZE)
    made = make_model(kind, folder, seed=4, **overrides)
    return load_model(inspect_model("test", made, dtype, device), device)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=64)


def runner_of(loaded: LoadedModel, backend: str = "torch") -> ModelRunner:
    block_size = 16 if backend == "triton" else BLOCK_SIZE
    cache = allocate_cache(loaded.info.geometry(block_size), BLOCKS, loaded.device)
    interpreted = backend == "triton" and loaded.device.type == "cpu"
    runner = ModelRunner(loaded, cache, "torch" if interpreted else backend)
    if interpreted:  # no configuration selects this
        runner._backend = TritonBackend(cache)
    cache.fill_(float("nan"))  # unwritten memory must not affect a result
    return runner


def graphs_of(runner: ModelRunner, sizes: tuple[int, ...] = SIZES) -> GraphDecode:
    cuda = runner.loaded.device.type == "cuda"
    device = CudaGraphs(runner.loaded.device) if cuda else TwinDevice()
    engine = GraphDecode(runner, EagerDecode(runner), device, sizes, lambda done, count: None)
    engine.warm_up()
    return engine


def prefill(runner: ModelRunner, prompt: list[int], blocks: list[int], sampling: SamplingParams) -> Served:
    output: list[int] = []
    row = SampleRow(sampling, prompt, output)
    output.append(Sampler().sample(runner.forward([ForwardItem(prompt, 0, blocks)]), [row])[0].token_id)
    return Served(row, blocks)


def open_requests(runner: ModelRunner, samplings: list[dict[str, Any]], seed: int = 0) -> list[Served]:
    draw = random.Random(seed)
    free = list(range(1, BLOCKS))
    draw.shuffle(free)
    served = []
    for number, sampling in enumerate(samplings):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 14))]
        blocks = [free.pop() for _ in range(-(-(len(prompt) + TOKENS) // runner.block_size))]
        served.append(prefill(runner, prompt, blocks, SamplingParams(max_tokens=99, seed=number + 7, **sampling)))
    return served


def take(batch: list[Served], step: DecodeStep) -> None:
    for request, result in zip(batch, step.tokens(), strict=True):
        assert isinstance(result, SampledToken), result
        request.results.append(result)
        request.row.output_token_ids.append(result.token_id)  # type: ignore[attr-defined]


def decode(engine: DecodeEngine, requests: list[Served], draw: random.Random, most: int = SIZES[-1]) -> None:
    """Decode all answers in random batches, in any order, launched ahead where allowed."""
    before: tuple[list[Served], DecodeStep] | None = None
    while True:
        open_ones = [request for request in requests if request.chosen < TOKENS]
        if before is not None and not (open_ones and engine.ahead([request.row for request in before[0]])):
            take(*before)
            before = None
        if not open_ones:
            return
        batch = draw.sample(open_ones, draw.randint(1, min(most, len(open_ones))))
        under_way = {id(request): row for row, request in enumerate(before[0])} if before is not None else None
        step = engine.launch([request.item(under_way) for request in batch])
        for request in batch:
            request.chosen += 1
        if before is not None:
            take(*before)
        before = batch, step


def reference(loaded: LoadedModel, samplings: list[dict[str, Any]], backend: str = "torch") -> list[list[SampledToken]]:
    """Each request alone, eagerly."""
    runner = runner_of(loaded, backend)
    requests = open_requests(runner, samplings)
    for request in requests:
        decode(EagerDecode(runner), [request], random.Random(0))
    return [request.results for request in requests]


@pytest.fixture(scope="module")
def greedy(llama: LoadedModel) -> list[list[SampledToken]]:
    """Greedy answers to the prompts of `open_requests`, which do not depend on the number of requests."""
    return reference(llama, [GREEDY] * 6)


@pytest.mark.parametrize("kind", ["opt", "gemma2", "qwen3_moe", "gpt_oss"])
def test_greedy_tokens_are_the_eager_ones(kind: str, tmp_path: Path) -> None:
    loaded = load(kind, tmp_path, max_position_embeddings=64)
    runner = runner_of(loaded)
    engine = graphs_of(runner)
    assert engine.overlaps
    requests = open_requests(runner, [GREEDY] * 4)
    decode(engine, requests, random.Random(3))
    assert [request.results for request in requests] == reference(loaded, [GREEDY] * 4)
    assert engine.counts.eager == 0
    assert engine.counts.padded_rows > 0


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.6},
    GREEDY,
    {"top_k": 7, "top_p": 0.95, "min_p": 0.01},
]


def test_drawn_tokens_are_the_eager_ones_whatever_the_batch(llama: LoadedModel) -> None:
    runner = runner_of(llama)
    engine = graphs_of(runner)
    requests = open_requests(runner, SAMPLED)
    decode(engine, requests, random.Random(5))
    assert [request.results for request in requests] == reference(llama, SAMPLED)
    assert engine.counts.sampled_outside == 0


OUTSIDE: list[dict[str, Any]] = [
    {**GREEDY, "logprobs": 2},
    {"temperature": 0.9, "repetition_penalty": 1.5},
    {**GREEDY, "logit_bias": ((5, 4.0), (6, 4.0))},
    {**GREEDY, "min_tokens": 4, "eos_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
    GREEDY,
]


def test_what_needs_the_host_is_chosen_there_from_the_same_logits(llama: LoadedModel) -> None:
    runner = runner_of(llama)
    engine = graphs_of(runner)
    requests = open_requests(runner, OUTSIDE)
    assert [engine.ahead([request.row]) for request in requests] == [False, False, False, False, True]
    decode(engine, requests, random.Random(6))
    expected = reference(llama, OUTSIDE)
    for request, answer in zip(requests, expected, strict=True):
        assert [result.token_id for result in request.results] == [result.token_id for result in answer]
    ours, theirs = requests[0].results[3].logprobs, expected[0][3].logprobs
    assert ours is not None
    assert theirs is not None
    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert engine.counts.sampled_outside == 3 * TOKENS + 3
    assert engine.ahead([requests[3].row])


EXCLUDING: list[dict[str, Any]] = [
    {**GREEDY, "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
    {"temperature": 0.9, "bad_words": ((5,), (6, 7)), "suppress_tokens": tuple(range(20))},
    {**GREEDY, "no_repeat_ngram_size": 1},
    {"temperature": 1.1},
]


def test_excluded_tokens_are_excluded_behind_graphs_too(llama: LoadedModel) -> None:
    runner = runner_of(llama)
    engine = graphs_of(runner)
    requests = open_requests(runner, EXCLUDING)
    assert [engine.ahead([request.row]) for request in requests] == [False, False, False, True]
    decode(engine, requests, random.Random(7))
    expected = reference(llama, EXCLUDING)
    for request, answer in zip(requests, expected, strict=True):
        assert [result.token_id for result in request.results] == [result.token_id for result in answer]
    tokens = [[result.token_id for result in request.results] for request in requests]
    assert {token % 3 for token in tokens[0]} == {0}
    assert min(tokens[1]) >= 20
    assert len(set(tokens[2])) == TOKENS


def test_a_row_of_broken_numbers_fails_alone_and_so_does_what_follows_it(
    llama: LoadedModel, greedy: list[list[SampledToken]]
) -> None:
    runner = runner_of(llama)
    engine = graphs_of(runner)
    requests = open_requests(runner, [GREEDY, {"temperature": 0.9}, GREEDY])
    runner.cache[requests[1].blocks[0]] = float("nan")
    first = engine.launch([request.item(None) for request in requests])
    rows = {id(request): row for row, request in enumerate(requests)}
    second = engine.launch([request.item(rows) for request in requests])
    steps = [first.tokens(), second.tokens()]
    for results in steps:
        assert [type(result) for result in results] == [SampledToken, NumericsError, SampledToken]
    assert [[results[row] for results in steps] for row in (0, 2)] == [greedy[row][:2] for row in (0, 2)]


def test_what_the_host_chooses_behind_a_lost_row_is_chosen_before_its_logits_are_overwritten(
    llama: LoadedModel, greedy: list[list[SampledToken]]
) -> None:
    runner = runner_of(llama)
    engine = graphs_of(runner)
    requests = open_requests(runner, [GREEDY, {**GREEDY, "logprobs": 0}, GREEDY])
    runner.cache[requests[0].blocks[0]] = float("nan")
    first = engine.launch([request.item(None) for request in requests[:2]])
    rows = {id(request): row for row, request in enumerate(requests[:2])}
    second = engine.launch([request.item(rows) for request in requests[:2]])
    third = engine.launch([requests[2].item(None)])
    results = [step.tokens() for step in (first, second, third)]
    assert [type(results[turn][0]) for turn in (0, 1)] == [NumericsError] * 2
    found = [results[0][1], results[1][1], results[2][0]]
    assert all(isinstance(result, SampledToken) for result in found)
    expected = [greedy[1][0], greedy[1][1], greedy[2][0]]
    assert [getattr(result, "token_id", None) for result in found] == [token.token_id for token in expected]


def test_larger_batches_than_were_captured_are_computed_eagerly_between_graphs(
    llama: LoadedModel, greedy: list[list[SampledToken]]
) -> None:
    runner = runner_of(llama)
    engine = graphs_of(runner)
    requests = open_requests(runner, [GREEDY] * 6)
    assert not engine.ahead([request.row for request in requests])
    decode(engine, requests, random.Random(2), most=6)
    assert [request.results for request in requests] == greedy[:6]
    assert engine.counts.eager > 0
    assert engine.counts.replays > 2


def test_a_larger_batch_may_follow_one_whose_tokens_were_not_read_yet(
    llama: LoadedModel, greedy: list[list[SampledToken]]
) -> None:
    runner = runner_of(llama)
    engine = graphs_of(runner)
    requests = open_requests(runner, [GREEDY] * 5)
    small = engine.launch([request.item(None) for request in requests[:3]])
    rows = {id(request): row for row, request in enumerate(requests[:3])}
    large = engine.launch([request.item(rows) for request in requests])
    assert small.tokens() == [answer[0] for answer in greedy[:3]]
    assert large.tokens() == [answer[1] for answer in greedy[:3]] + [answer[0] for answer in greedy[3:5]]


def test_a_model_that_waits_for_the_device_decodes_without_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load("llama", tmp_path, max_position_embeddings=64)
    forward: Callable[..., Any] = loaded.model.forward

    def waiting(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        assert int(input_ids.max()) < VOCAB_SIZE
        return forward(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(loaded.model, "forward", waiting)
    runner = runner_of(loaded)
    engine = graphs_of(runner)
    warnings = [record.getMessage() for record in caplog.records if "without CUDA graphs" in record.getMessage()]
    assert len(warnings) == 1
    assert "waits for the device" in warnings[0]
    assert engine.sizes == ()
    requests = open_requests(runner, [GREEDY] * 3)
    decode(engine, requests, random.Random(1))
    assert [request.results for request in requests] == reference(loaded, [GREEDY] * 3)


def test_blocks_that_do_not_add_up_fail_the_iteration_and_no_other(
    llama: LoadedModel, greedy: list[list[SampledToken]]
) -> None:
    runner = runner_of(llama)
    engine = graphs_of(runner)
    requests = open_requests(runner, [GREEDY] * 3)
    good = [request.item(None) for request in requests]
    for blocks, message in (([], "do not cover"), ([BLOCKS] * 9, "outside this store")):
        bad = [*good[:2], DecodeItem(good[2].row, 1, 0, 20, blocks, 1)]
        with pytest.raises(AccountingError, match=message):
            engine.launch(bad).tokens()
    follows = [DecodeItem(item.row, None, 0, item.kv_tokens + 1, item.block_ids, 2) for item in good]
    with pytest.raises(AccountingError):
        engine.launch(follows).tokens()
    decode(engine, requests, random.Random(1))
    assert [request.results for request in requests] == greedy[:3]


def test_a_request_that_comes_back_in_other_blocks_is_read_there(
    llama: LoadedModel, greedy: list[list[SampledToken]]
) -> None:
    runner = runner_of(llama)
    engine = graphs_of(runner)
    one, other = open_requests(runner, [GREEDY] * 2)
    for batch in ([one, other], [other], [one, other]):
        if len(batch) == 1:
            moved = [block for block in range(1, BLOCKS) if block not in one.blocks + other.blocks][: len(one.blocks)]
            runner.cache[moved] = runner.cache[one.blocks]
            runner.cache[one.blocks] = float("nan")
            one.blocks = moved
        take(batch, engine.launch([request.item(None) for request in batch]))
    assert (one.results, other.results) == (greedy[0][:2], greedy[1][:3])


def test_memory_and_sizes_are_told(llama: LoadedModel) -> None:
    told: list[tuple[int, int]] = []
    runner = runner_of(llama)
    engine = GraphDecode(runner, EagerDecode(runner), TwinDevice(), (1, 2, 4), lambda *at: told.append(at))
    assert engine.sizes == ()
    engine.warm_up()
    assert engine.sizes == (1, 2, 4)
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert engine.graph_memory_bytes > 4 * VOCAB_SIZE * 4 + 9 * 1000
    page = Page()
    engine.show_metrics(page)
    assert value(page.text(), "alignedserve_decode_graph_bytes") == engine.graph_memory_bytes


def test_a_fixed_batch_is_timed_with_the_host_and_without(llama: LoadedModel) -> None:
    runner = runner_of(llama)
    runner.cache.zero_()
    engine = graphs_of(runner)
    store = {"block_size": BLOCK_SIZE, "num_blocks": BLOCKS}
    run = run_fixed(engine, [9, 17, 30], 5, SamplingParams(temperature=0.0), **store)
    assert (run.iterations, engine.counts.replays, engine.counts.eager) == (5, 9, 0)
    assert run.replay_s > 0.0
    assert run.iteration_s > 0.0
    assert 0.0 <= run.idle_share < 1.0
    with pytest.raises(AccountingError, match="are needed"):
        run_fixed(engine, [BLOCKS * BLOCK_SIZE], 5, SamplingParams(temperature=0.0), **store)


def test_tuning_comes_before_the_capture(llama: LoadedModel) -> None:
    order: list[str] = []
    runner = runner_of(llama)
    engine = GraphDecode(
        runner,
        EagerDecode(runner),
        TwinDevice(),
        (1, 2),
        lambda done, count: order.append(f"captured {done}"),
        lambda: order.append("tuned"),
    )
    engine.warm_up()
    assert order == ["tuned", "captured 1", "captured 2"]


def test_a_cpu_decodes_eagerly(llama: LoadedModel) -> None:
    assert isinstance(decode_engine(runner_of(llama), Config(), lambda done, count: None), EagerDecode)


def test_tritons_attention_replays_from_its_table(tmp_path: Path) -> None:
    loaded = load("mistral", tmp_path, num_hidden_layers=1, max_position_embeddings=32, sliding_window=8)
    runner = runner_of(loaded, "triton")
    engine = GraphDecode(runner, EagerDecode(runner), TwinDevice(records=False), (2,), lambda done, count: None)
    engine.warm_up()
    assert engine.sizes == (2,)
    requests = open_requests(runner, [GREEDY] * 2)
    for batch in (requests, requests[1:], requests[::-1]):
        take(batch, engine.launch([request.item(None) for request in batch]))
    expected = reference(loaded, [GREEDY] * 2)
    assert [request.results for request in requests] == [expected[0][:2], expected[1][:3]]


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["llama", "opt", "gemma2"])
def test_a_gpus_graphs_give_the_eager_tokens(kind: str, tmp_path: Path) -> None:
    loaded = load(kind, tmp_path, "cuda", max_position_embeddings=64)
    samplings = [*SAMPLED, *OUTSIDE]
    runner = runner_of(loaded, "triton")
    engine = graphs_of(runner, (1, 2, 4, 8))
    assert engine.sizes == (1, 2, 4, 8)
    requests = open_requests(runner, samplings)
    decode(engine, requests, random.Random(3), most=8)
    found = [[result.token_id for result in request.results] for request in requests]
    expected = reference(loaded, samplings, "triton")
    assert found == [[result.token_id for result in answer] for answer in expected]
    assert engine.counts.eager == 0
    assert engine.graph_memory_bytes > 0


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_on_a_gpu_decode_whether_they_can_be_captured_or_not(dtype: str, tmp_path: Path) -> None:
    """torch's grouped matmul reads group sizes on the host in fp32, and uses one Hopper kernel in bf16."""
    loaded = load("qwen3_moe", tmp_path, "cuda", dtype, max_position_embeddings=64)
    engine = graphs_of(runner_of(loaded, "triton"), (1, 2, 4))
    assert engine.sizes in ((), (1, 2, 4))
    requests = open_requests(engine._runner, [GREEDY] * 3)
    decode(engine, requests, random.Random(3), most=4)
    assert all(len(request.results) == TOKENS for request in requests)
    assert (engine.counts.replays > 0) == bool(engine.sizes)
    if dtype == "float32":
        assert [request.results for request in requests] == reference(loaded, [GREEDY] * 3, "triton")
    elif torch.cuda.get_device_capability() == (9, 0):
        assert engine.sizes == (1, 2, 4)


@gpu
@needs_gpu
def test_a_model_that_waits_for_a_gpu_decodes_without_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("llama", tmp_path, "cuda", max_position_embeddings=64)
    forward: Callable[..., Any] = loaded.model.forward

    def waiting(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        assert int(input_ids.max()) < VOCAB_SIZE
        return forward(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(loaded.model, "forward", waiting)
    runner = runner_of(loaded, "triton")
    engine = graphs_of(runner)
    assert engine.sizes == ()
    requests = open_requests(runner, [GREEDY] * 3)
    decode(engine, requests, random.Random(1))
    assert [request.results for request in requests] == reference(loaded, [GREEDY] * 3, "triton")
    monkeypatch.undo()  # the failed capture leaves nothing behind: memory, random numbers and graphs are as before
    torch.cuda.empty_cache()
    assert 0.0 <= float(torch.rand(1, device="cuda")) <= 1.0
    assert graphs_of(runner).sizes == SIZES


@gpu
@needs_gpu
def test_what_was_compiled_decodes_from_graphs_in_bf16(tmp_path: Path) -> None:
    loaded = load("qwen3", tmp_path, "cuda", "bfloat16", max_position_embeddings=64)
    engine = decode_engine(runner_of(loaded, "triton"), Config(), lambda done, count: None)
    assert isinstance(engine, GraphDecode)
    engine.warm_up()
    assert engine.sizes[-1] == 256  # as long as the cache has not decided
    requests = open_requests(engine._runner, [GREEDY] * 9)
    decode(engine, requests, random.Random(1), most=9)
    assert engine.counts.eager == 0
    run = run_fixed(engine, [20] * 9, 20, SamplingParams(temperature=0.0), block_size=BLOCK_SIZE, num_blocks=BLOCKS)
    assert run.replay_s > 0.0
    assert run.idle_share < 1.0
