"""Marks of prompts' beginnings, and where those beginnings were last."""

from __future__ import annotations

import itertools
from array import array

from alignedserve.prefix_marks import LEAST_TOKENS, MARK_BYTES, MARK_LENGTHS, prefix_marks
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.recent import RecentPrefixes

A, B = RequestKey("a"), RequestKey("b")
MARKS = b"mark-512mark-640mark-800"


def marks(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    found = prefix_marks(array("I", tokens).tobytes(), salt)
    return [found[at : at + MARK_BYTES] for at in range(0, len(found), MARK_BYTES)]


def test_prompts_have_the_marks_in_common_that_lie_in_their_common_beginning() -> None:
    shared = list(range(1000))
    one, other = marks(shared + [1] * 3000), marks(shared + [2] * 3000)
    alike = sum(length <= len(shared) for length in MARK_LENGTHS)
    assert alike == 4
    assert one[:alike] == other[:alike]
    assert not set(one[alike:]) & set(other)
    assert len(one) == sum(length < 4000 for length in MARK_LENGTHS)
    assert marks(shared) == one[:alike]
    assert not marks(shared[:LEAST_TOKENS]), "the last token is always computed"
    assert not set(marks(shared, b"salt")) & set(one)


def test_lengths_grow_by_a_quarter_at_most() -> None:
    assert MARK_LENGTHS[0] == LEAST_TOKENS
    assert all(1 < later / length < 1.27 for length, later in itertools.pairwise(MARK_LENGTHS))


def test_a_beginning_is_where_it_is_computed_and_then_where_it_is_stored() -> None:
    recent = RecentPrefixes()
    assert recent.queued(A, MARKS) == 0
    assert recent.queued(B, MARKS[:16] + b"other800") == 640
    recent.sent(A, MARKS, "p0", "k0")
    ((tokens, place),) = [found for found in recent.find(MARKS + b"unknown!") if found[0] == 800]
    assert tokens == 800
    assert place.near("p0", "k0")
    assert not place.near("p1", "k0"), "only where it is computed, until it is stored"
    recent.stored(A, MARKS, "k0", 1.0)
    assert [tokens for tokens, _ in recent.find(MARKS)] == [800, 640, 512]
    assert all(place.near("p1", "k0") and not place.near("p0", "k1") for _, place in recent.find(MARKS))
    recent.sent(B, MARKS, "p0", "k0")  # computes nothing of it
    recent.ended(B, MARKS)
    assert len(recent.find(MARKS)) == 3
    recent.lose_shard("k0")
    assert recent.find(MARKS) == []


def test_what_a_lost_request_was_to_compute_does_not_come() -> None:
    recent = RecentPrefixes()
    recent.sent(A, MARKS, "p0", "k0")
    recent.sent(B, MARKS[:8], "p1", "k1")
    recent.ended(A, MARKS)
    assert [(tokens, place.prefill_id) for tokens, place in recent.find(MARKS)] == [(512, "p1")]


def test_what_a_shard_says_goes_before_what_it_stored_earlier() -> None:
    recent = RecentPrefixes()
    recent.stored(A, MARKS, "k0", 1.0)
    recent.told(MARKS, [("k0", 0)], 1.0)
    recent.told(MARKS, [("k1", 0)], 2.0)
    assert [tokens for tokens, _ in recent.find(MARKS)] == [800, 640, 512], "stored since, or by another shard"
    recent.told(MARKS, [("k0", 640), ("k1", 0)], 2.0)
    assert [tokens for tokens, _ in recent.find(MARKS)] == [640, 512]
    recent.sent(B, MARKS, "p1", "k1")
    recent.told(MARKS, [("k0", 0), ("k1", 0)], 2.0)
    assert [place.prefill_id for _, place in recent.find(MARKS)] == ["p1"] * 3, "what is computed just now comes"


def test_marks_not_seen_for_long_are_forgotten() -> None:
    recent = RecentPrefixes(most_marks=3)
    recent.stored(A, MARKS, "k0", 1.0)
    recent.stored(A, MARKS[:8], "k0", 1.0)
    recent.stored(B, b"mark-xyz", "k0", 1.0)
    assert len(recent) == 3
    assert [tokens for tokens, _ in recent.find(MARKS)] == [800, 512]
