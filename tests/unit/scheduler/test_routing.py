"""Where a prompt is computed, the queue before it, and the cost model that predicts its duration."""

import random

import pytest

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import StartPrefill
from alignedserve.scheduler.core.pool_shard import PoolShard
from alignedserve.scheduler.core.prefill_queue import PrefillQueue, QueuedGroup
from alignedserve.scheduler.core.routing.base import PrefixCopies
from alignedserve.scheduler.core.routing.load import PrefillLoad, able_to_prefill
from alignedserve.scheduler.core.routing.names import make_routing
from alignedserve.scheduler.cost.pass_model import LinearCostModel, LinearFit, Passes
from support.core_cell import CoreCell, key, only

A, B, C = (RequestKey(name) for name in "abc")


def choose(loads, tokens, queue_tokens):
    return chosen(able_to_prefill(loads, group := QueuedGroup([], tokens), queue_tokens), group)


def chosen(able, group):
    return make_routing(SchedulerConfig()).choose(able, group).load if able else None


def load(name, pending=0, cache=10_000):
    return PrefillLoad(name, cache_tokens=cache, pending_tokens=pending)


def test_the_instance_with_the_least_predicted_wait_is_chosen():
    assert choose([load("p0", 500), load("p1", 100)], 50, 8192).prefill_id == "p1"


def test_a_faster_instance_may_have_more_pending():
    slow, fast = load("slow", 400), load("fast", 800)
    for now_s in range(1, 30):
        for instance, seconds_per_token in (slow, 1e-2), (fast, 1e-3):
            tokens = 10 * now_s
            instance.cost.observe_chunks(Passes(1, tokens, 0, tokens * seconds_per_token))
    assert choose([slow, fast], 100, 8192).prefill_id == "fast"


def test_ties_go_to_the_least_pending_then_to_the_first():
    assert choose([load("p0"), load("p1")], 10, 8192).prefill_id == "p0"


def test_a_busy_instance_gets_no_more_than_queue_tokens_ahead_but_an_idle_one_any_prompt():
    assert choose([load("p0", 90)], 20, 100) is None
    assert choose([load("p0", 80)], 20, 100).prefill_id == "p0"
    assert choose([load("p0", 0)], 5000, 100).prefill_id == "p0"


def test_an_instance_whose_cache_is_too_small_is_passed_over():
    assert choose([load("p0", cache=10), load("p1", 50)], 20, 8192).prefill_id == "p1"
    assert choose([load("p0", cache=10)], 20, 8192) is None


def at(shard, name, pending=0):
    one = load(name, pending)
    one.home = PoolShard(shard)
    return one


def test_a_prompt_goes_where_the_least_of_it_is_missing():
    loads = [at("k0", "p0"), at("k1", "p1")]
    group = QueuedGroup([], 1000, cached=(("k1", 960), ("k9", 990)))
    assert (group.work_at("k0"), group.work_at("k1"), group.work_tokens) == (1000, 40, 10)
    assert chosen(able_to_prefill(loads, group, 8192), group).prefill_id == "p1"
    loads[1].begin(900)  # still less than computing everything
    assert chosen(able_to_prefill(loads, group, 8192), group).prefill_id == "p1"
    loads[1].begin(200)
    assert chosen(able_to_prefill(loads, group, 8192), group).prefill_id == "p0"


def test_a_cached_prefix_is_copied_to_another_shard_where_that_is_quickest():
    routing = make_routing(SchedulerConfig())
    loads = [at("k0", "p0"), at("k1", "p1", 2000)]
    group = QueuedGroup([], 1000, cached=(("k1", 960),))

    def route():
        found = routing.choose(loads, group)
        return found.load.prefill_id, found.tokens, found.copy_from

    assert route() == ("p0", 1000, ""), "a cluster of one node copies nothing"
    second = loads[0].cost.predict_prefill_s(1000)
    routing.copies = PrefixCopies(second / 10_000)
    assert route() == ("p0", 40, "k1")
    loads[0].copy_s_per_token = second / 500  # as measured there
    assert route() == ("p0", 1000, "")
    loads[0].copy_s_per_token = 0.0
    loads[1].drop(2000)
    assert route() == ("p1", 40, ""), "where it is needs no copy"
    loads[1].begin(2000)
    group.kept_tokens = 500
    assert route() == ("p0", 500, ""), "KV of its own is used"


def reading(seconds_per_token):
    """Instances that compute a token in 0.1 ms and read a cached one in so many seconds, as they have learned."""
    loads = [at("k0", "p0"), at("k1", "p1")]
    for instance in loads:
        for number in range(60):
            tokens, cached = 50 + 40 * (number % 7), 10_000 * (number % 5)
            seconds = 1e-4 * tokens + seconds_per_token * cached
            instance.cost.observe_chunks(Passes(1, tokens, cached, seconds))
        instance.cache_tokens = 100_000
    return loads


def test_attention_over_a_cached_prefix_is_a_part_of_its_prediction():
    loads, routing = reading(1e-6), make_routing(SchedulerConfig())
    long = QueuedGroup([], 50_100, cached=(("k1", 50_000),))
    assert loads[1].cost.predict_reading_s(100, 50_000) == pytest.approx(0.05, rel=0.05)
    assert routing.choose(loads, long).load.prefill_id == "p1"
    loads[1].begin(100, reading_s=loads[1].cost.predict_reading_s(100, 50_000))
    assert routing.choose(loads, QueuedGroup([], 400, cached=(("k1", 200),))).load.prefill_id == "p0"
    assert loads[1].ahead_s() == pytest.approx(0.06, rel=0.05)
    loads[1].drop(100, reading_s=loads[1].reading_s)
    assert loads[1].ahead_s() == 0.0
    routing.copies, half = PrefixCopies(1e-9), QueuedGroup([], 400, cached=(("k1", 200),))
    slow = reading(1e-3)
    loads[1].begin(8000)
    slow[1].begin(8000)
    assert routing.choose(loads, half).copy_from == "k1"
    assert routing.choose(slow, half).copy_from == "", "reading 200 tokens takes as long as computing 2,000"


def test_the_core_counts_what_its_prompts_read_until_they_are_computed():
    cell = CoreCell(prefills=1, decodes=1, pool=9000, cache=3000, most_prompt=30_000)
    (view,) = cell.core._state.instances.open_prefill()
    cost = view.load.cost
    for number in range(60):
        tokens, cached = 50 + 40 * (number % 7), 1000 * (number % 5)
        cost.observe_chunks(Passes(1, tokens, cached, 1e-4 * tokens + 1e-6 * cached))
    meta = ev.RequestMeta(key("a"), 8100, 8120, "group-a", "gw", cached=((view.load.pool_id, 8000),))
    assert only(cell.do(ev.Submitted((meta,))), StartPrefill)
    assert view.load.reading_s == pytest.approx(0.008, rel=0.05)
    cell.prefilled("a", 8100)
    assert (view.load.pending_tokens, view.load.reading_s) == (0, 0.0)


def test_what_is_cached_counts_as_little_ahead_of_a_busy_instance():
    loads = [at("k0", "p0", 90), at("k1", "p1", 90)]
    group = QueuedGroup([], 1000, cached=(("k1", 995),))
    assert [one.prefill_id for one in able_to_prefill(loads, group, 100)] == ["p1"]


def test_a_queued_prompt_counts_with_what_is_missing_where_least_is():
    queue = PrefillQueue()
    queue.add([A], 1000, cached=(("k0", 960), ("k1", 500)))
    queue.add([B], 1000, 300)
    assert queue.tokens == 740
    queue.check_integrity()
    queue.lose_kept(B)
    queue.lose_kept(A)  # the pool dropped nothing of it
    assert queue.tokens == 1040
    queue.check_integrity()


def test_the_core_sends_a_prompt_to_its_cached_prefix_and_counts_what_is_computed():
    cell = CoreCell(prefills=2, decodes=1, homes={"p0": "k0", "p1": "k1", "d0": "k0"})

    def submit(name, *cached, base=0):
        meta = ev.RequestMeta(key(name), 100, 120, f"group-{name}", "gw", cached=cached, base_tokens=base)
        (started,) = only(cell.do(ev.Submitted((meta,))), StartPrefill)
        return started.prefill_id

    loads = {view.prefill_id: view.load for view in cell.core._state.instances.open_prefill()}
    assert submit("a", ("k1", 96)) == "p1"
    assert loads["p1"].pending_tokens == 4
    assert submit("b", ("k1", 96)) == "p1", "8 tokens there are fewer than 100 here"
    assert submit("c") == "p0"
    cell.prefilled("a", 100)
    cell.prefilled("b", 100)
    assert loads["p1"].pending_tokens == 0


def test_prompts_of_one_moment_go_where_their_common_beginning_is_computed():
    cell = CoreCell(
        prefills=2, decodes=1, homes={"p0": "k0", "p1": "k1", "d0": "k0"}, pool=5000, cache=1000, most_prompt=2000
    )
    loads = {view.prefill_id: view.load for view in cell.core._state.instances.open_prefill()}

    def submit(name, marks, *cached):
        meta = ev.RequestMeta(key(name), 1000, 1020, f"group-{name}", "gw", cached=cached, marks=marks)
        return [started.prefill_id for started in only(cell.do(ev.Submitted((meta,))), StartPrefill)]

    alike = b"mark-512mark-640"
    assert submit("a", alike) == ["p0"]
    assert submit("b", b"other512") == ["p1"]
    assert submit("c", alike) == ["p0"], "1,360 tokens there are fewer than 2,000 at the other"
    assert loads["p0"].pending_tokens == 1360
    assert submit("d", alike + b"mark-800") == ["p0"]
    assert submit("e", alike) == ["p1"], "by now all of it is computed sooner at the other"
    for name in "abcde":
        cell.prefilled(name, 1000)
    assert [one.pending_tokens for one in loads.values()] == [0, 0]
    assert submit("f", alike) == ["p1"], "the shard that stored it last"
    assert loads["p1"].pending_tokens == 360
    cell.prefilled("f", 1000)
    cell.now_s += 1.0
    assert submit("g", alike, ("k0", 512), ("k1", 0)) == ["p0"], "the shard that stored it last has given it up"
    assert loads["p0"].pending_tokens == 488


def test_what_a_queued_prompt_will_leave_is_no_work_of_those_behind_it():
    cell = CoreCell(pool=5000, cache=1000, queue_tokens=100, most_prompt=2000)
    state = cell.core._state
    for name in "abcd":
        meta = ev.RequestMeta(key(name), 1000, 1020, f"group-{name}", "gw", marks=b"mark-512")
        cell.do(ev.Submitted((meta,)))
    assert state.queue.tokens == 3 * 488, "the first is computed already"
    cell.do(ev.CancelRequested((key("d"),)))
    assert state.queue.tokens == 2 * 488


def test_an_instance_is_as_fast_as_its_own_chunks_say():
    instance = load("p0")
    for i in range(50):
        tokens = 100 + 10 * (i % 7)
        instance.cost.observe_chunks(Passes(3, 3 * tokens, 0, 3 * (0.005 + 0.001 * tokens)))
    assert instance.predicted_ttft_s(200) == pytest.approx(0.205, rel=0.05)
    instance.begin(400)
    assert instance.predicted_ttft_s(200) == pytest.approx(0.61, rel=0.05), "600 tokens are two chunks"
    instance.drop(400)
    assert instance.pending_tokens == 0


def test_the_queue_is_first_come_first_served_by_group():
    queue = PrefillQueue()
    queue.add([A, B], 10)
    queue.add([C], 5)
    assert (len(queue), queue.tokens) == (3, 15)
    assert queue.head().keys == [A, B]
    assert queue.pop().tokens == 10
    assert queue.pop().keys == [C]
    assert queue.head() is None
    with pytest.raises(AccountingError):
        queue.pop()
    queue.check_integrity()


def test_a_group_leaves_the_queue_with_its_last_request():
    queue = PrefillQueue()
    queue.add([A, B], 10)
    assert queue.cancel(A)
    assert not queue.cancel(A)
    assert queue.head().keys == [B]
    assert queue.cancel(B)
    assert queue.head() is None
    assert queue.tokens == 0
    queue.check_integrity()


def test_no_request_is_queued_twice():
    queue = PrefillQueue()
    queue.add([A], 1)
    with pytest.raises(AccountingError):
        queue.add([B, A], 1)


def test_the_linear_model_finds_the_coefficients_of_what_it_sees():
    rng = random.Random(0)
    model = LinearCostModel()
    for _ in range(300):
        lengths = [rng.randint(1, 4000) for _ in range(rng.randint(1, 128))]
        seconds = 0.004 + 2e-5 * len(lengths) + 1e-8 * sum(lengths)
        model.observe_iterations(Passes(1, len(lengths), sum(lengths), seconds))
        tokens, cached = rng.randint(1, 512), rng.randint(0, 4096)
        model.observe_chunks(Passes(1, tokens, cached, 0.002 + 1e-4 * tokens + 1e-6 * cached))
    assert model.predict_iteration_s([1000] * 50) == pytest.approx(0.004 + 1e-3 + 5e-4, rel=0.02)
    assert model.predict_prefill_s(500) == pytest.approx(0.052, rel=0.02)
    assert model.predict_prefill_s(500, 2000) == pytest.approx(0.054, rel=0.02)
    assert model.predict_prefill_s(1500) == pytest.approx(0.156, rel=0.02), "three chunks"


def test_the_fit_follows_a_change_and_stays_finite_without_news():
    fit = LinearFit((0.0, 0.0), (1.0, 100.0))
    for _ in range(5000):
        fit.observe((1.0, 50.0), 1.0)
    assert fit.predict((1.0, 50.0)) == pytest.approx(1.0, rel=0.01)
    for _ in range(300):
        fit.observe((1.0, 50.0), 2.0)
    assert fit.predict((1.0, 50.0)) == pytest.approx(2.0, rel=0.01)


def test_predictions_are_never_negative():
    model = LinearCostModel()
    for tokens, seconds in (100, 0.5), (200, 0.1), (300, 0.01):
        model.observe_chunks(Passes(1, tokens, 0, seconds))
    assert model.predict_prefill_s(5000) >= model.predict_prefill_s(100) >= 0.0


def test_while_the_pool_has_no_room_nothing_is_predicted(monkeypatch):
    """Each event checks whether the first request in the queue can start."""
    cell = CoreCell(prefills=8, pool=20, cache=20, growth_reserve=0.2)
    for name in range(12):
        cell.submit(name, tokens=10, most=12)
    assert cell.states()["queued"]
    asked = []
    predict = LinearCostModel.predict_prefill_s
    monkeypatch.setattr(
        LinearCostModel, "predict_prefill_s", lambda self, *tokens: asked.append(1) or predict(self, *tokens)
    )
    cell.do(ev.Tick(), after_s=0.1)
    assert not asked
    assert only(cell.do(ev.Finished((key(0),))), StartPrefill)
    assert len(asked) == 8


def prefix_loads(*ahead_s: float) -> list[PrefillLoad]:
    """Instances of shards k0, k1 and so on, of 0.1 ms a token, with that much to do."""
    loads = []
    for number, seconds in enumerate(ahead_s):
        load = PrefillLoad(f"p{number}", cache_tokens=100_000, cost=LinearCostModel(1e-4), home=PoolShard(f"k{number}"))
        load.begin(round(seconds * 1e4))
        loads.append(load)
    return loads


def prompt(tokens: int, *cached: int) -> QueuedGroup:
    found = tuple((f"k{number}", there) for number, there in enumerate(cached) if there)
    return QueuedGroup([], tokens, cached=found)


@pytest.mark.parametrize("name", ["least-ttft", "conductor"])
def test_what_is_on_disk_is_late_unless_the_instance_has_other_work_meanwhile(name: str) -> None:
    routing = make_routing(SchedulerConfig(routing=name))

    def chosen_of(ready_s: float, *ahead_s: float) -> str:
        group = prompt(5000, 4000)
        group.reads_s = {"k0": ready_s}
        return routing.choose(prefix_loads(*ahead_s), group).load.prefill_id

    assert chosen_of(0.3, 0.0, 0.0) == "p0"
    assert chosen_of(0.5, 0.0, 0.0) == "p1", "reading and 1,000 tokens take longer than 5,000 tokens"
    assert chosen_of(0.5, 0.3, 0.3) == "p0", "it is read while other prompts are computed"
    routing.copies = PrefixCopies(1e-6)
    assert routing.choose(prefix_loads(1.0, 0.0), prompt(5000, 4000)).copy_from == "k0"
    late = prompt(5000, 4000)
    late.reads_s = {"k0": 0.5}
    assert routing.choose(prefix_loads(1.0, 0.0), late).copy_from == ""


def test_reading_goes_on_while_a_prompt_waits_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, seen = CoreCell(queue_tokens=50), []
    choose = cell.core.routing.choose

    def noted(able, group, background=False):
        seen.append(dict(group.reads_s))
        return choose(able, group, background)

    monkeypatch.setattr(cell.core.routing, "choose", noted)
    for name, reads in (("a", ()), ("b", (("pool", 5.0), ("k9", 1.0)))):
        meta = ev.RequestMeta(key(name), 100, 120, f"group-{name}", "gw", cached=(("pool", 90),), reads=reads)
        cell.do(ev.Submitted((meta,)))
    cell.do(ev.Tick(), after_s=2.0)
    cell.prefilled("a", 100)
    assert seen == [{}, {"pool": pytest.approx(3.0)}]


def test_the_longest_prefix_wins_unless_its_instance_is_busier_than_a_prefix_is_worth() -> None:
    routing = make_routing(SchedulerConfig(routing="prefix"))
    route = routing.choose(prefix_loads(0.4, 0.0), prompt(5000, 4000, 1000))
    assert (route.load.prefill_id, route.tokens, route.copy_from) == ("p0", 1000, "")
    route = routing.choose(prefix_loads(0.6, 0.0), prompt(5000, 4000, 1000))
    assert (route.load.prefill_id, route.tokens, route.copy_from) == ("p1", 4000, ""), "shards that copy nothing"
    routing.copies = PrefixCopies(1e-6)
    route = routing.choose(prefix_loads(0.6, 0.0), prompt(5000, 4000, 1000))
    assert (route.load.prefill_id, route.tokens, route.copy_from) == ("p1", 1000, "k0")
    routing.copies = PrefixCopies(2e-4)
    assert routing.choose(prefix_loads(0.6, 0.0), prompt(5000, 4000, 1000)).copy_from == "", "computing is quicker"


def test_conductor_copies_a_prefix_that_is_longer_and_quicker_to_copy() -> None:
    routing = make_routing(SchedulerConfig(routing="conductor", copy_threshold=2.0))
    loads, asked = prefix_loads(0.4, 0.0), prompt(5000, 4000, 1000)
    route = routing.choose(loads, asked)
    assert (route.load.prefill_id, route.tokens, route.copy_from) == ("p1", 4000, ""), "shards that copy nothing"
    routing.copies = PrefixCopies(1e-6)
    route = routing.choose(loads, asked)
    assert (route.load.prefill_id, route.tokens, route.copy_from) == ("p1", 1000, "k0")
    assert routing.choose(loads, prompt(5000, 4000, 2500)).tokens == 2500, "less than twice as long as its own"
    routing.copies = PrefixCopies(2e-4)
    assert routing.choose(loads, asked).copy_from == "", "computing is quicker"


def test_baselines_do_not_look_at_the_caches() -> None:
    loads, asked = prefix_loads(0.3, 0.1, 0.2), prompt(5000, 4999)
    assert make_routing(SchedulerConfig(routing="least-loaded")).choose(loads, asked).load.prefill_id == "p1"
    chosen = make_routing(SchedulerConfig(routing="random"))
    assert {chosen.choose(loads, asked).load.prefill_id for _ in range(50)} == {"p0", "p1", "p2"}
