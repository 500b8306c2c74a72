"""What the prefill thread does when a pass fails: its requests end. If the GPU is lost, the thread ends as well."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Any

import pytest

from alignedserve.config import PrefillConfig
from alignedserve.prefill_worker.loop import Computed, PrefillLoop
from alignedserve.request import RequestKey, RequestSpec, SamplingParams
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.transfer.completion import Completion


@dataclass
class FailingRunner:
    """Every pass fails; `fault`: the device is lost as well."""

    fault: Exception | None
    block_size: int = 4

    def forward(self, *_: Any) -> Any:
        raise RuntimeError("the pass failed")

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
