"""What becomes of a prompt whose cached beginning is being looked for, if it is cancelled or the search fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.convert import key_to_proto, keys_from_proto, spec_to_proto
from alignedserve.control.link import Outbox
from alignedserve.control.runtime import RoleSettings
from alignedserve.prefill_worker.actor import PrefillServer
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.request import RequestKey, RequestSpec, SamplingParams

KEYS = [RequestKey("first"), RequestKey("second")]


class Reports(Outbox[pw.PrefillReport]):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[pw.PrefillReport] = []

    def put(self, message: pw.PrefillReport) -> None:
        self.found.append(message)


class Cell:
    """A prefill process without a model. `ended`: the prompts that are no longer under way."""

    def __init__(self) -> None:
        self.server = PrefillServer(RoleSettings("prefill", "prefill-0", to_tree(Config()), "cell", "token"))
        self.server._scheduler = self.reports = Reports()
        self.ended: list[RequestKey] = []
        self.searching = asyncio.Event()
        self.go_on = asyncio.Event()
        self.submitted: list[str] = []
        instance: Any = self.server._instance
        instance.model = SimpleNamespace(vocab_size=100)
        instance.find_prefix, instance.prefix_ended = self._find, self._ended
        instance.offloader = SimpleNamespace(cancel=lambda key: False)
        instance.compute = SimpleNamespace(
            cancel=lambda keys: None, cancel_all=lambda: None, submit=lambda *args: self.submitted.append("")
        )

    async def _find(self, group: object, copy_from: str) -> None:
        self.searching.set()
        await self.go_on.wait()
        raise RuntimeError("a bug")

    def _ended(self, leads: Iterable[RequestKey], *, committed: bool = False) -> None:
        self.ended += leads

    def begin(self) -> asyncio.Task[None]:
        specs = [RequestSpec(key, [1, 2, 3], SamplingParams(), group_id="g", group_size=2) for key in KEYS]
        sent = gw.RequestSpecs(requests=map(spec_to_proto, specs)).SerializeToString()
        group = pw.PrefillGroup(keys=map(key_to_proto, KEYS), specs=sent)
        self.server._expected.update(dict.fromkeys(KEYS, group))
        return asyncio.get_running_loop().create_task(self.server._begin(group, KEYS))


async def test_a_search_that_fails_is_reported_and_no_other_prompt_waits_for_it() -> None:
    cell = Cell()
    cell.go_on.set()
    await cell.begin()
    (report,) = cell.reports.found
    assert keys_from_proto(pb.RequestKeys(keys=report.failed.keys)) == KEYS
    assert report.failed.retry
    assert cell.ended == KEYS[:1]
    assert not cell.server._expected
    assert not cell.submitted


async def test_no_other_prompt_waits_for_one_that_all_clients_have_cancelled() -> None:
    cell = Cell()
    beginning = cell.begin()
    await cell.searching.wait()
    cell.server._cancel(KEYS[:1])
    assert not cell.ended  # the second answer is still wanted
    cell.server._cancel([KEYS[1], KEYS[1]])
    assert cell.ended == KEYS
    cell.go_on.set()
    await beginning
    assert cell.ended == [*KEYS, KEYS[0]]
    assert [keys_from_proto(report.finished) for report in cell.reports.found] == [KEYS[:1], KEYS[1:]]


async def test_if_the_scheduler_ends_no_prompt_waits_for_those_that_it_had_sent() -> None:
    cell = Cell()
    beginning = cell.begin()
    await cell.searching.wait()
    cell.server._reset()
    assert cell.ended == KEYS
    cell.go_on.set()
    await beginning
    assert not cell.reports.found
