"""A pool with a shard on each node: prompts go where there is room, copies move, and a lost node's KV is found."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.metrics import Page
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import Action, Prefetch, ReleasePool, ReportLost, StartPrefill
from support.core_cell import BLOCK, CoreCell, decode_report, key, only

TWO_NODES = {"p0": "k0", "d0": "k0", "p1": "k1", "d1": "k1"}
APART = {"p0": "k0", "p1": "k1", "d0": "k2"}


def two_nodes(**more: Any) -> CoreCell:
    return CoreCell(prefills=2, decodes=2, homes=TWO_NODES, **more)


def again(name: str, tokens: int, base: int, pool_id: str, *, whole: bool = False, most: int = 60) -> ev.Submitted:
    """A new epoch, with a shard's part of the request."""
    blocks = -(-base // BLOCK)
    meta = ev.RequestMeta(key(name, 1), tokens, most, name, "gw", base, blocks, blocks, whole, pool_id)
    return ev.Submitted((meta,))


def started(actions: list[Action]) -> list[str]:
    return [start.prefill_id for start in only(actions, StartPrefill)]


def drops(actions: list[Action]) -> list[ReleasePool]:
    return [action for action in only(actions, ReleasePool) if action.dropped]


def lost(actions: list[Action]) -> set[RequestKey]:
    return {lost for action in only(actions, ReportLost) for lost in action.keys}


def books(cell: CoreCell) -> dict[str, int]:
    """Blocks that are committed, by shard."""
    return {shard.pool_id: shard.committed for shard in cell.core._state.ledger.shards}


def run(cell: CoreCell, name: str, tokens: int, decode_id: str) -> None:
    """The request decodes at an instance; its copy is where it was prefilled."""
    cell.wait(name, tokens)
    record = cell.core._state.record(key(name))
    assert record.decode_id == decode_id
    cell.do(ev.Joined(decode_id, (key(name),)))


# prompts


def test_a_prompt_goes_to_an_instance_whose_own_shard_has_room() -> None:
    cell = two_nodes(pool=100)
    assert started(cell.submit("a", tokens=40)) == ["p0"]
    cell.do(ev.PoolReported("k1", 100, 3))
    assert started(cell.submit("b", tokens=40)) == ["p0"]
    cell.do(ev.PoolReported("k1", 100, 90))
    assert started(cell.submit("c", tokens=40)) == ["p1"]  # p0 has more to do


def test_the_first_in_line_waits_where_room_is_with_a_busy_instance_and_no_other_overtakes_it() -> None:
    cell = two_nodes(pool=100, queue_tokens=50, growth_reserve=0.0)
    cell.do(ev.PoolReported("k0", 100, 5))
    assert started(cell.submit("busy", tokens=50, most=52)) == ["p1"]
    assert started(cell.submit("a", tokens=40, most=42)) == []
    assert started(cell.submit("small", tokens=4, most=6)) == []
    assert started(cell.do(ev.PoolReported("k0", 100, 100))) == ["p0", "p0"]


def test_a_shard_whose_process_is_away_gets_no_prompt_and_the_others_go_on() -> None:
    cell = two_nodes()
    cell.do(ev.InstanceLost("kv_pool", "k0"))
    assert started(cell.submit("a")) == ["p1"]
    assert cell.core.max_request_tokens() > 0
    cell.do(ev.InstanceLost("kv_pool", "k1"))
    assert cell.core.max_request_tokens() == 0
    assert started(cell.submit("b")) == []
    assert started(cell.do(ev.PoolReported("k0", 100, 100))) == ["p0"]


def test_the_longest_request_fits_in_the_smallest_shard() -> None:
    cell = two_nodes(cache=1000, growth_reserve=0.0)
    cell.do(ev.PoolReported("k1", 50, 50))
    assert cell.core.max_request_tokens() == 50 * BLOCK


def test_room_is_made_in_one_shard_only() -> None:
    cell = two_nodes(pool=30, growth_reserve=0.0, min_batch_requests=1)
    run(cell, "a", 60, "d0")
    run(cell, "b", 40, "d1")
    assert books(cell) == {"k0": 15, "k1": 10}
    (drop,) = drops(cell.submit("c", tokens=80, most=81))
    assert (drop.keys, drop.pool_id) == ((key("b"),), "k1")  # the smaller one is enough


def test_an_idle_instance_of_the_node_that_has_the_base_is_preferred_but_not_waited_for() -> None:
    cell = two_nodes()
    assert started(cell.do(again("a", 41, 38, "k1"))) == ["p1"]
    assert started(cell.do(again("b", 41, 38, "k1"))) == ["p0"]


def test_a_base_in_another_shard_is_copied_whole_and_dropped_there_once_that_is_done() -> None:
    cell = two_nodes(pool=100)
    cell.do(ev.InstanceLost("prefill", "p1"))
    (start,) = only(cell.do(again("a", 41, 38, "k1")), StartPrefill)
    assert (start.prefill_id, start.base_tokens) == ("p0", 38)
    shards = {shard.pool_id: shard for shard in cell.core._state.ledger.shards}
    assert shards["k0"].reserved == 11
    assert books(cell) == {"k0": 0, "k1": 10}
    actions = cell.do(ev.Prefilled(key("a", 1), 41, 11, 11, "k0"))
    assert drops(actions) == [ReleasePool((key("a", 1),), True, (38,), "k1")]
    assert books(cell) == {"k0": 11, "k1": 0}
    assert shards["k0"].reserved == 0


def test_a_base_in_the_own_shard_is_part_of_what_is_reserved() -> None:
    cell = two_nodes(pool=100)
    cell.do(again("a", 41, 38, "k1"))
    shards = {shard.pool_id: shard for shard in cell.core._state.ledger.shards}
    assert (shards["k1"].committed, shards["k1"].reserved) == (10, 1)
    assert drops(cell.do(ev.Prefilled(key("a", 1), 41, 11, 11, "k1"))) == []
    assert books(cell) == {"k0": 0, "k1": 11}


# evictions


def test_what_is_evicted_on_another_node_lies_there_and_its_older_copy_is_dropped() -> None:
    cell = CoreCell(prefills=2, homes=APART)
    cell.wait("a", 40)
    assert books(cell) == {"k0": 10, "k1": 0, "k2": 0}
    cell.do(ev.Joined("d0", (key("a"),)))
    assert drops(cell.do(ev.Returned(key("a"), 45, 12, pool_id="k2"))) == [ReleasePool((key("a"),), True, (40,), "k0")]
    assert books(cell) == {"k0": 0, "k1": 0, "k2": 12}
    cell.do(ev.Joined("d0", (key("a"),)))
    assert drops(cell.do(ev.Returned(key("a"), 50, 13, pool_id="k2"))) == []
    assert books(cell) == {"k0": 0, "k1": 0, "k2": 13}


def test_where_the_copy_was_dropped_for_room_there_is_none_to_drop() -> None:
    cell = CoreCell(prefills=2, homes=APART, pool=100)
    run(cell, "a", 40, "d0")
    cell.do(ev.PoolReported("k0", 100, 0))
    assert books(cell)["k0"] == 0
    assert drops(cell.do(ev.Returned(key("a"), 45, 12, pool_id="k2"))) == []


def test_what_ends_is_released_in_all_shards() -> None:
    cell = two_nodes()
    run(cell, "a", 40, "d0")
    (release,) = only(cell.do(ev.Finished((key("a"),))), ReleasePool)
    assert (release.dropped, release.pool_id) == (False, "")


def test_room_is_made_where_evictions_wait_and_nowhere_else() -> None:
    cell = two_nodes(pool=100)
    for name, pool_id in ("a", "k0"), ("b", "k1"):
        cell.do(again(name, 40, 39, pool_id, whole=True))
        record = cell.core._state.record(key(name, 1))
        cell.do(ev.Joined(record.decode_id, (key(name, 1),)))
    waits = {name: decode_report(name, running=1, shortest=40, longest=40, batch_id=1, waits=5) for name in TWO_NODES}
    assert [drop.keys for drop in drops(cell.do(waits["d1"]))] == [(key("b", 1),)]
    assert [drop.keys for drop in drops(cell.do(waits["d0"]))] == [(key("a", 1),)]


def test_the_last_resort_takes_what_waits_in_the_shard_that_is_full() -> None:
    cell = two_nodes(pool=100)
    for name in "d0", "d1":
        cell.make_busy(name, name=f"busy-{name}")
    cell.core._state.instances.draining = frozenset({"d0", "d1"})  # new requests wait in the pool
    cell.do(again("here", 40, 39, "k0", whole=True))
    cell.do(again("there", 40, 39, "k1", whole=True))
    report = decode_report("d1", free=0, running=1, shortest=10, longest=10, batch_id=1, waits=5)
    gone = lost(cell.do(report))
    for _ in range(30):
        gone |= lost(cell.do(ev.Tick(), after_s=0.05))
        cell.do(report)
    assert key("there", 1) in gone
    assert key("here", 1) not in gone
    assert "KV was dropped" in cell.core.alarm(cell.now_s)


# nodes that go


def test_what_waited_in_a_shard_that_has_gone_is_submitted_again_and_the_rest_goes_on() -> None:
    cell = two_nodes(pool=200, queue_tokens=30)
    run(cell, "runs", 40, "d0")
    cell.make_busy("d0")
    cell.make_busy("d1")
    cell.core._state.instances.draining = frozenset({"d0", "d1"})
    cell.do(again("here", 40, 39, "k0", whole=True))
    cell.do(again("there", 40, 39, "k1", whole=True))
    for name in "fg":
        cell.submit(name, tokens=30)
    cell.do(again("queued", 41, 38, "k1"))
    assert cell.states()["queued"] == 1
    assert lost(cell.do(ev.ShardsChanged(("k0",), (("p0", "k0"), ("d0", "k0"))))) == {key("there", 1)}
    assert list(books(cell)) == ["k0"]
    assert cell.core._state.record(key("queued", 1)).kv_tokens == 0
    assert "decoding" in cell.states()
    actions = cell.do(ev.InstanceLost("prefill", "p1")) + cell.do(ev.Finished((key("f"),)))
    assert [start.base_tokens for start in only(actions, StartPrefill)] == [0]


def test_what_a_decode_instance_was_to_copy_from_a_shard_that_has_gone_is_submitted_again() -> None:
    cell = CoreCell(prefills=2, homes=APART, prefetch=False)
    cell.wait("a", 40)
    assert cell.states() == {"prefetched": 1}
    assert lost(cell.do(ev.ShardsChanged(("k1", "k2"), (("p1", "k1"), ("d0", "k2"))))) == {key("a")}
    assert cell.states() == {}


def test_what_was_written_to_a_shard_that_has_gone_is_lost() -> None:
    cell = two_nodes()
    run(cell, "a", 40, "d0")
    cell.submit("b")
    cell.do(ev.ShardsChanged(("k1",), (("p1", "k1"), ("d1", "k1"))))
    assert lost(cell.do(ev.Returned(key("a"), 45, 12, pool_id="k0"))) == {key("a")}
    assert lost(cell.do(ev.Prefilled(key("b"), 10, 3, 3, "k0"))) == {key("b")}
    (start,) = only(cell.do(again("c", 41, 38, "k0")), StartPrefill)
    assert (start.prefill_id, start.base_tokens) == ("p1", 0)


def test_a_shard_whose_process_is_away_keeps_what_waits_in_it() -> None:
    cell = two_nodes()
    cell.make_busy("d0")
    cell.make_busy("d1")
    cell.core._state.instances.draining = frozenset({"d0", "d1"})
    cell.do(again("a", 40, 39, "k1", whole=True))
    assert lost(cell.do(ev.InstanceLost("kv_pool", "k1"))) == set()
    assert cell.states()["waiting_in_pool"] == 1


def test_a_node_that_comes_has_a_shard_from_its_first_report_on() -> None:
    cell = two_nodes(pool=100)
    cell.do(ev.PoolReported("k0", 100, 3))
    cell.do(ev.PoolReported("k1", 100, 3))
    assert started(cell.submit("a", tokens=40)) == []
    cell.do(ev.ShardsChanged(("k0", "k1", "k2"), (*TWO_NODES.items(), ("p2", "k2"))))
    cell.do(ev.InstanceJoined("prefill", "p2"))
    assert started(cell.do(ev.PrefillReported("p2", 0, 1000, 40, 40, 20, 20))) == []
    assert started(cell.do(ev.PoolReported("k2", 100, 100))) == ["p2"]


# inventories


def test_an_inventory_speaks_for_its_own_shard() -> None:
    cell = two_nodes()
    cell.core._state.instances.draining = frozenset({"d0", "d1"})
    cell.do(again("here", 40, 39, "k0", whole=True))
    cell.do(again("there", 40, 39, "k1", whole=True))
    assert lost(cell.do(ev.PoolInventoryTaken({key("here", 1): (39, 10)}, "k0"))) == set()
    assert lost(cell.do(ev.PoolInventoryTaken({}, "k1"))) == {key("there", 1)}


def test_what_has_come_since_an_inventory_was_asked_for_is_not_missed_in_it() -> None:
    cell = two_nodes()
    cell.core._state.instances.draining = frozenset({"d0", "d1"})
    asked_s = cell.now_s
    cell.now_s += 0.1
    cell.do(again("a", 40, 39, "k0", whole=True))
    assert lost(cell.do(ev.PoolInventoryTaken({}, "k0", asked_s))) == set()
    assert lost(cell.do(ev.PoolInventoryTaken({}, "k0", cell.now_s))) == {key("a", 1)}


@pytest.mark.parametrize("late_answer", [False, True])
def test_a_copy_that_a_drop_did_not_reach_is_dropped_when_it_is_found(late_answer: bool) -> None:
    cell = two_nodes()
    cell.core._state.instances.draining = frozenset({"d0", "d1"})
    cell.do(again("a", 40, 39, "k1", whole=True))
    copies = {key("a", 1): (20, 5)}
    found = cell.do(ev.CopiesFound("k0", copies) if late_answer else ev.PoolInventoryTaken(copies, "k0"))
    assert drops(found) == [ReleasePool((key("a", 1),), True, (20,), "k0")]
    assert drops(cell.do(ev.PoolInventoryTaken({key("a", 1): (39, 10)}, "k1"))) == []


def test_what_may_be_on_its_way_to_a_shard_is_not_dropped_there() -> None:
    cell = two_nodes()
    run(cell, "a", 40, "d0")
    assert drops(cell.do(ev.PoolInventoryTaken({key("a"): (45, 12)}, "k1"))) == []


def test_a_new_core_finds_in_which_shard_each_copy_lies() -> None:
    cell = two_nodes()
    metas = {name: ev.RequestMeta(key(name), 12, 30, "g", "gw") for name in "ab"}
    for name, decode_id in ("a", "d0"), ("b", "d1"):
        held = ev.HeldRequest(metas[name], True, 11, 3, "", ev.BufferKind.BATCH)
        cell.do(ev.InventoryTaken(decode_id, (held,), restore=True))
    cell.do(ev.PoolInventoryTaken({key("a"): (11, 3)}, "k1"))
    cell.do(ev.PoolInventoryTaken({key("b"): (8, 2)}, "k0"))
    assert books(cell) == {"k0": 2, "k1": 3}
    assert drops(cell.do(ev.Returned(key("a"), 14, 4, pool_id="k0"))) == [ReleasePool((key("a"),), True, (11,), "k1")]


# which way candidates go


def through(actions: list[Action]) -> list[tuple[str | None, tuple[RequestKey, ...]]]:
    return [(prefetch.prefill_id, prefetch.keys) for prefetch in only(actions, Prefetch)]


def paired(homes: dict[str, str], *, rooms: tuple[int, int] = (40, 40)) -> CoreCell:
    cell = CoreCell(prefills=2, homes=homes)
    for name, room in zip(("p0", "p1"), rooms, strict=True):
        cell.do(ev.PrefillReported(name, 0, 1000, room, room, 20, 20))
    return cell


def test_of_buffers_that_are_alike_one_on_the_node_of_the_copy_is_taken() -> None:
    homes = {"p0": "k0", "p1": "k1", "d0": "k0"}
    assert through(paired(homes).do(again("a", 40, 39, "k1", whole=True))) == [("p1", (key("a", 1),))]
    assert through(paired(homes).do(again("a", 40, 39, "k0", whole=True))) == [("p0", (key("a", 1),))]
    roomy = paired(homes, rooms=(40, 20))
    assert through(roomy.do(again("a", 40, 39, "k1", whole=True))) == [("p1", (key("a", 1),))]
    full = paired(homes, rooms=(40, 9))
    assert through(full.do(again("a", 40, 39, "k1", whole=True))) == [("p0", (key("a", 1),))]


def test_a_better_link_goes_before_a_nearer_buffer() -> None:
    cell = paired({"p0": "k0", "p1": "k1", "d0": "k0"})
    cell.do(ev.PairsChanged((("d0", ("p0", "p1")),), (("d0", "p1", 1),)))
    assert through(cell.do(again("a", 40, 39, "k1", whole=True))) == [("p0", (key("a", 1),))]


def test_what_lies_on_the_decode_instances_own_node_does_not_go_through_a_buffer_on_another() -> None:
    cell = paired(APART)
    assert through(cell.do(again("a", 40, 39, "k2", whole=True))) == [(None, (key("a", 1),))]
    assert through(paired(APART).do(again("a", 40, 39, "k1", whole=True))) == [("p1", (key("a", 1),))]


def test_a_batch_is_parted_where_its_ways_differ_and_counts_as_one() -> None:
    cell = paired(APART)
    cell.core._state.instances.draining = frozenset({"d0"})
    for name, pool_id in ("a", "k2"), ("b", "k0"), ("c", "k2"):
        cell.do(again(name, 40, 39, pool_id, whole=True))
    actions = cell.do(ev.DrainingChanged(frozenset()))
    assert through(actions) == [(None, (key("a", 1), key("c", 1))), ("p0", (key("b", 1),))]
    assert len({prefetch.batch_id for prefetch in only(actions, Prefetch)}) == 1
    decode = cell.core._state.instances.decode["d0"]
    assert sum(decode.candidate_blocks.values()) == 30


def test_no_more_is_announced_directly_than_where_there_are_no_buffers() -> None:
    cell = CoreCell(prefills=2, homes=APART, max_batch_blocks=15)
    cell.core._state.instances.draining = frozenset({"d0"})
    for name in "ab":
        cell.do(again(name, 28, 27, "k2", whole=True))
    ways = through(cell.do(ev.DrainingChanged(frozenset())))
    assert [prefill_id for prefill_id, _ in ways] == [None]
    cell = CoreCell(prefills=2, homes=APART, max_batch_blocks=15)
    cell.make_busy("d0", free=100)
    for name in "ab":  # late: half as many
        cell.do(again(name, 20, 19, "k2", whole=True), after_s=60.0)
    late = {cell.core._state.record(key(name, 1)).prefill_id for name in "ab"}
    assert late == {"", "p0"}


def test_a_shard_that_is_full_is_not_counted_as_room_for_new_requests() -> None:
    cell = two_nodes(pool=100, max_wait_s=1.0)
    run(cell, "a", 40, "d0")
    free = cell.core.room(cell.now_s)
    cell.do(ev.PoolReported("k0", 100, 0))
    assert cell.core.room(cell.now_s) == free  # the other has room
    page = Page()
    cell.core.show_metrics(page, cell.now_s)
    assert "alignedserve_predicted_ttft_seconds" in {family.name for family in page.collect()}
