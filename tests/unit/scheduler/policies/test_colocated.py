"""Colocated instance schedulers: small schedules by hand, and invariants under any input."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.colocated.base import MixedRequest
from alignedserve.scheduler.colocated.vllm import FreedBlocks
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.systems import SYSTEMS, Topology, scheduler_class, with_options

COLOCATED = [name for name, system in SYSTEMS.items() if system.topology is Topology.COLOCATED]
BLOCK = 16


def make(name, blocks=64, **options):
    allocator = BlockAllocator(blocks, "test")
    return scheduler_class(SYSTEMS[name])(with_options(SYSTEMS[name], options), allocator, BLOCK)


def add(scheduler, *prompts, longest=256):
    for i, tokens in enumerate(prompts):
        scheduler.add(MixedRequest(RequestKey(f"r{i}"), float(i), tokens, longest))


def shown(plan):
    """`r0:0+10`: chunk after 0 tokens; `r0:0+10!`: last chunk; `r0@10`: decode after 10 tokens; `-r0`: preempted."""
    found = [f"-{key.request_id}" for key in plan.preempted]
    found += [f"{one.key.request_id}@{one.kv_tokens}" for one in plan.decodes]
    found += [f"{one.key.request_id}:{one.cached_tokens}+{one.tokens}{'!' * one.last}" for one in plan.chunks]
    return " ".join(found)


def passes(scheduler, count, ends=()):
    """The next `count` passes; `ends`: `(number of the pass, request id)`."""
    found = []
    for number in range(count):
        plan = scheduler.plan(0.0)
        scheduler.done(plan, {RequestKey(name) for at, name in ends if at == number})
        scheduler.check_integrity()
        found.append(shown(plan))
    return found


def test_vllm_runs_first_what_runs_and_cuts_prompts_to_the_budget():
    scheduler = make("vllm", max_num_batched_tokens=100, max_num_seqs=3)
    add(scheduler, 30, 150, 20, 20)
    assert passes(scheduler, 4, ends=[(2, "r0")]) == [
        "r0:0+30! r1:0+70",
        "r0@30 r1:70+80! r2:0+19",
        "r0@31 r1@150 r2:19+1!",
        "r1@151 r2@20 r3:0+20!",
    ]


def test_vllm_preempts_the_latest_and_computes_it_again_with_what_it_generated():
    scheduler = make("vllm", blocks=4, prefix_caching=False)
    add(scheduler, 31, 31)
    assert passes(scheduler, 4) == ["r0:0+31! r1:0+31!", "r0@31 r1@31", "-r1 r0@32", "r0@33"]
    assert passes(scheduler, 2, ends=[(0, "r0")]) == ["r0@34", "r1:0+33!"]


def test_vllm_finds_what_is_left_of_a_preempted_request_in_its_cache():
    """The last blocks are overwritten first, those of the request that was freed first before others."""
    scheduler = make("vllm", blocks=6)
    add(scheduler, 31, 63)
    assert passes(scheduler, 3) == ["r0:0+31! r1:0+63!", "r0@31 r1@63", "-r1 r0@32"]
    assert passes(scheduler, 2, ends=[(0, "r0")]) == ["r0@33", "r1:48+17!"]


def test_vllm_takes_a_share_of_every_prompt_from_the_cache_if_told():
    scheduler = make("vllm", blocks=9, prefix_hit_share=0.5)
    add(scheduler, 70)
    assert passes(scheduler, 2) == ["r0:32+38!", "r0@70"]


@pytest.mark.parametrize(("reserve", "second"), [(True, "r0@20"), (False, "r0@20 r1:0+9")])
def test_vllm_admits_a_request_whose_first_chunk_fits_but_not_all_of_it_only_without_its_reserve(reserve, second):
    scheduler = make("vllm", blocks=4, max_num_batched_tokens=10, max_num_seqs=10, reserve_full_isl=reserve)
    add(scheduler, 20, 40)
    assert passes(scheduler, 3)[2] == second


def test_vllm_plans_the_next_pass_while_one_runs():
    scheduler = make("vllm", max_num_seqs=1)
    add(scheduler, 10, 10)
    assert scheduler.depth == 2
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert (shown(first), shown(second)) == ("r0:0+10!", "r0@10")
    scheduler.done(first, {RequestKey("r0")})  # it had ended when the second was planned
    third = scheduler.plan(0.0)
    assert shown(third) == "r1:0+10!"
    scheduler.done(second, ())
    scheduler.done(third, ())
    scheduler.check_integrity()


def test_vllm_plans_no_pass_after_the_last_permitted_token():
    scheduler = make("vllm")
    add(scheduler, 10, longest=12)
    add_longer = MixedRequest(RequestKey("longer"), 0.0, 10, 14)
    scheduler.add(add_longer)
    plans = [scheduler.plan(0.0) for _ in range(4)]
    assert [shown(plan) for plan in plans] == ["r0:0+10! longer:0+10!", "r0@10 longer@10", "longer@11", "longer@12"]
    assert not scheduler.plan(0.0)
    for plan, ended in zip(plans, ([], ["r0"], [], ["longer"]), strict=True):
        scheduler.done(plan, set(map(RequestKey, ended)))
    scheduler.check_integrity()
    assert scheduler.load() == (0, 0)


def test_quiet_passes_of_vllm_end_with_the_last_permitted_token():
    scheduler = make("vllm")
    add(scheduler, 10, 10, longest=20)
    assert passes(scheduler, 1) == ["r0:0+10! r1:0+10!"]
    plan = scheduler.plan(0.0)
    assert scheduler.quiet_passes(plan) == 8
    scheduler.repeat(plan, 8)
    assert not scheduler.plan(0.0)


def test_what_a_resumed_request_left_free_is_not_found_again():
    freed = FreedBlocks(2)
    one, other = RequestKey("one"), RequestKey("other")
    freed.add(one, 3, 2)
    freed.take_back(one, 2)
    assert (len(freed), freed.found(one)) == (3, 0)  # its third block, in part full, stays free
    freed.add(other, 1, 1)
    freed.add(one, 2, 2)
    assert (len(freed), freed.found(one)) == (6, 2)
    freed.overwrite(4)  # the two that never held anything, the third block, and the other's
    assert (len(freed), freed.found(one), freed.found(other)) == (2, 2, 0)
    freed.overwrite(1)
    assert (len(freed), freed.found(one)) == (1, 1)
    freed.overwrite(1)
    assert (len(freed), freed.found(one)) == (0, 0)


def test_sarathi_never_stalls_a_decode_and_fills_what_the_budget_leaves():
    scheduler = make("sarathi", token_budget=64, max_num_seqs=8)
    add(scheduler, 30, 100, 20)
    assert passes(scheduler, 4) == [
        "r0:0+30! r1:0+34",
        "r0@30 r1:34+63",
        "r0@31 r1:97+3! r2:0+20!",
        "r0@32 r1@100 r2@20",
    ]


def test_sarathi_admits_with_room_for_the_whole_prompt_and_the_watermark():
    scheduler = make("sarathi", blocks=10, watermark=0.1)
    add(scheduler, 80, 80)  # five blocks each; one must stay free
    assert passes(scheduler, 3, ends=[(1, "r0")]) == ["r0:0+80!", "r0@80", "r1:0+80!"]


def test_sarathi_chunks_fall_in_equal_steps_as_the_prompt_goes_on():
    scheduler = make(
        "sarathi", max_num_seqs=8, dynamic=True, chunk_high=80, chunk_low=20, chunk_steps=4, chunk_tokens=160
    )
    add(scheduler, 250)
    assert passes(scheduler, 4) == ["r0:0+80", "r0:80+40", "r0:120+20", "r0:140+20"]


def test_fastgen_fuses_prompts_to_passes_of_one_size():
    scheduler = make("fastgen", token_budget=50, max_num_seqs=8)
    add(scheduler, 20, 60, 30)
    assert passes(scheduler, 4) == [
        "r0:0+20! r1:0+30",
        "r0@20 r1:30+30! r2:0+19",
        "r0@21 r1@60 r2:19+11!",
        "r0@22 r1@61 r2@30",
    ]


def test_fastgen_flushes_the_last_where_nothing_can_run():
    scheduler = make("fastgen", blocks=4)
    add(scheduler, 32, 32)  # both full: no block is left for the next token of either
    assert passes(scheduler, 3) == ["r0:0+32! r1:0+32!", "-r1 r0@32", "r0@33"]


def test_orca_reserves_the_longest_and_computes_whole_prompts():
    scheduler = make("orca", blocks=32, max_batch=8)
    add(scheduler, 100, 200, 10)  # 16 blocks each
    assert passes(scheduler, 3, ends=[(1, "r0")]) == ["r0:0+100! r1:0+200!", "r0@100 r1@200", "r1@201 r2:0+10!"]


def test_orca_has_as_many_batches_in_flight_as_workers():
    scheduler = make("orca", n_workers=2, max_batch=2)
    add(scheduler, 10, 20, 30)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert (shown(first), shown(second)) == ("r0:0+10! r1:0+20!", "r2:0+30!")
    assert not scheduler.plan(0.0)
    scheduler.done(first, {RequestKey("r1")})
    assert shown(scheduler.plan(0.0)) == "r0@10"
    scheduler.done(second, ())
    assert shown(scheduler.plan(0.0)) == "r2@30"


def test_static_lets_no_request_join_until_the_last_has_ended():
    scheduler = make("static", max_batch=2)
    add(scheduler, 10, 20, 30)
    assert passes(scheduler, 4, ends=[(1, "r0"), (2, "r1")]) == [
        "r0:0+10! r1:0+20!",
        "r0@10 r1@20",
        "r1@21",
        "r2:0+30!",
    ]


def test_a_request_is_added_once_and_cancelled_once():
    scheduler = make("vllm")
    add(scheduler, 10, 10)
    with pytest.raises(AccountingError, match="already here"):
        add(scheduler, 10)
    scheduler.done(scheduler.plan(0.0), ())
    assert scheduler.load() == (2, 0)
    add_later = MixedRequest(RequestKey("later"), 9.0, 40, 64)
    scheduler.add(add_later)
    assert scheduler.load() == (3, 40)
    assert [scheduler.cancel(RequestKey(name)) for name in ("r0", "later", "r0")] == [True, True, False]
    assert shown(scheduler.plan(0.0)) == "r1@10"
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vllm", {"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ("vllm", {"max_num_batched_tokens": 64}, "max_num_batched_tokens must be at least 256"),
        ("vllm", {"prefix_hit_share": 1.5}, "prefix_hit_share must be 0 to 1"),
        ("vllm", {"prefix_hit_share": 0.5, "prefix_caching": False}, "0 without prefix_caching"),
        ("sarathi", {"token_budget": 100}, "token_budget must be at least 128"),
        ("sarathi", {"dynamic": True, "chunk_high": 100}, "chunk_high must be at least 512"),
        ("sarathi", {"watermark": 1.0}, "watermark must be at least 0 and below 1"),
        ("sarathi", {"watermark": -1e-9}, "watermark must be at least 0 and below 1"),
        ("fastgen", {"token_budget": -1}, "token_budget must be at least 256"),
        ("orca", {"n_workers": 0}, "n_workers must be at least 1"),
        ("static", {"max_batch": 0}, "max_batch must be at least 1"),
    ],
)
def test_options_that_would_starve_requests_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


request = st.tuples(st.integers(1, 200), st.integers(1, 60))
moves = st.lists(st.one_of(request, st.just("pass"), st.just("pass"), st.integers(0, 30)), max_size=80)


@pytest.mark.parametrize("name", COLOCATED)
@settings(max_examples=60, deadline=None)
@given(moves, st.integers(17, 60), st.booleans())
def test_whatever_comes_every_request_ends_and_nothing_is_left(name, moves, blocks, ahead):
    """Each pass is within its limits, with blocks for its work. Some request advances; finally all have ended."""
    limits = {"vllm": {"max_num_batched_tokens": 64, "max_num_seqs": 5, "async_scheduling": ahead}}
    limits["vllm"]["prefix_caching"] = False  # all is computed again after a preemption
    limits["sarathi"] = {"token_budget": 64, "max_num_seqs": 5, "dynamic": ahead, "chunk_high": 64, "chunk_low": 16}
    limits |= {"fastgen": {"token_budget": 64, "max_num_seqs": 5}, "static": {"max_batch": 5}}
    limits["orca"] = {"max_batch": 5, "n_workers": 1 + ahead}
    limits["batchllm"] = {"token_budget": 64, "memory_share": 1.0}
    scheduler = make(name, blocks, **limits[name])
    world = World(scheduler, blocks)
    for number, move in enumerate(moves):
        if move == "pass":
            world.go_on()
        elif isinstance(move, int):
            world.cancel(f"r{move}")
        else:
            world.add(f"r{number}", *move)
        scheduler.check_integrity()
    for _ in range(20000):
        if not world.left:
            break
        world.go_on()
    assert not world.left
    while world.planned:
        scheduler.done(world.planned.popleft(), ())
    scheduler.check_integrity()
    assert scheduler.load() == (0, 0)
    assert scheduler._allocator.free_blocks == blocks
    if name != "batchllm":  # which orders a file by prefix
        assert world.first_tokens == sorted(world.first_tokens)  # first come, first served


class World:
    """Runs a scheduler's passes as an instance would, and checks each."""

    def __init__(self, scheduler, blocks):
        self.scheduler, self.blocks = scheduler, blocks
        self.left = {}  # remaining tokens of each open request
        self.known = {}
        self.computed = {}
        self.number = {}
        self.first_tokens = []
        self.planned = deque()

    def add(self, name, prompt, answer):
        longest = min(prompt + 60, self.blocks * BLOCK)
        answer = min(answer, longest - prompt)
        if answer < 1:
            return
        key = RequestKey(name)
        self.scheduler.add(MixedRequest(key, float(len(self.number)), prompt, longest))
        self.left[key], self.known[key], self.computed[key] = answer, prompt, 0
        self.number[key] = len(self.number)

    def cancel(self, name):
        key = RequestKey(name)
        assert self.scheduler.cancel(key) is (self.left.pop(key, None) is not None)

    def go_on(self):
        plan = self.scheduler.plan(0.0)
        if plan.preempted and not plan:
            plan = self.scheduler.plan(0.0)
        self.check(plan)
        if plan:
            self.planned.append(plan)
        if len(self.planned) >= self.scheduler.depth or (self.planned and not plan):
            self.finish(self.planned.popleft())

    def check(self, plan):
        assert plan or self.planned or not self.left  # with nothing in flight, some request moves on
        keys = [one.key for one in (*plan.chunks, *plan.decodes)]
        assert len(set(keys)) == len(keys)
        for key in plan.preempted:
            self.computed[key] = 0
        for one in plan.chunks:
            assert one.cached_tokens == self.computed[one.key]
            self.computed[one.key] += one.tokens
            assert one.last is (self.computed[one.key] == self.known[one.key])
            self.known[one.key] += one.last
        for one in plan.decodes:
            assert one.kv_tokens == self.computed[one.key] == self.known[one.key] - 1
            self.computed[one.key] += 1
            self.known[one.key] += 1
        held = self.scheduler._allocator
        assert all(len(held.blocks_of(key)) * BLOCK >= self.computed[key] for key in keys)
        if isinstance(
            self.scheduler, tuple(scheduler_class(SYSTEMS[name]) for name in ("vllm", "sarathi", "fastgen", "batchllm"))
        ):
            assert len(plan.decodes) + sum(one.tokens for one in plan.chunks) <= 64
        if not isinstance(self.scheduler, scheduler_class(SYSTEMS["batchllm"])):  # bounded by tokens and memory only
            assert len(keys) <= 5

    def finish(self, plan):
        finished = set()
        for one in (*plan.decodes, *(chunk for chunk in plan.chunks if chunk.last)):
            if one.key in self.left:
                if self.number[one.key] not in self.first_tokens:
                    self.first_tokens.append(self.number[one.key])
                self.left[one.key] -= 1
                if not self.left[one.key]:
                    finished.add(one.key)
                    del self.left[one.key]
        self.scheduler.done(plan, finished)
