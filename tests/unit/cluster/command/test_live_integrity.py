"""`alignedserve doctor --live` and its check: state that does not add up is reported as a failure."""

from __future__ import annotations

import asyncio

import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.control.integrity import check_books
from alignedserve.control.metrics import StoreCount
from alignedserve.errors import AccountingError
from alignedserve.proto import supervisor_pb2 as sv
from support.fake_cluster import FakeCluster
from support.gateway import running_gateway


def sound() -> None:
    return None


def wrong() -> None:
    raise AccountingError("2 blocks are lost")


def broken() -> None:
    raise KeyError("unknown")


def test_what_a_check_finds_is_reported_and_never_raised() -> None:
    assert check_books("s", "i", sound) == sv.BookCheck(store="s", instance="i")
    assert check_books("s", "i", wrong).problem == "2 blocks are lost"
    assert "KeyError" in check_books("s", "i", broken).problem


def test_states_that_do_not_sum_to_the_capacity_are_a_problem() -> None:
    found = check_books("s", "i", sound, lambda: StoreCount("s", 9, 4, 3, 1))
    assert found.problem == "free + owned + cached is not 9"
    found = check_books("s", "i", sound, lambda: StoreCount("s", 9, 4, 4, 1))
    assert (found.problem, found.capacity_blocks, found.free_blocks, found.owned_blocks) == ("", 9, 4, 4)


@pytest.mark.parametrize(
    "problem",
    [
        sv.BookCheck(store="decode-0/cache", instance="decode-0", problem="2 blocks are lost"),
        sv.BookCheck(store="all", instance="decode-0", problem="it cannot be asked: UNAVAILABLE", unknown=True),
    ],
)
async def test_doctor_live_fails_where_something_does_not_add_up(
    problem: sv.BookCheck, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeCluster() as cluster, running_gateway(cluster) as gateway:
        assert await asyncio.to_thread(main, ["doctor", "--live", "--url", gateway.url]) == 0
        assert "1 blocks = 1 free + 0 owned + 0 cached" in capsys.readouterr().out
        cluster.books.append(problem)
        assert await asyncio.to_thread(main, ["doctor", "--live", "--url", gateway.url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("WRONG")] == [lines[-1]]
    assert problem.problem in lines[-1]


async def test_doctor_live_says_that_no_process_can_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["doctor", "--live", "--url", "http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err
