"""When each range of lengths last yielded a batch, against a plain list of all batches; and what this decides."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from alignedserve.config import SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.batch_generator import BatchLimits
from alignedserve.scheduler.policies.aligned import AlignedPolicy
from alignedserve.scheduler.quad_tree import FAN_OUT, Entry

RANGE, LEAF, BLOCK = 64, 4, 4
DEPTH = 2


def policy():
    return AlignedPolicy(SchedulerConfig(max_prefix_tokens=RANGE, leaf_tokens=LEAF))


def entry(name, tokens, since_s=0.0):
    return Entry(RequestKey(str(name)), tokens, -(-tokens // BLOCK), since_s)


class StampsAgainstList(RuleBasedStateMachine):
    """Batches are formed and leave, or stay for lack of room. Other requests arrive, leave and grow meanwhile."""

    @initialize()
    def start(self):
        self.policy = policy()
        self.now_s = 0.0
        self.count = 0
        self.entries = {}
        self.yielded = []  # (time, tokens) of every request of every batch

    @rule(tokens=st.lists(st.integers(1, 80), min_size=1, max_size=6))
    def come(self, tokens):
        for length in tokens:
            self.count += 1
            new = entry(self.count, length, self.now_s)
            self.policy.insert(new)
            self.entries[new.key] = new

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def go(self, data):
        key = data.draw(st.sampled_from(sorted(self.entries)))
        self.policy.remove(key)
        del self.entries[key]

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), tokens=st.integers(1, 80))
    def grow(self, data, tokens):
        key = data.draw(st.sampled_from(sorted(self.entries)))
        self.policy.tree.move(key, tokens, -(-tokens // BLOCK))
        self.entries[key] = self.policy.tree.entry(key)

    @rule(
        data=st.data(), blocks=st.integers(1, 40), enough=st.integers(1, 6), stays=st.booleans(), urgent=st.booleans()
    )
    def form(self, data, blocks, enough, stays, urgent):
        self.now_s += 1.0
        seed = data.draw(st.sampled_from(sorted(self.entries))) if urgent and self.entries else None
        for found in self.policy.form(BatchLimits(blocks, enough, 8), seed, self.now_s):
            self.yielded.append((self.now_s, min(found.tokens, RANGE)))
            if not stays:
                self.policy.remove(found.key)
                del self.entries[found.key]

    @invariant()
    def each_node_bears_the_time_of_the_last_batch_out_of_its_range(self):
        for level in range(DEPTH + 1):
            width = RANGE // FAN_OUT**level
            for index, stamp in enumerate(self.policy.tree.last_batch_s[level]):
                times = [time_s for time_s, tokens in self.yielded if index * width < tokens <= (index + 1) * width]
                assert stamp == max(times, default=0.0)

    def teardown(self):
        self.policy.check_integrity()


TestStampsAgainstList = StampsAgainstList.TestCase
TestStampsAgainstList.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_ranges_that_are_equally_dense_yield_batches_in_turn():
    """Each request that leaves is replaced at once. Without the stamps the first range would yield for ever."""
    waiting = policy()
    lengths = (3, 20, 35, 60)  # each in another quarter of the range
    for number in range(16):
        waiting.insert(entry(number, lengths[number % 4]))
    order = []
    for turn in range(12):
        batch = waiting.form(BatchLimits(15 * 4, 4, 4), None, 1.0 + turn)
        (tokens,) = {found.tokens for found in batch}
        order.append(tokens)
        for found in batch:
            waiting.remove(found.key)
            waiting.insert(entry(f"{found.key.request_id}'", tokens))
    assert order == [*lengths] * 3


def test_a_range_whose_batch_was_not_sent_does_not_keep_an_equally_dense_one_from_being_tried():
    waiting = policy()
    for number, tokens in enumerate((3, 3, 60, 60)):
        waiting.insert(entry(number, tokens))
    tried = [{found.tokens for found in waiting.form(BatchLimits(30, 2, 2), None, 1.0 + turn)} for turn in range(4)]
    assert tried == [{3}, {60}] * 2


def test_a_denser_range_goes_before_one_that_has_not_yielded_for_longer():
    """The stamp only breaks ties. Old requests take priority by their own waiting time, as the seed of a batch."""
    waiting = policy()
    for number in range(5):
        waiting.insert(entry(f"short-{number}", 3))
    waiting.insert(entry("long", 60))
    limits = BatchLimits(15, 1, 8)
    for turn in range(3):
        batch = waiting.form(limits, None, 1.0 + turn)
        assert {found.tokens for found in batch} == {3}
    (found,) = waiting.form(limits, RequestKey("long"), 9.0)
    assert found.key == RequestKey("long")
