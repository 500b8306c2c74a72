"""Measures the time of the decode loop itself, beside the forward pass and sampling, without a cluster."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Sequence

from alignedserve.config import DecodeConfig
from alignedserve.control.convert import spec_to_proto
from alignedserve.decode_worker.held import Outcome
from alignedserve.decode_worker.iteration_meter import IterationMeter
from alignedserve.decode_worker.loop import DecodeLoop
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.runner import ModelRunner
from alignedserve.errors import AlignedServeError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import RequestKey, RequestSpec, SamplingParams
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.transfer.completion import Completion

PROMPT_TOKENS = 16
ITERATIONS = 40
LONGEST_S = 120.0


class _GapRecorder(IterationMeter):
    """Records the CPU time of the decode thread in each gap. `begin` and `end` are called on that thread."""

    def __init__(self) -> None:
        super().__init__(None)
        self.seconds: list[float] = []
        self._since_s: float | None = None

    def begin(self) -> None:
        if self._since_s is not None:
            self.seconds.append(time.thread_time() - self._since_s)

    def end(self) -> None:
        self._since_s = time.thread_time()

    def pause(self) -> None:
        self._since_s = None


class _Worker:
    """Receives the loop's outcomes in an event loop that packs them for a gateway, as the worker does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self._missing = 0
        self._thread = threading.Thread(target=self.loop.run_forever, name="worker", daemon=True)
        self._thread.start()

    def expect(self, requests: int) -> None:
        self._missing = requests

    def post(self, outcome: Outcome) -> None:
        self.loop.call_soon_threadsafe(self._on_outcome, outcome)

    def _on_outcome(self, outcome: Outcome) -> None:
        gw.TokenBatch(events=[event for _, event in outcome.events]).SerializeToString()
        self._missing -= len(outcome.finished)
        self.failure = outcome.fatal
        if not self._missing or outcome.fatal is not None:
            self.ended.set()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def loop_overhead_s(runner: ModelRunner, blocks: int, requests: int) -> float:
    """The median CPU time in seconds of the decode thread between two passes with `requests` running requests.

    It covers the time from the last sampled token to the next forward pass: events, the scheduler's accounting and
    plan, and the items of the pass. The runner's store has `blocks` blocks, which are overwritten. Raises
    AlignedServeError if the loop fails.
    """
    worker, recorder = _Worker(), _GapRecorder()
    allocator = BlockAllocator(blocks, "profile/cache")
    config = DecodeConfig(max_running=requests)
    scheduler = IterationScheduler(config, allocator, runner.block_size)
    engine = EagerDecode(runner)
    loop = DecodeLoop("profile", engine, scheduler, None, _copied_already, worker.post, recorder, overlap=False)
    worker.expect(requests)
    try:
        loop.offer(BufferKind.BATCH, 1, [_candidate(number) for number in range(requests)])
        loop.start()
        ended = worker.ended.wait(LONGEST_S)
        loop.stop()
    finally:
        worker.close()
    if worker.failure is not None or not ended or len(recorder.seconds) < ITERATIONS // 2:
        raise AlignedServeError(f"the decode loop did not end with {requests} requests: {worker.failure!r}")
    return statistics.median(recorder.seconds)


def _copied_already(
    stored: pb.StoredRequest, block_ids: Sequence[int], resident: int, *, settled: bool = False
) -> Completion:
    copied = Completion("profile")
    copied.finish(None)
    return copied


def _candidate(number: int) -> pb.StoredRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=ITERATIONS + 1, ignore_eos=True)
    spec = RequestSpec(RequestKey(f"profile-{number}"), [1] * PROMPT_TOKENS, sampling, [1], gateway_address="profile")
    return pb.StoredRequest(spec=spec_to_proto(spec), store_id="profile", kv_tokens=PROMPT_TOKENS)
