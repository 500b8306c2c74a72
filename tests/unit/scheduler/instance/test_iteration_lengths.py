"""A request's length means the same when passes are profiled, run and simulated."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import pytest
import torch

from alignedserve.config import Config, DecodeConfig, SchedulerConfig
from alignedserve.control.convert import spec_to_proto
from alignedserve.decode_worker.held import Outcome
from alignedserve.decode_worker.iteration_meter import IterationMeter
from alignedserve.decode_worker.loop import DecodeLoop
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.profile.passes import BLOCK_SIZE, Measurement, PassBench, PassShape
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey, RequestSpec, SamplingParams
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.scheduler.systems import resolve
from alignedserve.simulator.disaggregated import simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.workload import Arrival, Workload
from alignedserve.testing.linear_cost import LinearStepCost
from alignedserve.testing.models import make_model
from alignedserve.transfer.completion import Completion

PROMPT, ANSWER, BLOCKS = 20, 4, 8
LENGTHS = [20, 21, 22]  # before each decode pass; the prefill gave the first token


class NotingCost(LinearStepCost):
    """Records the lengths of every decode pass whose cost is requested."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        self.asked += lengths
        return super().step_s(chunks, lengths)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_model("qwen3", tmp_path_factory.mktemp("model"), seed=1)
    return load_model(inspect_model("test", folder, "float32", "cpu"), "cpu")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of cached tokens before each request of each pass that the runner computes."""
    found: list[int] = []
    forward = ModelRunner.forward

    def noted(runner: ModelRunner, items: Sequence[ForwardItem]) -> torch.Tensor:
        found.extend(item.start for item in items)
        return forward(runner, items)

    monkeypatch.setattr(ModelRunner, "forward", noted)
    return found


def test_a_profiled_length_is_what_lies_in_the_cache_before_the_pass(loaded: LoadedModel, starts: list[int]) -> None:
    shapes = [PassShape(lengths=(length,)) for length in LENGTHS]
    bench = PassBench(loaded, [Measurement(shape, "decode") for shape in shapes])
    for shape in shapes:
        bench.run(shape)
    assert starts == LENGTHS


def test_the_live_meter_is_told_what_lies_in_the_cache_before_the_pass(loaded: LoadedModel, starts: list[int]) -> None:
    cost, outcomes = NotingCost(), queue.SimpleQueue[Outcome]()
    runner = ModelRunner(loaded, allocate_cache(loaded.info.geometry(BLOCK_SIZE), BLOCKS, "cpu"))
    scheduler = IterationScheduler(DecodeConfig(), BlockAllocator(BLOCKS, "cache"), BLOCK_SIZE)

    def pull(stored: pb.StoredRequest, block_ids: Sequence[int], resident: int, *, settled: bool = False) -> Completion:
        copied = Completion("hand-over")
        copied.finish()
        return copied

    meter = IterationMeter(cost)
    loop = DecodeLoop("decode-0", EagerDecode(runner), scheduler, None, pull, outcomes.put, meter)
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    spec = RequestSpec(RequestKey("r"), [1] * PROMPT, sampling, output_token_ids=[1])
    loop.offer(BufferKind.BATCH, 1, [pb.StoredRequest(spec=spec_to_proto(spec), kv_tokens=PROMPT, store_id="pool")])
    loop.start()
    try:
        events = []
        while not (events and events[-1].finish_reason):
            outcome = outcomes.get(timeout=30.0)
            assert outcome.fatal is None
            events += [event for _, event in outcome.events]
    finally:
        loop.stop()
    assert starts == LENGTHS
    assert cost.asked[::2] == LENGTHS  # every second call is for the same bytes at equal lengths
    assert events[-1].timings.HasField("bubble_s")
    assert events[-1].timings.bubble_s == 0.0


def test_the_simulator_asks_for_what_lies_in_the_cache_before_the_pass() -> None:
    load = Workload((Arrival("r", 0.0, PROMPT, ANSWER),))
    hardware = Hardware(kv_tokens=640, kv_bytes_per_token=1 << 16, pool_tokens=4000)
    for leap in (False, True):
        cost = NotingCost()
        config = Config(scheduler=SchedulerConfig(waiting_rule="overdue"))  # rounds ask for costs, too
        result = simulate(load, resolve("aligned"), config, hardware, LinearStepCost(), cost, leap=leap)
        steps = zip(result.steps.decodes, result.steps.total, strict=True)
        assert [total for decodes, total in steps if decodes] == LENGTHS
        if not leap:
            assert cost.asked[::2] == LENGTHS
