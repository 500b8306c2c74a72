"""A new scheduler: its predecessor's requests still exist, and the pool holds their KV."""

from __future__ import annotations

from alignedserve.decode_worker.held import Held
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey
from alignedserve.scheduler.process.adoption import AWAY_S, Adoption
from alignedserve.scheduler.process.messaging import held_requests
from alignedserve.scheduler.process.succession import PATIENCE_S, Succession

KEY = RequestKey("a", 1)


def head(epoch: int = 1) -> pb.RequestHead:
    key = pb.RequestKey(request_id="a", epoch=epoch)
    return pb.RequestHead(key=key, prompt_tokens=6, output_tokens=3, gateway_id="gw")


def holding(tokens: int, epoch: int = 1) -> kp.Holding:
    key = pb.RequestKey(request_id="a", epoch=epoch)
    return kp.Holding(key=key, kv_tokens=tokens, block_ids=range(-(-tokens // 4)), pool_id="pool")


def test_a_new_scheduler_is_told_of_a_request_s_objective_for_its_wait_and_of_its_priority() -> None:
    asked = pb.RequestSpec(wait_objective_s=2.5, priority=-7)
    inventory = dw.DecodeInventory(
        requests=[Held(pb.StoredRequest(spec=spec, kv_tokens=8)).describe() for spec in (asked, pb.RequestSpec())]
    )
    first, second = held_requests(dw.DecodeInventory.FromString(inventory.SerializeToString()))
    assert (first.meta.wait_objective_s, second.meta.wait_objective_s) == (2.5, 0.0)
    assert (first.meta.priority, second.meta.priority) == (-7, 0)


def test_messages_are_kept_until_every_running_process_has_reported_what_it_holds() -> None:
    succession: Succession[str] = Succession()
    succession.keep("gw", "first")
    assert succession.end(0.0) is None  # the running processes are not known yet
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


def test_a_cluster_that_has_just_started_waits_for_no_process() -> None:
    succession: Succession[str] = Succession()
    succession.expect([], 1.0)
    assert succession.end(1.0) == []


def test_the_pool_is_asked_for_what_can_be_of_use_only() -> None:
    adoption = Adoption()
    assert not adoption.wants([head(epoch=0)])
    assert not adoption.wants([head(), head()])  # a group has no token yet
    assert adoption.wants([head()])
    asked = [head()]
    assert list(adoption.ask(KEY, head(), ["pool"], 1.0).heads) == asked
    assert list(adoption.ask_again(["pool"], 2.0)["pool"].heads) == asked
    assert not adoption.ask_again(["pool"], 3.0, after_s=2.0)
    assert list(adoption.ask_again(["pool"], 4.0, after_s=2.0)["pool"].heads) == asked
    assert adoption.end(KEY, ["pool"], 1000.0) is None
    assert adoption.answered("pool", holding(8)) == kp.Holding()
    found = adoption.end(KEY, ["pool"], 5.0)
    assert found is not None
    assert (found.key, found.head, found.base.kv_tokens) == (KEY, head(), 8)
    assert adoption.bases[KEY].kv_tokens == 8
    assert KEY not in adoption
    assert adoption.end(KEY, ["pool"], 5.0) is None
    adoption.forget(KEY)
    assert not adoption.bases


def test_a_newer_epoch_takes_the_place_of_one_that_waits() -> None:
    adoption = Adoption()
    adoption.ask(KEY, head(), ["pool"], 1.0)
    assert adoption.replaced_by(RequestKey("a", 2)) == KEY
    adoption.ask(RequestKey("a", 2), head(epoch=2), ["pool"], 1.0)
    assert KEY not in adoption
    assert len(adoption) == 1
    assert adoption.of_gateway("gw") == [RequestKey("a", 2)]
    assert adoption.forget(RequestKey("a", 2))
    assert not adoption.forget(RequestKey("a", 2))


def test_what_needs_no_prefill_needs_no_base() -> None:
    adoption = Adoption()
    adoption.ask(KEY, head(), ["pool"], 1.0)
    whole = holding(8)
    whole.whole = True
    adoption.answered("pool", whole)
    found = adoption.end(KEY, ["pool"], 5.0)
    assert found is not None
    assert found.base.whole
    assert not adoption.bases


SHARDS = ["k0", "k1", "k2"]


def part(tokens: int) -> kp.Holding:
    found = holding(tokens)
    found.pool_id = ""
    return found


def test_of_all_shards_answers_the_longest_counts_and_the_others_are_dropped() -> None:
    adoption = Adoption()
    adoption.ask(KEY, head(), SHARDS, 1.0)
    assert not adoption.answered("k1", part(5)).kv_tokens
    assert adoption.end(KEY, SHARDS, 1.1) is None
    worse = adoption.answered("k0", part(7))
    assert (worse.pool_id, worse.kv_tokens) == ("k1", 5)
    worse = adoption.answered("k2", part(6))
    assert (worse.pool_id, worse.kv_tokens) == ("k2", 6)
    found = adoption.end(KEY, SHARDS, 1.2)
    assert found is not None
    assert (found.base.pool_id, found.base.kv_tokens) == ("k0", 7)
    assert adoption.bases[KEY].pool_id == "k0"


def test_a_shard_that_answers_twice_drops_nothing_of_its_own() -> None:
    adoption = Adoption()
    adoption.ask(KEY, head(), SHARDS, 1.0)
    assert not adoption.answered("k0", part(7)).kv_tokens
    assert not adoption.answered("k0", part(7)).kv_tokens
    assert set(adoption.ask_again(SHARDS, 5.0)) == {"k1", "k2"}


def test_a_shard_that_is_away_is_waited_for_no_longer_than_its_successor_takes() -> None:
    adoption = Adoption()
    adoption.ask(KEY, head(), SHARDS, 1.0)
    adoption.answered("k0", part(3))
    adoption.answered("k2", part(0))
    assert adoption.end(KEY, ["k0", "k2"], 0.9 + AWAY_S) is None
    assert adoption.end(KEY, SHARDS, 9.0 + AWAY_S) is None  # it is back, and will answer
    assert [found.base.kv_tokens for found in adoption.end_all(["k0", "k2"], 1.0 + AWAY_S)] == [3]


def test_where_all_of_it_is_found_no_absent_process_is_waited_for() -> None:
    adoption = Adoption()
    adoption.ask(KEY, head(), SHARDS, 1.0)
    adoption.answered("k0", part(8))
    assert adoption.end(KEY, SHARDS, 1.0) is None
    assert adoption.end(KEY, ["k0"], 1.0) is not None


def test_a_shard_that_has_gone_is_not_waited_for_nor_its_answer_used() -> None:
    adoption = Adoption()
    adoption.ask(KEY, head(), SHARDS, 1.0)
    adoption.answered("k0", part(7))
    adoption.answered("k1", part(5))
    adoption.lose(["k0", "k2"])
    (found,) = adoption.end_all(["k1"], 1.0)
    assert not found.base.kv_tokens
    assert not adoption.bases


def test_while_no_shard_is_known_a_submission_waits_for_the_first() -> None:
    adoption = Adoption()
    adoption.ask(KEY, head(), [], 1.0)
    assert adoption.end_all([], 100.0) == []
    assert set(adoption.ask_again(["k0"], 100.0)) == {"k0"}
    assert adoption.end_all(["k0"], 100.0) == []
    adoption.answered("k0", part(0))
    assert len(adoption.end_all(["k0"], 100.0)) == 1
