"""Generated conversations: `chats:`."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise

import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.errors import ConfigError
from alignedserve.simulator.traces import Load, read_trace
from alignedserve.simulator.workload import Arrival


def test_each_turn_of_a_chat_goes_on_from_what_was_said() -> None:
    chats = "chats:conversations=30,turns=5,system=640,message_min=10,message_max=90,output_min=5,output_max=200"
    workload = read_trace(chats).workload(Load(rate_per_s=10.0), 3)
    times_s = [arrival.arrival_s for arrival in workload.arrivals]
    assert (len(times_s), times_s[0], times_s) == (150, 0.0, sorted(times_s))
    of_each: dict[str, list[Arrival]] = {}
    for arrival in workload.arrivals:
        of_each.setdefault(arrival.request_id.partition("t")[0], []).append(arrival)
    others: set[int] = set()
    for turns in of_each.values():
        assert turns[0].blocks[:10] == tuple(range(10))
        assert 650 <= turns[0].input_tokens <= 730
        for before, after in pairwise(turns):
            said = before.input_tokens + before.output_tokens
            assert 10 <= after.input_tokens - said <= 90
            assert after.blocks[: said // 64] == before.blocks + before.answer_blocks
            assert after.arrival_s >= before.arrival_s + 20.0
        own = {block for turn in turns for block in (*turn.blocks, *turn.answer_blocks)} - set(range(10))
        assert not own & others
        others |= own
    begin_s = [turns[0].arrival_s for turns in of_each.values()]
    assert statistics.fmean(after - before for before, after in pairwise(begin_s)) == pytest.approx(0.5, rel=0.5)
    assert workload == read_trace(chats).workload(Load(rate_per_s=10.0), 3)
    assert read_trace(chats).workload(Load(limit=7), 3).arrivals == tuple(
        sorted(read_trace(chats).workload(Load(), 3).arrivals, key=lambda one: one.arrival_s)[:7]
    )
    with pytest.raises(ConfigError, match="not for a closed loop"):
        read_trace(chats).workload(Load(clients=2), 3)


def test_chats_are_found_in_a_prefix_cache(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--trace",
        "chats:conversations=6,turns=4",
        "--rate",
        "2",
        "--policy",
        "aligned,memserve-basic",
        "--json",
    )
    assert main(["simulate", *arguments]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["aligned"]["prefix_hit_share"] > 0.95 * summary["aligned"]["prefix_ideal_share"] > 0.5
    assert not summary["memserve-basic"].get("prefix_hit_share")
