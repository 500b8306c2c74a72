"""What waits in the pool by prefix length, and what went first while a request waited."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.request import RequestKey
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.pool_stays import MOST_STAYS, PoolStays, WaitingLengths, bounds_of, bucket_of
from alignedserve.scheduler.process.telling import MOST_TOLD, stays_json
from support.core_cell import CoreCell, key


@given(st.integers(0, 1 << 24))
def test_a_length_is_in_its_bucket_which_is_at_most_an_eighth_wide(tokens: int) -> None:
    first, last = bounds_of(bucket_of(tokens))
    assert first <= tokens <= last
    assert last - first <= max(0, first // 8)
    assert bucket_of(last + 1) == bucket_of(tokens) + 1


@given(st.lists(st.integers(0, 5000), max_size=40), st.data())
def test_counts_by_bucket_are_those_of_what_waits(lengths: list[int], data: st.DataObject) -> None:
    waiting = WaitingLengths()
    for tokens in lengths:
        waiting.add(tokens, 1)
    gone = data.draw(st.integers(0, len(lengths)))
    for tokens in lengths[:gone]:
        waiting.add(tokens, -1)
    left = lengths[gone:]
    rows = waiting.rows()
    assert sum(count for _, _, count in rows) == len(left)
    assert all(count == sum(first <= tokens <= last for tokens in left) for first, last, count in rows)
    assert rows == sorted(rows)


def test_a_stay_tells_what_was_sent_meanwhile() -> None:
    stays = PoolStays()
    early, late = stays.arrive(0), stays.arrive(7)
    stays.leave(RequestKey("a", 0), early, 100, 1.0, "decode-0")
    mine = stays.arrive(8)
    for number, tokens in enumerate((50, 60, 500)):
        stays.leave(RequestKey(f"b{number}", 0), late, tokens, 1.0, "decode-1")
    stays.leave(RequestKey("mine", 0), mine, 100, 2.5, "decode-0")
    (found,) = stays.of("mine")
    assert (found.ahead, found.sent_first, found.shorter, found.longer) == (8, 3, 2, 1)
    assert (found.decode_id, found.kv_tokens, found.waited_s) == ("decode-0", 100, 2.5)
    assert not found.joined
    again = stays.arrive(0)
    stays.leave(RequestKey("mine", 1), again, 120, 0.5, "decode-1")
    stays.join("mine")
    told = [(stay.epoch, stay.decode_id, stay.sent_first, stay.joined) for stay in stays.of("mine")]
    assert told == [(0, "decode-0", 3, False), (1, "decode-1", 0, True)]
    assert not list(stays.of("nobody"))


def test_a_stay_up_to_now_tells_what_was_sent_so_far() -> None:
    stays = PoolStays()
    mine = stays.arrive(3)
    for number, tokens in enumerate((50, 500)):
        stays.leave(RequestKey(f"b{number}", 0), stays.arrive(1), tokens, 1.0, "decode-1")
    (found,) = stays.of("mine", (2, mine, 100, 4.0))
    assert (found.epoch, found.ahead, found.sent_first, found.shorter, found.longer) == (2, 3, 2, 1, 1)
    assert (found.waited_s, found.decode_id, found.joined, found.over) == (4.0, "", False, False)
    assert not list(stays.of("mine"))


def test_memory_is_bounded() -> None:
    stays = PoolStays()
    for number in range(3 * MOST_STAYS):
        stays.leave(RequestKey(str(number), 0), stays.arrive(1), number, 0.0, "decode-0")
    for _ in range(2 * MOST_STAYS):
        stays.leave(RequestKey("evicted", 0), stays.arrive(1), 1, 0.0, "decode-0")
    assert sum(len(one) for one in stays._left.values()) <= MOST_STAYS
    assert not list(stays.of("0"))


def test_a_stay_that_a_request_ends_in_is_told_and_is_not_counted_as_sent() -> None:
    cell = CoreCell()
    cell.make_busy()
    for name in ("mine", "other"):
        cell.wait(name, tokens=20)
    cell.do(ev.CancelRequested((key("mine"),)), after_s=3.0)
    (told,) = json.loads(stays_json(cell.core, ["mine"]))["mine"]["stays"]
    assert (told["waited_s"], told["decode_id"], told["over"], told["joined"]) == (3.0, "", True, False)
    (other,) = json.loads(stays_json(cell.core, ["other"]))["other"]["stays"]
    assert (other["sent_first"], other["over"]) == (0, False)


def test_one_query_is_told_of_few_requests_only() -> None:
    found = json.loads(stays_json(CoreCell().core, [f"r{number}" for number in range(MOST_TOLD + 4)]))
    assert list(found) == [f"r{number}" for number in range(MOST_TOLD)]
