"""Iterations launched before the tokens of the last are known, and events that reach a request meanwhile."""

from __future__ import annotations

import time

import pytest

from alignedserve.config import DecodeConfig
from alignedserve.grammar.compiled import Grammars
from alignedserve.proto import common_pb2 as pb
from support.grammars import SlowLibrary
from support.scripted_cell import Client, ScriptedCell
from support.scripted_decode import Script


def cell_of(*scripts: Script, blocks: int = 64, overlap: bool = True, lease: int = 0, **config: int) -> ScriptedCell:
    """All requests run from the next turn on; blocks hold 4 tokens."""
    cell = ScriptedCell(blocks, 4, overlap, DecodeConfig(**{"join_iterations": 1, **config}))  # type: ignore[arg-type]
    cell.loop.set_lease(lease)
    for script in scripts:
        cell.offer(cell.add(script))
    cell.turn()
    while cell.pulls:
        cell.end_pull()
    return cell


def script(number: int, prompt: int = 4, most: int = 20, **rest: int | bool | None) -> Script:
    return Script(number, [number] * prompt, most, **rest)  # type: ignore[arg-type]


def client(cell: ScriptedCell, number: int) -> Client:
    return cell.clients[script(number).key]


def long_and_short() -> list[Script]:
    return [script(0, prompt=7, most=10), script(1, prompt=3, most=10)]


def tight_cell(lease: int, scripts: list[Script]) -> ScriptedCell:
    """Either request of `long_and_short` fits, but not both."""
    return cell_of(*scripts, blocks=5, watermark_blocks=1, lease=lease)


def run_until_evicted(cell: ScriptedCell) -> None:
    for _ in range(40):
        if not cell.evictions:
            cell.turn()
    assert cell.evictions


def test_an_iteration_is_launched_before_the_tokens_of_the_last_are_known() -> None:
    cell = cell_of(script(0))
    cell.turn()
    assert client(cell, 0).tokens == [script(0).token(0)]  # the first is under way
    cell.turn()
    assert client(cell, 0).tokens == [script(0).token(position) for position in range(2)]
    assert cell.engine.most_ahead == 2
    cell.settle()
    cell.check_ended()
    assert cell.engine.needless == 0  # it ends by its length, which is known in advance


def test_requests_go_on_while_the_grammar_of_another_is_compiled() -> None:
    cell, library = cell_of(script(0)), SlowLibrary()
    cell.loop._grammars = Grammars(library)
    bound = cell.add(script(1))
    bound.stored.spec.sampling.grammar.CopyFrom(pb.Grammar(kind="regex", text="slow"))
    cell.offer(bound)
    for _ in range(6):
        cell.turn()
        while cell.pulls:
            cell.end_pull()
    assert len(client(cell, 0).tokens) > 4
    assert len(bound.tokens) == 1, "it joined before its grammar was compiled"
    library.go.set()
    for _ in range(100):
        if cell.loop._held[bound.script.key].live is None:
            time.sleep(0.01)
            cell.turn()
    cell.settle()
    cell.check_ended()


def test_without_overlap_each_turn_gives_its_own_tokens() -> None:
    cell = cell_of(script(0), overlap=False)
    cell.turn()
    assert client(cell, 0).tokens == [script(0).token(position) for position in range(2)]
    assert cell.engine.most_ahead == 1


def test_the_engine_says_whether_to_launch_ahead_where_no_setting_does() -> None:
    for overlaps in (True, False):
        cell = ScriptedCell(8, 4, None, engine_overlaps=overlaps)
        cell.offer(cell.add(script(0)))
        cell.settle()
        assert cell.engine.most_ahead == 1 + overlaps


def test_as_long_as_a_row_needs_the_host_there_is_one_iteration_at_a_time() -> None:
    cell = cell_of(script(0), script(1, most=6, needs_host=True))
    for turn in range(1, 5):
        cell.turn()
        assert len(client(cell, 1).tokens) == 1 + turn
    assert cell.engine.most_ahead == 1
    cell.settle()
    cell.check_ended()
    assert cell.engine.most_ahead == 2


def test_a_row_behind_an_unforeseen_end_is_unused_and_its_blocks_are_free() -> None:
    cell = cell_of(script(0, ends_at=2), script(1))
    before = cell.allocator.owned_blocks
    for _ in range(3):
        cell.turn()
    assert client(cell, 0).reason == "stop"
    assert cell.engine.needless == 1
    assert cell.allocator.owned_blocks < before
    cell.settle()
    cell.check_ended()


def test_what_comes_in_takes_blocks_that_a_needless_row_still_writes_to() -> None:
    """The engine works in the order of its calls: the copy comes after the row."""
    cell = cell_of(script(0, prompt=11, most=5, ends_at=2), blocks=4)
    cell.offer(cell.add(script(1, prompt=12, most=3)))
    cell.turn()
    cell.turn()
    held = set(cell.allocator.blocks_of(script(0).key))
    cell.turn()  # it has ended, and its needless row is running
    assert cell.engine.needless == 1
    settled = cell.settled_pulls
    cell.turn()
    assert held & set(cell.allocator.blocks_of(script(1).key))
    assert cell.settled_pulls == settled
    cell.settle()
    cell.check_ended()


def test_a_copy_into_blocks_that_nothing_under_way_uses_waits_for_no_iteration() -> None:
    cell = cell_of(script(0))
    cell.turn()
    cell.offer(cell.add(script(1)))
    settled = cell.settled_pulls
    cell.turn()
    assert cell.settled_pulls == settled + 1
    cell.settle()
    cell.check_ended()


@pytest.mark.parametrize("turns", [1, 2])
def test_a_cancelled_request_is_gone_at_once_whatever_is_under_way(turns: int) -> None:
    cell = cell_of(script(0), script(1))
    for _ in range(turns):
        cell.turn()
    known = list(client(cell, 0).tokens)
    cell.cancel(client(cell, 0))
    cell.turn()
    assert (client(cell, 0).where, client(cell, 0).tokens) == ("ended", known)
    assert not cell.allocator.blocks_of(script(0).key)
    cell.settle()
    cell.check_ended()


def test_one_that_ends_with_the_iteration_under_way_can_be_cancelled_too() -> None:
    cell = cell_of(script(0, most=2), script(1))
    cell.turn()
    assert not cell.allocator.blocks_of(script(0).key)
    cell.cancel(client(cell, 0))
    cell.turn()
    assert (client(cell, 0).where, client(cell, 0).reason) == ("ended", "")
    cell.settle()
    cell.check_ended()


@pytest.mark.parametrize("lease", [0, 100])
def test_an_eviction_carries_the_token_that_was_under_way(lease: int) -> None:
    cell = cell_of(
        script(0, prompt=7, most=10), script(1, prompt=3, most=10), blocks=5, watermark_blocks=1, lease=lease
    )
    run_until_evicted(cell)
    order = cell.evictions[0]
    assert (
        order.stored.kv_tokens == len(order.stored.spec.prompt_token_ids) + len(order.stored.spec.output_token_ids) - 1
    )
    assert list(order.stored.spec.output_token_ids) == client(cell, int(order.key.request_id)).tokens
    assert cell.engine.most_ahead == 2
    cell.settle()
    cell.check_ended()


def test_an_eviction_of_what_ended_meanwhile_is_undone() -> None:
    """The same load twice: at the boundary that evicts, the pending token ends the victim, or does not."""
    runs_on = cell_of(
        script(0, prompt=7, most=10), script(1, prompt=3, most=10), blocks=5, watermark_blocks=1, lease=100
    )
    run_until_evicted(runs_on)
    victim = runs_on.evictions[0].key
    ends_at = len(runs_on.clients[victim].tokens) - 1
    scripts = long_and_short()
    scripts[int(victim.request_id)].ends_at = ends_at
    cell = tight_cell(100, scripts)
    for _ in range(ends_at + 1):
        cell.turn()
    assert cell.clients[victim].reason == "stop"
    assert not cell.evictions
    assert not cell.allocator.blocks_of(victim)
    assert cell.loop.status.evictions == 0
    assert runs_on.loop.status.evictions == 1
    assert cell.scheduler._lease_blocks == 100
    assert runs_on.scheduler._lease_blocks < 100
    cell.settle()
    cell.check_ended()


def test_what_fails_as_a_whole_ends_its_requests_and_one_that_joined_the_next_goes_on() -> None:
    cell = cell_of(script(0), script(1))
    cell.offer(cell.add(script(2)))
    cell.engine.fail_next = True
    cell.turn()  # launches what fails, and 2 comes in
    cell.end_pull()
    cell.turn()  # launches the next iteration with all three, and sees the failure
    assert [client(cell, number).reason for number in range(3)] == ["error", "error", ""]
    assert not cell.allocator.blocks_of(script(0).key)
    cell.turn()
    assert client(cell, 2).tokens == [script(2).token(position) for position in range(2)]
    cell.settle()
    cell.check_ended()
    assert client(cell, 2).reason == "length"


def test_a_device_that_is_of_no_more_use_ends_the_loop_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of(script(0), script(1))
    monkeypatch.setattr(cell.engine, "device_fault", lambda: RuntimeError("an illegal memory access"))
    cell.engine.fail_next = True
    cell.turn()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cell.turn()
    assert [client(cell, number).reason for number in range(2)] == ["", ""]  # another process takes them over


@pytest.mark.parametrize("after", [2, 3])
def test_a_row_that_fails_ends_its_request_alone_also_where_the_next_would_be_its_last(after: int) -> None:
    cell = cell_of(script(0, most=after + 2, fails_at=2), script(1))
    cell.settle()
    cell.check_ended()
    assert client(cell, 0).reason == "error"
    assert client(cell, 1).reason == "length"


def test_draining_sends_what_runs_back_with_the_token_that_was_under_way() -> None:
    cell = cell_of(script(0), script(1, ends_at=3))
    for _ in range(3):
        cell.turn()
    cell.loop.drain()
    cell.settle()
    assert cell.drained
    assert [client(cell, number).where for number in (0, 1)] == ["pool", "ended"]
    assert cell.allocator.free_blocks == 64


def test_where_all_end_by_length_the_same_is_decided_with_and_without() -> None:
    statuses = []
    for overlap in (True, False):
        scripts = [script(number, prompt=3 + 2 * number, most=12 + number) for number in range(5)]
        cell = cell_of(*scripts, blocks=16, watermark_blocks=2, lease=100, overlap=overlap)
        cell.settle()
        cell.check_ended()
        statuses.append(cell.loop.status)
    assert statuses[0] == statuses[1]
    assert statuses[0].evictions > 0
