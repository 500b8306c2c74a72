"""The drain of a gateway, in both event loops: Ray Serve runs replicas in uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from alignedserve.gateway.drain import Drain
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.metrics import GatewayMetrics

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


class ClosedLedger(Ledger):
    """Counts how often it is closed, and has an open request until then."""

    def __init__(self) -> None:
        super().__init__(8, GatewayMetrics("gateway-0"))
        self.closed = 0
        self.busy = asyncio.Event()

    def close_all(self) -> None:
        self.closed += 1
        self.busy.set()
        super().close_all()

    async def wait_empty(self) -> None:
        await self.busy.wait()


@LOOPS
def test_the_time_for_open_requests_can_only_be_shortened(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        ledger, states = ClosedLedger(), list[str]()
        drain = Drain(ledger, lambda: states.append(drain.state))
        for grace_s in (60.0, 120.0, 0.0, 0.0, 60.0):  # each supervisor's view says it again
            drain.begin(grace_s, for_good=False)
            assert drain.state == "draining"
        await asyncio.sleep(0.05)
        drain.begin(0.0, for_good=False)
        await asyncio.sleep(0.05)
        assert (ledger.closed, states) == (1, ["draining", "drained"])

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


@LOOPS
def test_a_drain_that_was_taken_back_can_begin_again(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        ledger, states = ClosedLedger(), list[str]()
        drain = Drain(ledger, lambda: states.append(drain.state))
        drain.begin(0.02, for_good=False)
        drain.take_back()
        await asyncio.sleep(0.1)
        assert (ledger.closed, states) == (0, ["draining", ""])
        drain.begin(0.02)
        drain.take_back()
        await asyncio.sleep(0.1)
        assert (ledger.closed, states) == (1, ["draining", "", "draining", "drained"])

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
