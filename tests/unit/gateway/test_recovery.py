"""What a gateway does when a process behind it dies: a stream continues exactly, or ends with an error."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from alignedserve.errors import CancelledError, OverloadedError, UnavailableError
from alignedserve.gateway.ledger import ledger as ledger_module
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import FinishReason, RequestKey, RequestSpec
from support.fake_cluster import FakeCluster, counting_script, silent_script
from support.gateway import RunningGateway, running_gateway

COUNTED = list(range(100, 116))


async def ask(gateway: RunningGateway, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as http:
        return await http.post("/v1/completions", json={"prompt": "a", "return_token_ids": True, **body})


async def tokens(gateway: RunningGateway, **body: Any) -> list[list[int]]:
    answer = await ask(gateway, **body)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


async def until_lost(cluster: FakeCluster, spec: RequestSpec) -> None:
    """Some tokens and then a loss in the first epoch; the rest in the next."""
    if spec.key.epoch == 0:
        for token in COUNTED[:5]:
            cluster.emit(spec, [token])
        await asyncio.sleep(0.02)
        cluster.lose(spec.key)
    else:
        await counting_script(cluster, spec)


async def test_a_lost_request_goes_on_where_it_was(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.script = until_lost
    assert await tokens(gateway, seed=5, wait_objective_s=2.5, priority=-7) == [COUNTED]
    first, second = cluster.submitted
    assert (first.wait_objective_s, second.wait_objective_s) == (2.5, 2.5)
    assert (first.priority, second.priority) == (-7, -7)
    assert (first.key.epoch, second.key.epoch) == (0, 1)
    assert second.output_token_ids[:5] == COUNTED[:5]
    assert second.prompt_token_ids == first.prompt_token_ids
    assert second.sampling == first.sampling, "the seed and the limits count from the answer's beginning"


async def test_a_streams_chunks_repeat_nothing_over_a_loss(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.script = until_lost
    text = (await ask(gateway, stream=True)).text
    seen: list[int] = []
    for line in text.split("\n\n")[:-2]:
        seen += httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"][0]["token_ids"]
    assert seen == COUNTED
    assert "error" not in text


async def test_answers_that_are_lost_before_a_token_stay_a_group(cluster: FakeCluster, gateway: RunningGateway) -> None:
    async def lose_all(cluster: FakeCluster, spec: RequestSpec) -> None:
        if spec.key.epoch == 0:
            if spec is cluster.submitted[2]:
                cluster.lose(*(other.key for other in cluster.submitted))
        else:
            await counting_script(cluster, spec)

    cluster.script = lose_all
    assert await tokens(gateway, n=3) == [COUNTED] * 3
    assert [len(group) for group in cluster.submissions] == [3, 3]
    old, new = ({spec.group_id for spec in group} for group in cluster.submissions)
    assert len(new) == 1
    assert not old & new, "a new group shares no blocks with what is left of the old one"


async def test_answers_that_have_tokens_go_on_each_by_itself(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.script = until_lost
    assert await tokens(gateway, n=2) == [COUNTED] * 2
    again = [spec for spec in cluster.submitted if spec.key.epoch == 1]
    assert all(spec.prompt_token_ids and spec.group_size == 1 for spec in again)
    assert len({spec.group_id for spec in again}) == 2


@pytest.mark.parametrize("begun", [True, False])
async def test_a_call_of_several_prompts_is_refused_whole_or_not_at_all(
    cluster: FakeCluster, gateway: RunningGateway, *, begun: bool
) -> None:
    """The second prompt is predicted to miss an objective; the first may have tokens by then."""

    async def overloaded(cluster: FakeCluster, spec: RequestSpec) -> None:
        first, *more = cluster.submitted
        if spec.key.epoch == 0 and more == [spec]:
            if begun:
                cluster.emit(first, COUNTED[:1])
                await asyncio.sleep(0.02)
            cluster.reject(OverloadedError("each token is predicted to take 1 s", retry_after_s=1.0), spec.key)
            if begun:
                cluster.emit(first, COUNTED[1:], finish=FinishReason.LENGTH)
        elif spec.key.epoch:
            await counting_script(cluster, spec)

    cluster.script = overloaded
    answer = await ask(gateway, prompt=["a", "b"], stream=True)
    if not begun:
        assert answer.status_code == 429
        return
    assert answer.status_code == 200
    assert "error" not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    assert [spec.key.epoch for spec in cluster.submitted] == [0, 0, 1]


async def test_a_request_that_is_lost_again_and_again_ends(
    cluster: FakeCluster, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_FIRST_BACKOFF_S", 0.001)

    async def lose(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.lose(spec.key, reason="no luck")

    cluster.script = lose
    answer = await ask(gateway)
    assert answer.status_code == 503
    assert "no luck" in answer.json()["error"]["message"]
    assert [spec.key.epoch for spec in cluster.submitted] == list(range(ledger_module.MAX_SETBACKS + 1))


async def test_being_cancelled_behind_the_gateways_back_is_a_loss(
    cluster: FakeCluster, gateway: RunningGateway
) -> None:
    async def cancelled(cluster: FakeCluster, spec: RequestSpec) -> None:
        match spec.key.epoch:
            case 0:
                cluster.emit(spec, COUNTED[:3], finish=FinishReason.CANCELLED)
            case 1:
                cluster.reject(CancelledError("gone"), spec.key)
            case _:
                await counting_script(cluster, spec)

    cluster.script = cancelled
    assert await tokens(gateway) == [COUNTED]


async def test_late_and_repeated_tokens_are_dropped(cluster: FakeCluster, gateway: RunningGateway) -> None:
    async def confused(cluster: FakeCluster, spec: RequestSpec) -> None:
        if spec.key.epoch == 0:
            cluster.emit(spec, COUNTED[:4])
            cluster.emit(spec, COUNTED[2:4], position=2)
            cluster.emit(spec, COUNTED[3:6], position=3)
            await asyncio.sleep(0.02)
            cluster.lose(spec.key)
            await asyncio.sleep(0.05)
            cluster.emit(spec, [999], position=6)
        else:
            await asyncio.sleep(0.1)
            await counting_script(cluster, spec)

    cluster.script = confused
    assert await tokens(gateway) == [COUNTED]
    assert cluster.submitted[1].output_token_ids[:6] == COUNTED[:6]


async def test_tokens_that_overtake_others_are_put_in_order(cluster: FakeCluster, gateway: RunningGateway) -> None:
    async def shuffled(cluster: FakeCluster, spec: RequestSpec) -> None:
        for position in (3, 1, 2, 0, 15, 4):
            count = 11 if position == 4 else 1
            finish = FinishReason.LENGTH if position == 15 else None
            cluster.emit(spec, COUNTED[position : position + count], position=position, finish=finish)

    cluster.script = shuffled
    assert await tokens(gateway) == [COUNTED]
    assert len(cluster.submitted) == 1


async def test_missing_tokens_are_asked_for_again(
    cluster: FakeCluster, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "GAP_S", 0.1)

    async def gap(cluster: FakeCluster, spec: RequestSpec) -> None:
        if spec.key.epoch == 0:
            cluster.emit(spec, COUNTED[:2])
            cluster.emit(spec, COUNTED[5:8], position=5)
        else:
            await counting_script(cluster, spec)

    cluster.script = gap
    assert await tokens(gateway) == [COUNTED]


@pytest.mark.parametrize(("delivered", "finish"), [(COUNTED, "length"), ([*COUNTED[:3], 5], "stop")])
async def test_a_loss_after_the_last_token_ends_the_answer(
    cluster: FakeCluster, gateway: RunningGateway, delivered: list[int], finish: str
) -> None:
    async def all_but_the_end(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, delivered)
        (answer,) = gateway.server.ledger._open.values()
        await cluster.wait_for(lambda: answer.tokens == delivered)
        cluster.lose(spec.key)

    cluster.script = all_but_the_end
    (choice,) = (await ask(gateway)).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (delivered, finish)
    assert len(cluster.submitted) == 1


async def test_a_rejection_is_the_clients_error(cluster: FakeCluster, gateway: RunningGateway) -> None:
    async def reject(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.reject(UnavailableError("no decode instance"), spec.key)

    cluster.script = reject
    answer = await ask(gateway, n=2)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no decode instance")
    assert len(gateway.server.ledger) == 0


async def test_the_cluster_says_how_long_a_request_may_be(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.publish_capacity(20)
    await cluster.wait_for(lambda: gateway.server.model.capacity_tokens == 20)
    answer = await ask(gateway, max_tokens=20)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "cluster can hold" in answer.json()["error"]["message"]


async def test_a_scheduler_that_does_not_know_its_capacity_yet_changes_nothing(
    cluster: FakeCluster, gateway: RunningGateway
) -> None:
    cluster.publish_capacity(20)
    await cluster.wait_for(lambda: gateway.server.model.capacity_tokens == 20)
    cluster.capacity_tokens = 0
    cluster.break_links()
    await cluster.wait_for(lambda: len(cluster.hellos) == 2 and gateway.server.scheduler.up)
    assert gateway.server.model.capacity_tokens == 20


# ---- the link to the scheduler


async def test_a_broken_link_submits_again_what_has_no_token(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.script = silent_script
    waiting = asyncio.create_task(tokens(gateway))
    await cluster.wait_for(lambda: len(cluster.submitted) == 1)
    cluster.script = counting_script
    cluster.break_links()
    assert await waiting == [COUNTED]
    assert [spec.key.epoch for spec in cluster.submitted] == [0, 1]
    assert len(cluster.hellos) == 2
    assert not cluster.hellos[1].running


async def test_a_broken_link_leaves_running_requests_alone(cluster: FakeCluster, gateway: RunningGateway) -> None:
    go_on = asyncio.Event()

    async def pausing(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, COUNTED[:3])
        await go_on.wait()
        await counting_script(cluster, spec)

    cluster.script = pausing
    waiting = asyncio.create_task(tokens(gateway))
    await cluster.wait_for(gateway.server.ledger.on_link_up)
    cluster.break_links()
    await cluster.wait_for(lambda: len(cluster.hellos) == 2)
    (running,) = cluster.hellos[1].running
    assert running.request_id == cluster.submitted[0].key.request_id
    go_on.set()
    assert await waiting == [COUNTED]
    assert len(cluster.submitted) == 1


@pytest.mark.parametrize("delivered", [0, 3])
@pytest.mark.parametrize("noticed", ["tick", "link", "prefill", "decode"])
async def test_a_request_that_no_process_has_is_submitted_again(
    cluster: FakeCluster, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, delivered: int, noticed: str
) -> None:
    """The scheduler knows that it ended, but the worker died before it could tell the gateway."""
    monkeypatch.setattr(ledger_module, "QUIET_S", 0.1)
    monkeypatch.setattr(ledger_module, "ASK_EVERY_S", 0.1 if noticed == "tick" else 1e9)

    async def dies(cluster: FakeCluster, spec: RequestSpec) -> None:
        if spec.key.epoch:
            await counting_script(cluster, spec)
            return
        if noticed in ("prefill", "decode"):  # its stream is open, and breaks
            cluster.emit(spec, COUNTED[:1], role=noticed)
        if delivered:
            cluster.emit(spec, COUNTED[1:delivered] if spec.output_token_ids else COUNTED[:delivered])
        await asyncio.sleep(0.05)
        cluster.forget(spec.key)
        if noticed == "link":  # a request that began to run after `hello` was not named in it
            gateway.server.ledger.resubmit()
        elif noticed != "tick":
            await cluster.break_workers()

    cluster.script = dies
    assert await tokens(gateway) == [COUNTED]
    again = cluster.submitted[1]
    assert again.output_token_ids[:delivered] == COUNTED[:delivered]


async def test_what_the_scheduler_no_longer_knows_may_have_ended(
    cluster: FakeCluster, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "QUIET_S", 0.5)
    monkeypatch.setattr(ledger_module, "ASK_EVERY_S", 0.1)

    async def ends_late(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, COUNTED[:1], role="prefill")
        cluster.forget(spec.key)
        await cluster.wait_for(lambda: cluster.asked)
        await asyncio.sleep(0.1)  # the answer overtakes the last tokens
        cluster.emit(spec, COUNTED[1:], finish=FinishReason.LENGTH)

    cluster.script = ends_late
    assert await tokens(gateway) == [COUNTED]
    assert len(cluster.submitted) == 1


async def test_what_waits_for_its_turn_is_asked_about_and_left_alone(
    cluster: FakeCluster, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "QUIET_S", 0.05)
    monkeypatch.setattr(ledger_module, "ASK_EVERY_S", 0.05)
    go_on = asyncio.Event()

    async def waits(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, COUNTED[:1], role="prefill")
        await go_on.wait()
        await counting_script(cluster, spec)

    cluster.script = waits
    waiting = asyncio.create_task(tokens(gateway))
    await cluster.wait_for(lambda: len(cluster.asked) >= 2)
    assert cluster.asked[-1] == [cluster.submitted[0].key]
    go_on.set()
    assert await waiting == [COUNTED]
    assert len(cluster.submitted) == 1


async def test_what_waits_to_be_submitted_again_is_claimed(
    cluster: FakeCluster, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_FIRST_BACKOFF_S", 0.5)

    async def lose(cluster: FakeCluster, spec: RequestSpec) -> None:
        if spec.key.epoch < 2:
            cluster.lose(spec.key)
        if spec.key.epoch == 1:  # the second loss in a row: the next epoch waits
            cluster.ask_whose(spec.key, RequestKey(spec.key.request_id, 3), RequestKey("unknown", 1))
        if spec.key.epoch == 2:
            cluster.ask_whose(RequestKey(spec.key.request_id, 1), spec.key)
            await cluster.wait_for(lambda: len(cluster.claims) == 2)
            await counting_script(cluster, spec)

    cluster.script = lose
    assert await tokens(gateway) == [COUNTED]
    keys = [spec.key for spec in cluster.submitted]
    assert cluster.claims == [[keys[1]], [keys[2]]]


async def test_a_request_made_while_there_is_no_scheduler_waits_for_it(cluster: FakeCluster) -> None:
    cluster.states["scheduler"] = ""
    async with running_gateway(cluster, wait=False) as gateway:
        await gateway.server.wait_model(5.0)
        waiting = asyncio.create_task(tokens(gateway))
        await asyncio.sleep(0.1)
        assert not cluster.submitted
        assert not waiting.done()
        cluster.set_state("scheduler", "ready")
        assert await waiting == [COUNTED]
        assert cluster.submitted[0].key.epoch == 0


async def test_without_a_scheduler_a_request_ends_in_time(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "SCHEDULER_WAIT_S", 0.2)
    cluster.states["scheduler"] = ""
    async with running_gateway(cluster, wait=False) as gateway:
        await gateway.server.wait_model(5.0)
        answer = await ask(gateway)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == (
        "there was no scheduler for 0.2 s (the supervisor has not named a scheduler)"
    )


async def test_one_that_is_being_replaced_on_purpose_is_waited_for_as_long_as_it_may_take(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "SCHEDULER_WAIT_S", 0.2)
    cluster.states["scheduler"] = ""
    cluster.restart.CopyFrom(sv.Restart(since_ns=1, roles=["scheduler"]))
    async with running_gateway(cluster, wait=False) as gateway:
        await gateway.server.wait_model(5.0)
        waiting = asyncio.create_task(tokens(gateway))
        await asyncio.sleep(2.5)  # the ledger looks once a second
        assert not waiting.done()
        cluster.restart.done = True
        cluster.publish_view()
        with pytest.raises(AssertionError, match=r"no scheduler for 0\.2 s"):
            await waiting


async def test_without_a_scheduler_the_error_says_where_it_was_and_why_it_is_not_reached(
    cluster: FakeCluster, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "SCHEDULER_WAIT_S", 0.2)
    server = gateway.server
    assert server.host is not None
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent = f"127.0.0.1:{listening.getsockname()[1]}"
    await server.scheduler.follow(silent, 2**62)
    await server.host.close()
    monkeypatch.setattr(server.host, "_heard_at", time.monotonic() - 60.0)
    message: str = (await ask(gateway)).json()["error"]["message"]
    assert message.startswith(
        f"there was no scheduler for 0.2 s (the last scheduler, at {silent}, is unreachable: UNAVAILABLE"
    )
    assert f"the supervisor at {server.supervisor_address} has been silent for 6" in message


async def test_a_cancel_waits_for_the_scheduler(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.script = silent_script
    waiting = asyncio.create_task(ask(gateway))
    await cluster.wait_for(lambda: cluster.submitted)
    cluster.set_state("scheduler", "")  # the view alone changes nothing; the link must break
    await gateway.server.scheduler.close()
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await cluster.wait_for(lambda: len(gateway.server.ledger) == 0)
    assert not cluster.cancelled
    cluster.set_state("scheduler", "ready")
    await cluster.wait_for(lambda: cluster.cancelled)
    assert cluster.cancelled == [cluster.submitted[0].key]


async def test_what_an_older_incarnation_of_a_worker_says_is_dropped(gateway: RunningGateway) -> None:
    from alignedserve.gateway.token_sink import TokenSink

    heard: list[int] = []

    class Listening:
        def on_tokens(self, batch: gw.TokenBatch) -> None:
            heard.append(batch.sender.incarnation)

        def on_worker_gone(self, role: str, worker_id: str) -> None:
            return

    sink = TokenSink(Listening())  # type: ignore[arg-type]

    async def batches(*incarnations: int) -> AsyncIterator[gw.TokenBatch]:
        for incarnation in incarnations:
            yield gw.TokenBatch(sender=pb.ProcessKey(role="decode", id="decode-0", incarnation=incarnation))

    await sink.Push(batches(7), None)  # type: ignore[arg-type]
    await sink.Push(batches(9, 9), None)  # type: ignore[arg-type]
    await sink.Push(batches(7), None)  # type: ignore[arg-type]
    assert heard == [7, 9, 9]
