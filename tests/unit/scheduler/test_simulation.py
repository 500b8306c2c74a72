"""The real decisions in a small cell: nothing is lost, stuck, leaked or starved, and a seed is reproducible."""

import random
from dataclasses import replace
from functools import partial

import pytest

from alignedserve.config import SchedulerConfig
from alignedserve.scheduler.core import actions
from support.small_cell import Request, Shape, SmallCell


def run(shape):
    cell = SmallCell(shape)
    cell.arrive_at_random()
    cell.run()
    cell.check_nothing_is_left()
    return cell


def random_shape(seed):
    """Sizes from comfortable to absurd: a pool that one request fills, buffers that hold none."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    cache = rng.choice([30, 40, 80, 200])
    max_prompt = min(60, cache * block_size // 2)
    largest = (max_prompt + 40) // block_size + 2
    return Shape(
        seed=seed,
        block_size=block_size,
        prefills=rng.choice([1, 1, 2, 3]),
        decodes=rng.choice([1, 1, 2, 3]),
        prefetch=rng.random() < 0.7,
        pool_blocks=rng.choice([1, 2, 4, 20]) * max(cache, largest) * 11 // 10 + 1,  # a reserve is kept
        prefill_cache=max(rng.choice([20, 60, 200]), largest),
        decode_cache=max(cache, largest),
        batch_buffer=rng.choice([2, 8, 16, 40]),
        requests_buffer=rng.choice([0, 2, 12, 40]),
        max_running=rng.choice([1, 3, 16, 64]),
        groups=rng.choice([20, 60]),
        rate=rng.choice([5.0, 60.0, 1000.0]),
        max_prompt=max_prompt,
        cancel_share=rng.choice([0.0, 0.0, 0.3, 0.9]),
        scheduler=SchedulerConfig(
            policy=rng.choice(["aligned", "aligned", "fcfs"]),
            min_batch_requests=rng.choice([1, 4, 36]),
            leaf_tokens=4,
            max_batch_share=rng.choice([0.1, 0.4, 1.0]),
            cut_sibling=rng.random() < 0.5,
            join_window=rng.choice([0.0, 0.25, 1.0]),
            flush_after_s=rng.choice([0.0, 0.0, 0.2]),
            starvation_after_s=rng.choice([0.05, 0.5, 5.0]),
        ),
    )


@pytest.mark.parametrize("seed", range(30))
def test_every_request_ends_with_its_tokens_and_nothing_is_left(seed):
    shape = random_shape(seed)
    cell = run(shape)
    for request in cell.requests.values():
        assert request.ended in ("finished", "cancelled")
        assert request.ended == "cancelled" or request.tokens == request.answer
        assert request.ended == "finished" or shape.cancel_share > 0


@pytest.mark.parametrize("seed", range(16))
def test_losing_any_instance_loses_no_request(seed):
    shape = random_shape(1000 + seed)
    cell = SmallCell(shape)
    cell.arrive_at_random()
    rng = random.Random(seed)
    for _ in range(6):
        role = rng.choice(["prefill", "decode", "decode", "pool"])
        name = f"{role}-{rng.randrange(shape.prefills if role == 'prefill' else shape.decodes)}"

        def lose(role=role, name=name):
            if role == "pool":
                cell.lose_pool()
            elif role == "prefill" and name in cell.prefills:
                cell.lose_prefill(name)
            elif role == "decode" and name in cell.decodes:
                cell.lose_decode(name)

        cell.at(rng.uniform(0.0, 2.0), lose)
    cell.run()
    cell.check_nothing_is_left()
    for request in cell.requests.values():
        assert request.ended == "cancelled" or request.tokens == request.answer


@pytest.mark.parametrize("seed", range(16))
def test_with_a_shard_on_each_node_every_request_ends_with_its_tokens(seed):
    shape = replace(random_shape(3000 + seed), nodes=2 + seed % 2)
    cell = run(shape)
    assert len(cell.shards.pools) == shape.nodes
    for request in cell.requests.values():
        assert request.ended == "cancelled" or request.tokens == request.answer
    moved = [action for _, action in cell.log if isinstance(action, actions.ReleasePool) and action.pool_id]
    assert all(action.dropped for action in moved)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_evicted_far_from_its_prefill_moves_and_every_shard_is_empty_at_the_end(seed, prefetch):
    """One node prefills and two decode, with caches too small for the load."""
    cell = run(Shape(seed=seed, nodes=3, prefills=1, decodes=2, prefetch=prefetch, requests_buffer=0, max_answer=80))
    prefilled_in = cell.shards.home("prefill-0").name
    moved = [a for _, a in cell.log if isinstance(a, actions.ReleasePool) and a.pool_id == prefilled_in]
    assert cell.counts["evicted"] > 20
    assert sum(len(action.keys) for action in moved) > 5
    ways = {action.prefill_id for _, action in cell.log if isinstance(action, actions.Prefetch)}
    assert ways == {None, "prefill-0"} if prefetch else {None}


@pytest.mark.parametrize("seed", range(24))
def test_losing_nodes_instances_and_pool_processes_loses_no_request(seed):
    shape = replace(random_shape(4000 + seed), nodes=2 + seed % 2)
    cell = SmallCell(shape)
    cell.arrive_at_random()
    rng = random.Random(seed)
    for turn in range(6):
        kind = ("node", "pool", "decode", "prefill")[turn % 4]
        number, another = rng.randrange(6), rng.random() < 0.5

        def lose(kind=kind, number=number, another=another):
            names = list(cell.prefills if kind == "prefill" else cell.decodes)
            if kind == "node":
                cell.lose_node(number, another=another)
            elif kind == "pool":
                cell.lose_pool(number)
            elif names and kind == "prefill":
                cell.lose_prefill(names[number % len(names)])
            elif names:
                cell.lose_decode(names[number % len(names)])

        cell.at(rng.uniform(0.0, 1.5), lose)
    cell.run()
    cell.check_nothing_is_left()
    assert cell.counts["nodes lost"] == 2
    for request in cell.requests.values():
        assert request.ended == "cancelled" or request.tokens == request.answer


def test_the_same_seed_does_the_same_and_another_does_not():
    logs = [run(random_shape(seed)).log for seed in (3, 3, 4)]
    assert [repr(entry) for entry in logs[0]] == [repr(entry) for entry in logs[1]]
    assert len(logs[0]) > 50
    assert logs[0] != logs[2]


def test_a_roomy_cell_never_stalls_drops_or_marks_anything():
    shape = Shape(pool_blocks=2000, decode_cache=1000, batch_buffer=400, requests_buffer=200, rate=20.0)
    cell = run(shape)
    assert cell.counts["stalled"] == cell.counts["evicted"] == cell.counts["resubmitted"] == 0
    assert not [action for _, action in cell.log if isinstance(action, actions.MarkUrgent | actions.ReportLost)]
    assert max(request.longest_wait_s for request in cell.requests.values()) < 0.1


def starve(starvation_after_s):
    """Returns how long a long request waited among short ones that keep the only decode instance full, and the cell."""
    scheduler = SchedulerConfig(
        min_batch_requests=4, leaf_tokens=4, starvation_after_s=starvation_after_s, waiting_rule="overdue"
    )
    cell = SmallCell(Shape(pool_blocks=2000, batch_buffer=40, requests_buffer=40, max_running=6, scheduler=scheduler))
    for i in range(500):
        cell.at(i * 0.0055, partial(cell.submit, [Request(f"short-{i}", 12, 16, 16, "")]))
    long = Request("long", 60, 10, 10, "")
    cell.at(0.3, partial(cell.submit, [long]))
    cell.run()
    cell.check_nothing_is_left()
    return long.longest_wait_s, cell


def test_no_stream_of_matching_requests_can_starve_one_that_does_not_match():
    waited_s, cell = starve(starvation_after_s=0.5)
    assert waited_s < 0.5 + 0.3  # the threshold, and the service time of older overdue requests
    assert any(isinstance(action, actions.MarkUrgent) for _, action in cell.log)
    assert starve(starvation_after_s=1e6)[0] > 1.5


@pytest.mark.parametrize("seed", range(4))
def test_waiting_is_bounded_under_a_load_that_the_cell_can_serve(seed):
    shape = Shape(seed=seed, rate=25.0, groups=120, pool_blocks=600)
    cell = run(shape)
    assert max(request.longest_wait_s for request in cell.requests.values()) < 0.5 + 1.0


def share_of_mixed_iterations(policy, seed):
    """Two lengths, all at once: the share of iterations in which both run."""
    scheduler = SchedulerConfig(policy=policy, min_batch_requests=4, leaf_tokens=4, starvation_after_s=1e6)
    sizes = {"pool_blocks": 4000, "decode_cache": 120, "batch_buffer": 48, "requests_buffer": 48}
    cell = SmallCell(Shape(seed=seed, scheduler=scheduler, **sizes))
    cell.submit([Request("first", 8, 200, 200, "")])  # keeps the instance busy while the pool fills
    for i in range(150):
        cell.at(0.0, partial(cell.submit, [Request(f"{i}", 8 if i % 2 else 50, 20, 20, "")]))
    spreads = []
    decode = cell.decodes["decode-0"]
    plan = decode.scheduler.plan

    def watched(now_s):
        made = plan(now_s)
        lengths = [item.kv_tokens for item in made.run if item.key.request_id != "first"]
        if lengths:
            spreads.append(max(lengths) - min(lengths))
        return made

    decode.scheduler.plan = watched
    cell.run()
    cell.check_nothing_is_left()
    return sum(spread > 30 for spread in spreads) / len(spreads)


def test_batches_are_aligned_where_there_is_a_choice():
    """Few iterations mix lengths under `aligned`, most do under `fcfs`."""
    aligned, fcfs = (
        sum(share_of_mixed_iterations(policy, seed) for seed in range(3)) for policy in ("aligned", "fcfs")
    )
    assert aligned < 0.6 * fcfs
