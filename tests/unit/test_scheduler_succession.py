"""A scheduler that has just started: its predecessor's requests are still out there, and the pool holds their KV."""

from __future__ import annotations

from alignedserve.decode_worker.held import Held
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey
from alignedserve.scheduler.adoption import Adoption, adopted_whole
from alignedserve.scheduler.succession import PATIENCE_S, Succession
from alignedserve.scheduler.wire import held_requests

KEY = RequestKey("a", 1)


def spec(epoch: int = 1, prompt: int = 6, answer: int = 3, gateway: str = "gw") -> pb.RequestSpec:
    return pb.RequestSpec(
        key=pb.RequestKey(request_id="a", epoch=epoch),
        prompt_token_ids=range(prompt),
        output_token_ids=range(answer),
        gateway_id=gateway,
    )


def holding(tokens: int, epoch: int = 1) -> kp.Holding:
    key = pb.RequestKey(request_id="a", epoch=epoch)
    return kp.Holding(key=key, kv_tokens=tokens, block_ids=range(-(-tokens // 4)))


def test_a_new_scheduler_is_told_of_the_objective_that_a_request_has_for_its_wait() -> None:
    asked = spec()
    asked.wait_objective_s = 2.5
    inventory = dw.DecodeInventory(
        requests=[
            Held(pb.StoredRequest(spec=asked, kv_tokens=8)).describe(),
            Held(pb.StoredRequest(spec=spec(7))).describe(),
        ]
    )
    first, second = held_requests(dw.DecodeInventory.FromString(inventory.SerializeToString()))
    assert (first.meta.wait_objective_s, second.meta.wait_objective_s) == (2.5, 0.0)


def test_messages_are_kept_until_everyone_who_is_up_has_said_what_it_holds() -> None:
    succession: Succession[str] = Succession()
    succession.keep("gw", "first")
    assert succession.end(0.0) is None  # nobody knows yet who is up
    succession.expect([("decode", "d0"), ("decode", "d1"), ("kv_pool", "pool"), ("prefill", "p0")], 1.0)
    succession.heard("decode", "d0")
    succession.heard("kv_pool", "pool")
    succession.keep("gw", "second")
    assert succession.end(1.1) is None
    succession.expect([("decode", "d0"), ("kv_pool", "pool")], 1.2)  # d1 has died
    assert succession.end(1.2) == [("gw", "first"), ("gw", "second")]
    assert succession.over
    assert succession.end(1.3) is None


def test_one_that_never_says_what_it_holds_is_not_waited_for_for_ever() -> None:
    succession: Succession[str] = Succession()
    succession.expect([("decode", "d0")], 1.0)
    assert succession.end(0.9 + PATIENCE_S) is None
    assert succession.end(1.0 + PATIENCE_S) == []


def test_a_cluster_that_has_just_started_waits_for_nobody() -> None:
    succession: Succession[str] = Succession()
    succession.expect([], 1.0)
    assert succession.end(1.0) == []


def test_the_pool_is_asked_for_what_can_be_of_use_only() -> None:
    adoption = Adoption()
    assert not adoption.wants([spec(epoch=0)])
    assert not adoption.wants([spec(), spec()])  # a group has no token yet
    assert adoption.wants([spec()])
    (asked,) = adoption.ask(KEY, spec(), 1.0).holdings
    assert asked.kv_tokens == 8  # the newest token's KV is computed by the next pass
    assert adoption.ask_again(2.0).holdings == [asked]
    assert not adoption.ask_again(3.0, after_s=2.0).holdings
    assert adoption.ask_again(4.0, after_s=2.0).holdings == [asked]
    assert adoption.answered(holding(8)) == (KEY, spec())
    assert adoption.bases[KEY].kv_tokens == 8
    assert adoption.answered(holding(8)) is None
    adoption.forget(KEY)
    assert not adoption.bases


def test_a_newer_epoch_takes_the_place_of_one_that_waits() -> None:
    adoption = Adoption()
    adoption.ask(KEY, spec(), 1.0)
    assert adoption.replaced_by(RequestKey("a", 2)) == KEY
    adoption.ask(RequestKey("a", 2), spec(epoch=2), 1.0)
    assert adoption.answered(holding(8)) is None
    assert len(adoption) == 1
    assert adoption.of_gateway("gw") == [RequestKey("a", 2)]
    assert adoption.forget(RequestKey("a", 2))
    assert not adoption.forget(RequestKey("a", 2))


def test_only_complete_kv_of_a_request_with_a_token_needs_no_prefill() -> None:
    whole = adopted_whole(spec(), holding(8), "pool")
    assert whole is not None
    assert (whole.store_id, whole.kv_tokens, list(whole.pool_block_ids)) == ("pool", 8, [0, 1])
    assert adopted_whole(spec(), holding(7), "pool") is None
    assert adopted_whole(spec(answer=0), holding(5), "pool") is None
