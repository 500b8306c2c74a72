"""The audit finds KV in the pool that no process needs, and never KV that a gateway or the scheduler needs."""

from __future__ import annotations

import pytest

from alignedserve.request import RequestKey
from alignedserve.scheduler.process.pool_audit import EVERY_S, SETTLE_S, PoolAudit

A, B, C = RequestKey("a"), RequestKey("b"), RequestKey("c", 1)


@pytest.fixture
def known() -> set[RequestKey]:
    return set()


@pytest.fixture
def audit(known: set[RequestKey]) -> PoolAudit:
    return PoolAudit(known.__contains__)


def test_it_looks_after_a_while_then_now_and_then_and_soon_after_a_loss(audit: PoolAudit) -> None:
    assert not audit.start(SETTLE_S - 0.1, ["pool"])
    assert audit.start(SETTLE_S, ["pool"])
    assert not audit.start(SETTLE_S + 1.0, ["pool"])  # no answer yet
    assert audit.inventory("pool", [], ["g"]) == []
    assert not audit.start(SETTLE_S + EVERY_S - 0.1, ["pool"])
    assert audit.start(SETTLE_S + EVERY_S, ["pool"])
    audit.suspect(100.0)
    assert not audit.start(100.0, ["pool"])
    assert audit.start(100.0 + SETTLE_S, ["pool"])


def test_what_neither_scheduler_nor_gateway_knows_is_released_when_all_have_answered(
    audit: PoolAudit, known: set[RequestKey]
) -> None:
    known.add(A)
    audit.start(SETTLE_S, ["pool"])
    assert audit.inventory("pool", [A, B, C], ["g", "h"]) == [B, C]
    assert audit.verdict() == []
    assert audit.claimed("g", [B]) == []
    assert audit.claimed("g", []) == []  # again
    assert audit.claimed("stranger", []) == []
    assert audit.claimed("h", []) == [C]
    assert audit.claimed("h", []) == []


def test_without_gateways_no_process_needs_it(audit: PoolAudit) -> None:
    audit.start(SETTLE_S, ["pool"])
    assert audit.inventory("pool", [B], []) == [B]
    assert audit.verdict() == [B]


def test_what_is_submitted_in_the_meantime_stays(audit: PoolAudit, known: set[RequestKey]) -> None:
    audit.start(SETTLE_S, ["pool"])
    audit.inventory("pool", [B], ["g"])
    known.add(B)
    assert audit.claimed("g", []) == []


def test_a_loss_in_the_middle_begins_anew(audit: PoolAudit) -> None:
    audit.start(SETTLE_S, ["pool"])
    audit.inventory("pool", [B], ["g"])
    audit.suspect(5.0)
    assert audit.claimed("g", []) == []
    assert audit.inventory("pool", [B], ["g"]) == []  # of the previous audit
    assert audit.start(5.0 + SETTLE_S, ["pool"])


def test_an_answer_that_never_comes_is_asked_for_again(audit: PoolAudit) -> None:
    assert audit.start(SETTLE_S, ["pool"])
    assert audit.start(2 * SETTLE_S + 2 * EVERY_S, ["pool"])


def test_one_loss_after_the_other_does_not_put_it_off_for_ever(audit: PoolAudit) -> None:
    audit.start(SETTLE_S, ["pool"])
    audit.inventory("pool", [], [])
    for tenths in range(40, 60):
        audit.suspect(tenths / 10)
    assert audit.start(4.0 + SETTLE_S, ["pool"])


def test_it_waits_while_a_process_that_would_be_asked_is_away(audit: PoolAudit) -> None:
    audit.postpone(3.0)
    audit.postpone(4.0)
    assert not audit.start(3.9 + SETTLE_S, ["pool"])
    assert audit.start(4.0 + SETTLE_S, ["pool"])


def test_gateways_are_asked_once_all_shards_have_answered(audit: PoolAudit) -> None:
    audit.start(SETTLE_S, ["k0", "k1"])
    assert audit.inventory("k1", [B], ["g"]) == []
    assert audit.inventory("k1", [], ["g"]) == []  # again
    assert audit.verdict() == []
    assert audit.inventory("k0", [C], ["g"]) == [B, C]
    assert audit.claimed("g", [C]) == [B]
