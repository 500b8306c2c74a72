"""`scheduler.sharing: quantiles`: who takes which lengths, and what happens as instances come, go and run empty."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from alignedserve.config import Config
from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import Prefetch
from alignedserve.scheduler.core.decode_times import DecodeTimes
from alignedserve.scheduler.core.events import RequestMeta
from alignedserve.scheduler.core.instances import DecodeView, Instances
from alignedserve.scheduler.core.length_shares import MOST_MOVES, REFRESH_S, LengthShares
from alignedserve.scheduler.core.request_table import Record
from alignedserve.scheduler.cost.cost_of_lengths import FEW, LEAST_GAIN, CostOfLengths
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.scheduler.policies.base import BatchPolicy, Entry
from alignedserve.scheduler.policies.fcfs import FcfsPolicy
from support.core_cell import BLOCK, CoreCell, decode_report, key, only
from support.machines import machine_settings

CONFIG = Config()  # the maximum of running requests is automatic
CACHE = 1000  # blocks
LENGTHS = (10, 40, 160, 640)


class Shared:
    """LengthShares with decode instances that hold the given prefix lengths."""

    def __init__(
        self,
        held: Iterable[Sequence[int]] = ((),) * 2,
        cost: object = None,
        new_policy: Callable[[], BatchPolicy] = lambda: FcfsPolicy(CONFIG.scheduler),
    ) -> None:
        self.instances = Instances()
        self.sharing = LengthShares(CONFIG, BLOCK, new_policy, self.instances, DecodeTimes(), cost)
        self.now_s = 0.0
        for number, lengths in enumerate(held):
            self.join(f"d{number}", lengths)
        self.pass_time()

    def join(self, name: str, lengths: Sequence[int] = (), cache: int = CACHE) -> DecodeView:
        view = self.instances.decode[name] = DecodeView(name, decode_report(name, cache))
        for number, tokens in enumerate(lengths):
            one = RequestKey(f"{name}-{number}")
            view.decoding[one] = Record(RequestMeta(one, tokens, tokens + 10, "", "g"), kv_tokens=tokens)
            view.add_length(tokens)
        self.sharing.instances_changed()
        return view

    def view(self, number: int) -> DecodeView:
        return self.instances.decode[f"d{number}"]

    def wait(self, name: object, tokens: int, most: int = 100) -> RequestKey:
        one = key(name)
        self.sharing.insert(Entry(one, tokens, -(-tokens // BLOCK), self.now_s), most)
        return one

    def pass_time(self, seconds: float = REFRESH_S) -> None:
        self.now_s += seconds
        self.sharing.update(self.now_s)
        self.sharing.check_integrity()

    def waiting_for(self, number: int) -> int:
        share = self.sharing.share_of(self.view(number))
        return share.policy.totals()[0]


SHORT, LONG = [20] * 48, [400] * FEW


def test_each_instance_takes_a_range_of_lengths() -> None:
    shared = Shared([LONG, SHORT])
    short, long = shared.wait("short", 20), shared.wait("long", 400)
    assert shared.sharing.takes(shared.view(1), short)  # d1 holds the short ones
    assert shared.sharing.takes(shared.view(0), long)
    assert not shared.sharing.takes(shared.view(0), short)
    assert shared.sharing.order([shared.view(0), shared.view(1)], 20)[0].decode_id == "d1"
    assert shared.sharing.order([shared.view(0), shared.view(1)], 400)[0].decode_id == "d0"


def test_nothing_is_shared_before_there_are_requests_to_judge_by() -> None:
    shared = Shared([[20], [400]])
    one = shared.wait("one", 20)
    assert all(shared.sharing.takes(shared.view(number), one) for number in (0, 1))


def test_an_evicted_request_goes_to_the_range_that_it_has_grown_into() -> None:
    shared = Shared([SHORT, LONG])
    one = shared.wait("r", 20)
    shared.sharing.remove(one)
    shared.wait("r", 400)
    assert (shared.waiting_for(0), shared.waiting_for(1)) == (0, 1)


def test_an_instance_whose_range_is_empty_helps() -> None:
    shared = Shared([SHORT, LONG])
    shared.wait("long", 400)
    share = shared.sharing.helps(shared.view(0))
    assert share is shared.sharing.share_of(shared.view(1))
    assert share.policy.totals()[0] == 1


def test_a_busy_instance_helps_a_neighbour_and_an_idle_one_any() -> None:
    lengths = [[20] * 48, [100] * 24, [400] * FEW]
    shared = Shared(lengths)
    shared.wait("long", 400)
    assert shared.sharing.helps(shared.view(1)) is not None
    assert shared.sharing.helps(shared.view(0)) is None
    idle = shared.view(0)
    for one, record in list(idle.decoding.items()):
        del idle.decoding[one]
        idle.drop_length(record.kv_tokens)
    assert shared.sharing.helps(idle) is not None


def test_requests_of_a_lost_instance_s_range_go_to_the_others() -> None:
    shared = Shared([SHORT, LONG, LONG])
    for number in range(3 * MOST_MOVES):
        shared.wait(number, LENGTHS[number % 4])
    del shared.instances.decode["d2"]
    shared.sharing.instances_changed()
    for _ in range(6):
        shared.pass_time()
    assert shared.waiting_for(0) + shared.waiting_for(1) == 3 * MOST_MOVES == shared.sharing.totals()[0]


def test_a_boundary_moves_few_requests_at_a_time() -> None:
    shared = Shared([SHORT, LONG])
    for number in range(4 * MOST_MOVES):
        shared.wait(number, 400)
    shared.instances.draining = frozenset(["d1"])
    shared.sharing.instances_changed()
    before = shared.waiting_for(0)
    shared.pass_time(0.0)
    assert shared.waiting_for(0) - before == MOST_MOVES
    for _ in range(4):
        shared.pass_time(0.0)
    assert shared.waiting_for(0) == 4 * MOST_MOVES  # one instance takes all: nothing is shared


def test_an_overdue_request_stays_overdue_in_another_share() -> None:
    shared = Shared([SHORT, LONG])
    late = shared.wait("late", 400)
    shared.sharing.mark_overdue(late, 7.0)
    assert shared.sharing.share_of(shared.view(1)).seed() == late
    assert shared.sharing.share_of(shared.view(0)).seed() is None
    del shared.instances.decode["d1"]
    shared.sharing.instances_changed()
    shared.pass_time()
    assert shared.sharing.share_of(shared.view(0)).seed() == late


def test_nothing_is_shared_while_an_instance_cannot_hold_every_request() -> None:
    shared = Shared([SHORT, LONG])
    one = shared.wait("huge", 400, most=CACHE * BLOCK + 1)
    shared.pass_time()
    assert all(shared.sharing.takes(shared.view(number), one) for number in (0, 1))


def test_the_same_request_cannot_wait_twice() -> None:
    shared = Shared()
    shared.wait("r", 10)
    with pytest.raises(AccountingError, match="already waiting"):
        shared.wait("r", 10)


class Skewed:
    """An iteration takes `skew` s for each token that the longest has more than the mean."""

    def __init__(self, skew: float) -> None:
        self._skew = skew

    def step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        mean = sum(lengths) / max(1, len(lengths))
        return 1e-2 + 1e-6 * sum(lengths) + self._skew * (max(lengths, default=0) - mean)


def judged(skew: float, groups: Sequence[Sequence[int]], *, waiting: bool) -> bool:
    cost = CostOfLengths(CONFIG, None)
    cost.use_cost(Skewed(skew))  # type: ignore[arg-type]
    return [cost.pays(groups, waiting=waiting) for _ in range(40)][-1]


def test_sharing_pays_where_unequal_lengths_cost_something() -> None:
    assert judged(1e-5, [[20] * 20, [400] * 20], waiting=True)
    assert not judged(0.0, [[20] * 20, [400] * 20], waiting=True)


def test_where_the_order_of_a_batch_counts_sharing_is_judged_by_typical_ones() -> None:
    """As shuffled batches do on average; batches in order of length would be judged the other way."""
    cost = load_step_cost("rtxpro6000-llama-3.1-8b", "no_split", block_bandwidth=10e9)
    groups = [[100 + 5 * (number % 100) for number in range(160)], [4000 + 40 * number for number in range(20)]]
    lengths = [tokens for group in groups for tokens in group]
    mixed = [lengths[first::2] for first in range(2)]

    def gain(seconds: Callable[[list[int]], float]) -> float:
        return 1.0 - sum(map(seconds, groups)) / sum(map(seconds, mixed))

    def shuffled_s(some: list[int]) -> float:
        return sum(cost.step_s((), random.Random(seed).sample(some, len(some))) for seed in range(20)) / 20

    assert gain(lambda some: cost.step_s((), some)) < LEAST_GAIN < gain(shuffled_s)
    judge = CostOfLengths(CONFIG, cost)
    assert [judge.pays(groups, waiting=True) for _ in range(20)][-1]


def test_without_a_backlog_sharing_does_not_pay_if_an_instance_gets_much_slower() -> None:
    groups = [[20] * 20, [4000] * 20]
    assert judged(1e-6, groups, waiting=True)
    assert not judged(1e-6, groups, waiting=False)


def test_a_token_of_a_long_request_costs_more_than_one_of_a_short_request() -> None:
    lengths = CostOfLengths(CONFIG, load_step_cost("a100-opt-13b"))
    lengths.learn(lambda lengths: 1.0, 40_000, 256)
    assert lengths.of(8_000) > 10 * lengths.of(100)


def test_where_the_cost_is_not_measured_lengths_are_shared() -> None:
    assert CostOfLengths(CONFIG, None).pays([[20] * 20, [400] * 20], waiting=False)


def test_a_core_sends_lengths_to_the_instance_of_their_range() -> None:
    cell = CoreCell(decodes=2, prefills=2, policy="fcfs", sharing="quantiles", requests=200, cache=1000, batch=400)
    for number in range(4 * FEW):
        tokens = 10 if number % 2 else 60
        cell.wait(number, tokens)
    sent = {record.decode_id for record in cell.core._state.table.records() if record.decode_id}
    assert sent == {"d0", "d1"}
    for decode_id in 3 * ("d0", "d1"):  # until all have joined: later ones do not overtake a candidate batch
        held = [record.key for record in cell.core._state.instances.decode[decode_id].held()]
        cell.do(ev.Joined(decode_id, tuple(held)))
        cell.do(decode_report(decode_id, cache=1000, free=800, running=len(held), shortest=10, longest=60, batch_id=1))
    assert not cell.core._state.sharing.totals()[0]
    for _ in range(3):
        cell.do(ev.Tick(), after_s=REFRESH_S)
    sent = [only(cell.wait(f"new-{n}", (10, 60)[n % 2]), Prefetch)[0].decode_id for n in range(4)]
    assert sent[0] != sent[1]
    assert sent[:2] == sent[2:]


class SharesMachine(RuleBasedStateMachine):
    """Requests wait, become overdue and leave; instances join, are lost, drain and fill, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Shared([SHORT, LONG])
        self.waiting: dict[RequestKey, float | None] = {}
        self.made = 0

    @rule(tokens=st.sampled_from(LENGTHS), most=st.sampled_from((700, 700, 700, 5000)))
    def wait(self, tokens: int, most: int) -> None:
        self.made += 1
        self.waiting[self.shared.wait(self.made, tokens, most)] = None

    @rule(index=st.integers(0, 99))
    def leave(self, index: int) -> None:
        if self.waiting:
            gone = list(self.waiting)[index % len(self.waiting)]
            self.shared.sharing.remove(gone)
            del self.waiting[gone]

    @rule(index=st.integers(0, 99))
    def become_overdue(self, index: int) -> None:
        if self.waiting:
            late = list(self.waiting)[index % len(self.waiting)]
            self.waiting[late] = self.shared.now_s + index
            self.shared.sharing.mark_overdue(late, self.shared.now_s + index)

    @rule(number=st.integers(0, 3), tokens=st.sampled_from(LENGTHS), count=st.sampled_from((0, FEW, 40)))
    def join(self, number: int, tokens: int, count: int) -> None:
        self.shared.join(f"d{number}", [tokens] * count, cache=CACHE if number else 2000)

    @rule(number=st.integers(0, 3))
    def lose(self, number: int) -> None:
        if self.shared.instances.decode.pop(f"d{number}", None) is not None:
            self.shared.sharing.instances_changed()

    @rule(numbers=st.frozensets(st.integers(0, 3)))
    def drain(self, numbers: frozenset[int]) -> None:
        self.shared.instances.draining = frozenset(f"d{number}" for number in numbers)
        self.shared.sharing.instances_changed()

    @rule(seconds=st.sampled_from((0.0, 0.5, 5.0)))
    def pass_time(self, seconds: float) -> None:
        self.shared.pass_time(seconds)

    @invariant()
    def every_request_waits_once_and_an_idle_instance_finds_it(self) -> None:
        sharing = self.shared.sharing
        self.shared.pass_time(0.0)
        assert sharing.totals()[0] == len(self.waiting)
        for view in self.shared.instances.open_decode():
            idle_finds = sharing.share_of(view).policy.totals()[0] or (sharing.helps(view) is not None)
            assert not view.idle or not self.waiting or idle_finds

    @invariant()
    def no_overdue_request_is_forgotten(self) -> None:
        shares = {id(share): share for share in self.shared.sharing._shares.values()}
        marked = {
            late: due_s for share in shares.values() for late in share.overdue if (due_s := share.overdue.get(late))
        }
        assert marked == {late: due_s for late, due_s in self.waiting.items() if due_s is not None}

    def teardown(self) -> None:
        for gone in self.waiting:
            self.shared.sharing.remove(gone)
        assert self.shared.sharing.totals() == (0, 0)
        self.shared.sharing.check_integrity()


TestShares = SharesMachine.TestCase
TestShares.settings = machine_settings(60, 40)


def test_a_policy_that_can_be_created_only_once_serves_all_instances(caplog: pytest.LogCaptureFixture) -> None:
    made = []

    def once() -> FcfsPolicy:
        if made:
            raise ConfigError("it can be created only once")
        made.append(FcfsPolicy(CONFIG.scheduler))
        return made[0]

    shared = Shared([LONG, SHORT], new_policy=once)
    one = shared.wait("one", 20)
    shared.join("d2", SHORT)
    shared.pass_time()
    assert all(shared.sharing.takes(shared.view(number), one) for number in (0, 1, 2))
    assert [record.message for record in caplog.records] == [
        "lengths are not shared out among decode instances: it can be created only once"
    ]
