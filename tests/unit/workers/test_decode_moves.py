"""Requests that move between the caches of ranks while they decode: every answer is as scripted, no block is left."""

from __future__ import annotations

import random

import pytest

from alignedserve.config import DecodeConfig
from alignedserve.metrics import Page
from alignedserve.scheduler.ranks import group_scheduler
from support.scripted_cell import ScriptedCell
from support.scripted_decode import Script


@pytest.fixture(autouse=True)
def asked_in_each_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_scheduler, "ASKED_AFTER", 1)


def cell(ranks: int = 2, blocks: int = 40, block_size: int = 2, *, caches: bool = False) -> ScriptedCell:
    config = DecodeConfig(max_running=8, join_iterations=1)
    return ScriptedCell(ranks * blocks, block_size, None, config, caches=caches, ranks=ranks)


@pytest.mark.parametrize("seed", range(8))
def test_moves_failures_and_cancellations_in_any_order(seed: int) -> None:
    draw = random.Random(seed)
    here = cell(draw.choice((2, 3)), draw.choice((24, 40)), draw.choice((1, 2, 4)), caches=draw.random() < 0.5)
    for number in range(14):
        prompt = [5] * 7 if number % 3 else [number + 2] * draw.randint(1, 6)
        here.offer(here.add(Script(number, prompt, draw.randint(2, 15), group="g" if number % 3 else "")))
    begun = 0
    for _ in range(300):
        begun = max(begun, len(here.copies))
        if here.pulls and draw.random() < 0.7:
            here.end_pull()
        if here.copies and draw.random() < 0.6:
            here.end_move(draw.randrange(len(here.copies)), fails=draw.random() < 0.2)
        if here.evictions and draw.random() < 0.6:
            here.end_eviction()
        if draw.random() < 0.01:
            here.cancel(draw.choice(list(here.clients.values())))
        here.turn()
    here.settle()
    here.check_ended()
    assert here.moved > 2
    assert begun
    page = Page(instance="decode-0")
    here.loop.show_metrics(page)
    counted = float(page.text().split("alignedserve_decode_moves_total{")[1].split("} ")[1].split()[0])
    assert counted >= here.moved


def test_a_request_that_is_cancelled_while_it_moves_ends_with_the_copy() -> None:
    for fails in (False, True):
        here = cell()
        client = here.add(Script(0, [3, 4, 5], 75))
        here.offer(client)
        here.turn()
        here.end_pull()
        while not here.copies:
            here.turn()
        tokens = len(client.tokens)
        here.turn()
        assert len(client.tokens) == tokens  # it pauses
        here.cancel(client)
        here.turn()
        assert client.where == "here"
        here.end_move(fails=fails)
        here.turn()
        assert client.where == "ended"
        here.check_ended()
