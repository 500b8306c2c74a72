"""What the prefill thread does when a pass fails: its requests end. If the GPU is lost, the thread ends as well."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from alignedserve.config import PrefillConfig
from alignedserve.engine.batch import ForwardItem
from alignedserve.prefill_worker.jobs import Base, Computed, PrefilledJob
from alignedserve.prefill_worker.loop import PrefillLoop
from alignedserve.request import RequestKey, RequestSpec, SamplingParams
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.transfer.completion import Completion


@dataclass
class FailingRunner:
    """Every pass fails; `fault`: the device is lost as well."""

    fault: Exception | None
    block_size: int = 4

    depth: int = 1

    def begin(self, *_: Any) -> Any:
        raise RuntimeError("the pass failed")

    def show_metrics(self, page: Any) -> None: ...

    def device_fault(self) -> Exception | None:
        return self.fault


@pytest.mark.parametrize("fault", [None, RuntimeError("an illegal memory access")])
def test_a_failed_pass_ends_its_requests_unless_the_device_is_of_no_more_use(fault: Exception | None) -> None:
    posted: queue.Queue[Computed] = queue.Queue()
    runner: Any = FailingRunner(fault)
    loop = PrefillLoop(
        "prefill-0", runner, BlockAllocator(8, "cache"), PrefillConfig(), None, lambda *_: Completion(), posted.put
    )
    spec = RequestSpec(RequestKey("one"), [1, 2, 3], SamplingParams(), [], gateway_address="gateway")
    loop.start()
    try:
        loop.submit([spec])
        outcome = posted.get(timeout=10.0)
    finally:
        loop.stop()
    if fault is None:
        assert outcome.fatal is None
        assert [key for key, _ in outcome.failed] == [spec.key]
        assert [event.finish_reason for _, event in outcome.events] == ["error"]
    else:  # the scheduler has it computed by another
        assert outcome.fatal is fault
        assert not outcome.failed
        assert not outcome.events


@dataclass
class NotingRunner:
    items: list[ForwardItem] = field(default_factory=list)
    block_size: int = 4
    depth: int = 1

    def begin(self, items: Sequence[ForwardItem], _: Any) -> Callable[[], torch.Tensor]:
        self.items += items
        return lambda: torch.zeros(len(items), 8)


@dataclass
class NotingFetch:
    """Copies nothing, and is done at once."""

    fetched: list[tuple[str, list[int], list[int], int]] = field(default_factory=list)

    def __call__(self, pin: RequestKey, base: Base, block_ids: Sequence[int]) -> Completion:
        self.fetched.append((pin.request_id, base.block_ids, base.checksums, len(block_ids)))
        done = Completion("fetch")
        done.finish()
        return done


def test_prompts_that_have_not_begun_let_go_of_what_is_cached_in_a_full_shard() -> None:
    fetch = NotingFetch()
    posted: queue.Queue[Computed] = queue.Queue()
    runner: Any = NotingRunner()
    allocator = BlockAllocator(16, "cache")
    loop = PrefillLoop("prefill-0", runner, allocator, PrefillConfig(), None, fetch, posted.put, caches=True)
    full, other = (Base(8, [20, 21], [], pool_id, here=True, cached=True) for pool_id in ("pool-0", "pool-1"))
    for name, base in (("a", full), ("b", other)):
        loop.submit([RequestSpec(RequestKey(name), [*range(9)], SamplingParams(max_tokens=4), [], "gateway")], base)
    loop.give_up_bases("pool-0")
    loop.start()
    try:
        computed: list[Computed] = []
        while sum(len(one.prefilled) for one in computed) < 2:
            computed.append(posted.get(timeout=10.0))
    finally:
        loop.stop()
    assert [one for each in computed for one in each.let_go] == [(RequestKey("a"), full)]
    assert fetch.fetched == [("b", [20, 21], [], 2)]
    assert sorted(len(item.token_ids) for item in runner.items) == [1, 9]


def test_prompts_with_one_cached_beginning_hold_its_blocks_once() -> None:
    fetch = NotingFetch()
    posted: queue.Queue[Computed] = queue.Queue()
    runner: Any = NotingRunner()
    allocator = BlockAllocator(16, "cache")
    loop = PrefillLoop("prefill-0", runner, allocator, PrefillConfig(), None, fetch, posted.put, caches=True)
    prompts = {"a": [*range(8), 1], "b": [*range(8), 4, 4, 4, 4, 2], "c": [*range(8), 3]}
    for name, prompt in prompts.items():
        blocks = list(range(20, 20 + len(prompt) // 4))
        base = Base(len(blocks) * 4, blocks, [block * 10 for block in blocks], "pool-0", here=True, cached=True)
        loop.submit([RequestSpec(RequestKey(name), prompt, SamplingParams(max_tokens=4), [], "gateway")], base)
    loop.start()
    try:
        jobs: list[PrefilledJob] = []
        while len(jobs) < len(prompts):
            jobs += posted.get(timeout=10.0).prefilled
    finally:
        loop.stop()
    assert fetch.fetched == [("a", [20, 21], [200, 210], 2), ("b", [22], [220], 1)]
    assert [len(item.token_ids) for item in runner.items] == [1, 1, 1]
    assert len({tuple(item.block_ids[:2]) for item in runner.items}) == 1
    assert allocator.owned_blocks == 3 + 2 + 1
    assert sorted(job.lead.request_id for job in jobs) == ["a", "b", "c"]


@pytest.mark.parametrize("caches", [True, False])
def test_what_is_computed_of_a_cancelled_prompt_is_to_be_cached(*, caches: bool) -> None:
    posted: queue.Queue[Computed] = queue.Queue()
    runner: Any = NotingRunner()
    allocator = BlockAllocator(16, "cache")
    config = PrefillConfig(token_budget=8)
    loop = PrefillLoop("prefill-0", runner, allocator, config, None, NotingFetch(), posted.put, caches=caches)
    begun, not_begun = RequestKey("begun"), RequestKey("not begun")
    for key in (begun, not_begun):
        loop.submit([RequestSpec(key, [*range(30)], SamplingParams(), [], "gateway", cache_salt=b"salt")])
    loop.turn()
    loop.cancel([begun, not_begun])
    loop.turn()
    results = [posted.get_nowait() for _ in range(posted.qsize())]
    assert [key for one in results for key in one.finished] == [begun, not_begun]
    assert loop.pending_tokens == 0
    assert loop.idle
    jobs = [job for one in results for job in one.prefilled]
    if caches:
        (job,) = jobs
        assert (job.lead, job.members, job.tokens, job.salt) == (begun, [], [*range(8)], b"salt")
        assert job.block_ids[:2] == runner.items[0].block_ids
        assert [key for one in results for key in one.unpinned] == [not_begun]
        loop.release(begun)
        loop.turn()
    assert allocator.owned_blocks == 0
