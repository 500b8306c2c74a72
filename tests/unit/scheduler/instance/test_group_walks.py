"""Long random walks of the iteration scheduler of ranks that have a cache each: full caches, moves, failed copies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from alignedserve.scheduler.instance.plan import BufferKind, IterationPlan
from alignedserve.scheduler.ranks.group_scheduler import GroupScheduler
from alignedserve.scheduler.ranks.names import PLACEMENTS
from support.iteration_machine import COPYING, IterationMachine

STEPS = 500
SEEDS = range(60)


class Walk(IterationMachine):
    """Counts what happens."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = draw = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.placement = draw.choice((*["shared-pool"] * 12, *PLACEMENTS))
        self.start(
            capacity=draw.randint(8, 20),
            block_size=draw.choice((1, 2, 4)),
            max_running=draw.randint(3, 9),
            watermark=draw.choice((0, 0, 1)),
            join_iterations=draw.choice((1, 1, 4)),
            starvation_after_s=draw.choice((20.0, float("inf"))),
            join_window=draw.choice((None, 0.25)),
            prompts=[draw.randint(1, 9) for _ in range(4)],
            objective_s=None,
            ranks=draw.choice((2, 2, 3)),
            placement=self.placement,
        )

    def growth(self) -> int:
        """Tokens of an answer; mostly most of a rank's cache."""
        return self.draw.randint(2, max(3, self.capacity * self.block_size - 14))

    def take_plan(self, plan: IterationPlan) -> None:
        super().take_plan(plan)
        self.seen["moves"] += len(plan.moves)
        self.seen["sharing moves"] += sum(move.shared_blocks > 0 for move in plan.moves)
        self.seen["evictions"] += len(plan.evictions)

    def step(self) -> None:
        draw = self.draw
        what = draw.random()
        if what < 0.3:
            for _ in range(3):
                self.offer(draw.randrange(10), draw.randrange(4), self.growth(), draw.choice(list(BufferKind)), 1)
        elif what < 0.55 and self.where(*COPYING):
            fails = draw.random() < 0.2
            before = len(self.where("moving"))
            self.end_copy(draw.randrange(10), fails=fails)
            self.seen["failed moves"] += fails and len(self.where("moving")) < before
        elif what < 0.58:
            moving = [int(known.candidate.key.request_id) for known in self.where("moving")]
            number = draw.choice(moving or [*range(10)])
            self.seen["cancelled moves"] += number in moving
            self.cancel(number)
        elif what < 0.6:
            self.mark_urgent([draw.randrange(10)], draw.uniform(-5.0, 5.0))
        elif what < 0.62:
            self.set_lease(draw.choice((0, 100)))
        else:
            self.iterate(draw.choice((0.0, 1.0)), [], [draw.randrange(10)] if draw.random() < 0.1 else [])
        self.adds_up()


@pytest.fixture(scope="module")
def seen() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    yield found
    print(dict(found))


@pytest.mark.parametrize("seed", SEEDS)
def test_books_are_right_and_every_request_ends(seed: int, seen: Counter[str]) -> None:
    walk = Walk(seed)
    assert isinstance(walk.scheduler, GroupScheduler)
    for _ in range(STEPS):
        walk.step()
    assert walk.scheduler.status().moves == walk.seen["moves"]
    assert walk.placement == "shared-pool" or not walk.seen["moves"]
    walk.teardown()
    seen.update(walk.seen)


def test_the_walks_saw_what_they_are_for(seen: Counter[str]) -> None:
    for what in ("moves", "sharing moves", "failed moves", "cancelled moves", "evictions"):
        assert seen[what] > 5, what
