"""Algorithm 2 on the decode worker: which requests join, run and are evicted; copies under way; never stuck."""

import math

import pytest

from alignedserve.errors import AccountingError
from alignedserve.scheduler.instance.plan import BufferKind, CancelOutcome
from support.core_cell import key
from support.iterations import Worker, names

REQUESTS = BufferKind.REQUESTS


def test_a_candidate_joins_an_idle_instance_and_runs_after_its_copy():
    worker = Worker(10, instant=False)
    worker.offer("a", 7)
    plan = worker.plan()
    assert names(plan.joins) == ["a"]
    assert plan.joins[0].block_ids == (0, 1)
    assert plan.run == ()
    assert worker.plan().run == ()
    assert worker.scheduler.copied_in(key("a"))
    (item,) = worker.plan().run
    assert (item.key, item.kv_tokens, list(item.block_ids)) == (key("a"), 7, [0, 1])


def test_a_join_lists_blocks_for_its_kv_and_has_one_for_its_next_token():
    worker = Worker(10)
    worker.offer("a", 8)
    assert len(worker.plan().joins[0].block_ids) == 2
    assert len(worker.plan().run[0].block_ids) == 3


def test_a_request_grows_by_a_token_and_its_blocks_are_freed_when_it_finishes():
    worker = Worker(10)
    worker.offer("a", 7, most=10)
    worker.step()
    plan = worker.plan()
    assert plan.run[0].kv_tokens == 7
    worker.run(plan)
    plan = worker.plan()
    assert plan.run[0].kv_tokens == 8
    assert len(plan.run[0].block_ids) == 3
    worker.run(plan, finished="a")
    assert worker.scheduler.holds_nothing()
    assert worker.allocator.owned_blocks == 0


def test_case_1_the_requests_buffer_goes_before_the_batch_buffer():
    worker = Worker(20, max_running=2)
    worker.offer("a", 4, batch_id=1)
    worker.step()
    worker.offer("b", 4, batch_id=2)
    worker.offer("c", 4, buffer=REQUESTS, batch_id=1)
    plan = worker.plan()
    assert names(plan.joins) == ["c"]
    assert not plan.switching


def test_case_2_the_batch_buffer_begins_a_switch_that_ends_with_the_old_batch():
    worker = Worker(20, max_running=2)
    worker.offer("a", 4, batch_id=1)
    worker.step()
    worker.offer("b", 4, batch_id=2)
    plan = worker.step()
    assert names(plan.joins) == ["b"]
    assert plan.switching
    assert plan.batch_id == 2
    assert worker.scheduler.status().switching
    worker.step(finished="a")
    plan = worker.step()
    assert not plan.switching
    assert names(plan.run) == ["b"]
    status = worker.scheduler.status()
    assert (status.iterations, status.switch_iterations, status.batch_id) == (3, 2, 2)


def test_a_batch_of_the_same_lengths_goes_on_with_the_running_one_without_a_switch():
    worker = Worker(60, max_running=3, window=0.25)
    worker.offer("a", 20, most=60, batch_id=1)
    worker.step()
    worker.offer("b", 18, most=60, batch_id=2)
    worker.offer("c", 19, most=60, batch_id=2)
    plan = worker.step()
    assert names(plan.joins) == ["b", "c"]
    assert (plan.switching, plan.batch_id) == (False, 2)
    worker.offer("late", 20, buffer=REQUESTS, batch_id=1)  # prefetched before that was known
    assert worker.plan().give_back.keys == ()
    worker.offer("d", 4, batch_id=3)
    plan = worker.step(finished="a")
    assert names(plan.joins) == []  # the late one's turn comes first
    plan = worker.step()
    assert names(plan.joins) == ["late"]
    worker.step(finished="b")
    plan = worker.step()
    assert names(plan.joins) == ["d"]
    assert plan.switching


def test_what_matches_a_new_batch_belongs_to_it_and_a_switch_lasts_only_as_long_as_the_others_do():
    worker = Worker(80, max_running=3, window=0.25)
    worker.offer("near", 20, most=60, batch_id=1)
    worker.offer("far", 40, most=60, batch_id=1)
    worker.step()
    worker.offer("new", 22, most=60, batch_id=2)
    assert worker.step().switching
    assert worker.step(finished={"far"}).switching
    assert not worker.step().switching


def test_what_a_batch_was_formed_of_says_what_joins_late_and_late_joins_do_not_widen_it():
    worker = Worker(80, max_running=4, window=0.25)
    for name, tokens in ("a", 20), ("b", 22):
        worker.offer(name, tokens, most=60, batch_id=1)
    worker.offer("late", 26, most=60, buffer=REQUESTS, batch_id=1)
    worker.step()
    worker.step()
    status = worker.scheduler.status()
    assert (status.batch_shortest_tokens, status.batch_longest_tokens) == (21, 23)
    assert (status.shortest_tokens, status.longest_tokens) == (21, 27)
    worker.step(finished={"a", "b"})
    status = worker.scheduler.status()
    assert (status.running, status.batch_shortest_tokens, status.batch_longest_tokens) == (1, 0, 0)


def test_the_rest_of_the_running_batch_joins_without_a_switch():
    worker = Worker(40, max_running=2)
    for name in "abc":
        worker.offer(name, 4, batch_id=1)
    worker.step()
    assert worker.scheduler.status().batch_buffer_requests == 1
    worker.step(finished="a")
    plan = worker.plan()
    assert names(plan.joins) == ["c"]
    assert not plan.switching


def test_case_3_the_longest_is_evicted_to_the_requests_buffer_before_room_runs_out():
    worker = Worker(8)
    for name, tokens in ("a", 6), ("b", 7), ("c", 5):
        worker.offer(name, tokens, most=30)
    evicted = []
    for _ in range(8):
        plan = worker.step()
        assert plan.stalled == 0
        evicted += plan.evictions
    assert names(evicted)[0] == "b"
    assert not evicted[0].to_pool
    assert worker.scheduler.status().requests_buffer_requests >= 1
    assert evicted[0].kv_tokens <= len(evicted[0].block_ids) * 4


def test_an_evicted_request_comes_back_only_with_room_for_some_iterations():
    worker = Worker(10, join_iterations=6)
    for name in "ab":
        worker.offer(name, 10, most=24)
    events, kv_tokens = [], {}
    for _ in range(40):
        finished = [n for n in "ab" if kv_tokens.get(n, 0) >= 23]
        plan = worker.plan()
        for item in plan.run:
            kv_tokens[item.key.request_id] = item.kv_tokens + 1
        worker.run(plan, finished)
        events += [("in", n) for n in names(plan.joins)] + [("out", n) for n in names(plan.evictions)]
    assert events == [("in", "a"), ("in", "b"), ("out", "b"), ("in", "b")]
    assert worker.scheduler.holds_nothing()


def test_in_a_switch_the_longest_of_the_old_batch_goes_to_the_pool():
    worker = Worker(10)
    worker.offer("a", 4, most=40, batch_id=1)
    worker.offer("b", 5, most=40, batch_id=1)
    worker.step()
    worker.offer("c", 7, most=40, batch_id=2)
    evictions = []
    for _ in range(12):
        evictions += worker.step().evictions
    assert names(evictions)[:2] == ["b", "a"]
    assert evictions[0].to_pool
    assert evictions[1].to_pool
    assert names(worker.plan().run) == ["c"]


@pytest.mark.parametrize("lease", [0, 1])
def test_without_room_in_the_requests_buffer_an_eviction_goes_to_the_pool(lease):
    worker = Worker(6, lease=lease)
    for name in "ab":
        worker.offer(name, 6, most=20)
    evictions = []
    for _ in range(6):
        evictions += worker.step().evictions
    assert evictions[0].to_pool
    assert worker.scheduler.status().requests_buffer_requests == 0


def test_blocks_of_an_evicted_request_stay_owned_until_its_copy_has_completed():
    worker = Worker(6, instant=False)
    for name in "ab":
        worker.offer(name, 6, most=20)
    for join in worker.plan().joins:
        worker.scheduler.copied_in(join.key)
    evictions = ()
    while not evictions:
        plan = worker.plan()
        evictions = plan.evictions
        worker.run(plan)
    owned = worker.allocator.owned_blocks
    assert names(worker.plan().run) == ["a"]
    worker.scheduler.copied_out(evictions[0].key)
    assert worker.allocator.owned_blocks == owned - len(evictions[0].block_ids)


def test_a_request_that_fills_the_cache_alone_runs_to_its_end():
    worker = Worker(5)
    worker.offer("a", 3, most=20)
    worker.offer("b", 3, most=20)
    kv_tokens = {}
    for _ in range(60):
        plan = worker.plan()
        for item in plan.run:
            kv_tokens[item.key.request_id] = item.kv_tokens + 1
        worker.run(plan, [name for name, tokens in kv_tokens.items() if tokens == 20])
    assert kv_tokens == {"a": 20, "b": 20}
    assert worker.scheduler.holds_nothing()


def test_a_request_larger_than_the_cache_is_given_back():
    worker = Worker(5)
    worker.offer("a", 3, most=21)
    assert worker.plan().give_back.keys == (key("a"),)
    assert worker.scheduler.holds_nothing()


def test_a_request_without_a_block_sits_the_iteration_out():
    worker = Worker(6, instant=False, watermark_blocks=1, join_iterations=1)
    for name in "ab":
        worker.offer(name, 6, most=20)
    for join in worker.plan().joins:
        worker.scheduler.copied_in(join.key)
    evicted = []
    plan = worker.plan()
    while not plan.stalled:
        evicted += names(plan.evictions)
        worker.run(plan)
        plan = worker.plan()
    assert evicted == ["b"]
    assert plan.run == ()
    assert plan.stalled == 1
    worker.scheduler.copied_out(key("b"))
    assert names(worker.plan().run) == ["a"]


def test_cancelling_says_where_the_request_was_and_frees_its_blocks():
    worker = Worker(20, instant=False, max_running=2)
    for name in "abc":
        worker.offer(name, 4)
    worker.plan()
    worker.scheduler.copied_in(key("a"))
    assert worker.scheduler.cancel(key("x")) is CancelOutcome.NOT_HERE
    assert worker.scheduler.cancel(key("a")) is CancelOutcome.RUNNING
    assert worker.scheduler.cancel(key("b")) is CancelOutcome.COPYING
    assert worker.scheduler.cancel(key("c")) is CancelOutcome.WAITING
    assert worker.allocator.owned_blocks == 2
    assert worker.scheduler.copied_in(key("b")) is False
    assert worker.allocator.owned_blocks == 0
    assert worker.scheduler.holds_nothing()


def test_a_request_cancelled_while_it_leaves_does_not_become_a_candidate():
    worker = Worker(6, instant=False)
    for name in "ab":
        worker.offer(name, 6, most=20)
    for join in worker.plan().joins:
        worker.scheduler.copied_in(join.key)
    evictions = ()
    while not evictions:
        plan = worker.plan()
        evictions = plan.evictions
        worker.run(plan)
    assert worker.scheduler.cancel(evictions[0].key) is CancelOutcome.COPYING
    assert worker.scheduler.copied_out(evictions[0].key) is False
    assert worker.scheduler.cancel(evictions[0].key) is CancelOutcome.NOT_HERE


def test_a_token_of_a_request_cancelled_during_the_iteration_is_ignored():
    worker = Worker(20)
    worker.offer("a", 4)
    worker.step()
    plan = worker.plan()
    worker.scheduler.cancel(key("a"))
    worker.run(plan)
    assert worker.scheduler.holds_nothing()


def test_a_failed_copy_in_frees_the_blocks_and_a_failed_copy_out_lets_it_run_on():
    worker = Worker(6, instant=False)
    worker.offer("z", 4)
    worker.plan()
    worker.scheduler.copy_failed(key("z"))
    assert worker.scheduler.holds_nothing()
    assert worker.allocator.owned_blocks == 0
    for name in "ab":
        worker.offer(name, 6, most=20)
    for join in worker.plan().joins:
        worker.scheduler.copied_in(join.key)
    evictions = ()
    while not evictions:
        plan = worker.plan()
        evictions = plan.evictions
        worker.run(plan)
    worker.scheduler.copy_failed(evictions[0].key)
    with pytest.raises(AccountingError):
        worker.scheduler.copied_out(evictions[0].key)
    assert worker.scheduler.status().running == 2


def test_withdrawn_and_recalled_candidates_do_not_join():
    worker = Worker(20)
    for name in "abc":
        worker.offer(name, 4)
    assert worker.scheduler.withdraw(key("a")) is True
    assert worker.scheduler.withdraw(key("a")) is False
    worker.scheduler.recall([key("b"), key("unknown")])
    plan = worker.plan()
    assert names(plan.joins) == ["c"]
    assert plan.give_back.keys == (key("b"),)
    assert worker.scheduler.withdraw(key("c")) is False
    worker.scheduler.recall([key("c")])
    assert worker.plan().give_back.keys == ()


def test_an_urgent_candidate_stops_late_joins_and_begins_the_switch():
    worker = Worker(20, max_running=2)
    worker.offer("a", 4, batch_id=1)
    worker.step()
    worker.offer("late", 40, buffer=REQUESTS, batch_id=1)
    worker.offer("b", 4, batch_id=2)
    worker.scheduler.mark_urgent({key("b"): 0.0})
    plan = worker.plan()
    assert names(plan.joins) == ["b"]
    assert plan.switching
    assert plan.give_back.keys == (key("late"),)


def test_a_mark_that_overtakes_the_announcement_still_counts():
    worker = Worker(20, max_running=1)
    worker.scheduler.mark_urgent({key("b"): 0.0})
    worker.offer("a", 4)
    worker.offer("b", 4)
    assert names(worker.plan().joins) == ["b"]


def test_for_an_urgent_candidate_the_longest_of_the_old_batch_are_evicted_at_once():
    worker = Worker(10, join_iterations=1)
    for name, tokens in ("a", 8), ("b", 9):
        worker.offer(name, tokens, most=40, batch_id=1)
    worker.step()
    worker.step()
    worker.offer("c", 8, most=40, batch_id=2)
    assert worker.step().joins == ()
    worker.scheduler.mark_urgent({key("c"): 0.0})
    plan = worker.step()
    assert names(plan.evictions) == ["b"]
    assert plan.evictions[0].to_pool
    assert names(worker.plan().joins) == ["c"]


@pytest.mark.parametrize(("due_s", "evicted"), [(5.0, []), (3.0, []), (2.5, ["b"]), (1.5, ["b"])])
def test_overdue_requests_that_run_are_evicted_only_for_one_that_was_due_before_them(due_s, evicted):
    worker = Worker(10, join_iterations=1)
    for name, tokens, at_s in ("a", 9, 2.0), ("b", 8, 3.0):
        worker.offer(name, tokens, most=40, batch_id=1, due_s=at_s)
    worker.step()
    worker.step()
    worker.offer("c", 7, most=40, batch_id=2, due_s=due_s)
    assert names(worker.step().evictions) == evicted


def test_for_an_overdue_candidate_those_go_first_that_were_not_overdue():
    worker = Worker(10, join_iterations=1)
    worker.offer("overdue", 12, most=40, batch_id=1, due_s=3.0)
    worker.offer("other", 11, most=40, batch_id=1)
    worker.step()
    worker.step()
    worker.offer("c", 20, most=40, batch_id=2, due_s=1.0)
    assert names(worker.step().evictions) == ["other", "overdue"]
    worker = Worker(10, join_iterations=1)
    worker.offer("overdue", 9, most=40, batch_id=1, due_s=3.0)
    worker.offer("other", 8, most=40, batch_id=1)
    worker.step()
    worker.step()
    worker.offer("c", 4, most=40, batch_id=2, due_s=1.0)
    assert names(worker.step().evictions) == ["other"]


def test_overdue_candidates_join_in_the_order_in_which_they_are_due_of_whichever_buffer():
    worker = Worker(40, max_running=1)
    worker.offer("c", 4, buffer=REQUESTS, due_s=3.0)
    worker.offer("b", 4, due_s=2.0)
    worker.scheduler.mark_urgent({key("a"): 1.0})
    worker.offer("d", 4, buffer=REQUESTS)
    worker.offer("a", 4)
    joined = []
    for _ in range(4):
        (name,) = names(worker.plan().joins)
        joined.append(name)
        worker.step(finished=[name])
    assert joined == ["a", "b", "c", "d"]


def test_a_candidate_that_waited_past_the_threshold_is_urgent_without_being_told():
    worker = Worker(10, join_iterations=1, starvation_after_s=3.0)
    for name in "ab":
        worker.offer(name, 8, most=40, batch_id=1)
    worker.step()
    worker.offer("c", 8, most=40, batch_id=2)
    joined = []
    for _ in range(6):
        joined += names(worker.step().joins)
    assert joined == ["c"]


def test_when_the_switch_begins_candidates_that_do_not_match_the_new_batch_go_back():
    worker = Worker(60, max_running=4)
    worker.offer("a", 4, batch_id=1)
    worker.step()
    for name, tokens in ("new1", 20), ("new2", 30):
        worker.offer(name, tokens, batch_id=2)
    worker.step()
    worker.offer("stranger", 8, buffer=REQUESTS, batch_id=1)
    worker.offer("match", 24, buffer=REQUESTS, batch_id=1)
    worker.offer("x", 20, batch_id=2)  # keeps the batch full
    plan = worker.plan()
    assert "stranger" in names(plan.joins) or key("stranger") in plan.give_back.keys
    assert key("match") not in plan.give_back.keys


def test_answers_to_one_prompt_share_its_full_blocks_once_the_first_has_been_copied():
    worker = Worker(20, instant=False)
    for name in "abc":
        worker.offer(name, 9, group="g", shared=9)
    plan = worker.plan()
    assert names(plan.joins) == ["a"]
    assert plan.joins[0].resident_blocks == 0
    assert worker.plan().joins == ()
    worker.scheduler.copied_in(key("a"))
    plan = worker.plan()
    assert names(plan.joins) == ["b", "c"]
    assert [join.resident_blocks for join in plan.joins] == [2, 2]
    assert plan.joins[0].block_ids[:2] == plan.joins[1].block_ids[:2]
    assert worker.allocator.owned_blocks == 3 + 1 + 1
    worker.scheduler.cancel(key("a"))
    assert worker.allocator.owned_blocks == 4


def test_max_running_bounds_the_batch():
    worker = Worker(100, max_running=3)
    for name in range(10):
        worker.offer(name, 4)
    assert len(worker.plan().joins) == 3


def test_a_small_candidate_passes_one_that_does_not_fit_unless_that_is_overdue():
    for overdue, joined in (False, ["small"]), (True, []):
        worker = Worker(10)
        worker.offer("a", 16, most=20)
        worker.step()
        worker.offer("large", 30, due_s=0.0 if overdue else math.inf)
        worker.offer("small", 4, most=5)
        assert names(worker.plan().joins) == joined


def test_two_plans_without_an_iteration_between_them_change_nothing():
    worker = Worker(20)
    worker.offer("a", 8)
    worker.step()
    first = worker.plan()
    owned = worker.allocator.owned_blocks
    assert worker.plan() == first
    assert worker.allocator.owned_blocks == owned
