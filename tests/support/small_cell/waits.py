"""Bounds on each wait in a run of a small cell (ADR 24), computed from the requests that the run served.

The bound of a wait is its wait objective, the time to make room, and the service of overdue requests due earlier.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial

from alignedserve.scheduler.core.actions import MarkUrgent
from alignedserve.scheduler.core.waiting import LOOK_S
from support.small_cell import times
from support.small_cell.cell import SmallCell
from support.small_cell.requests import Request, Service, Wait


def covered_s(intervals: Iterable[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """How much of begin..end is covered by the intervals."""
    total, reached = 0.0, begin_s
    for first_s, last_s in sorted(intervals):
        total += max(0.0, min(last_s, end_s) - max(first_s, reached))
        reached = max(reached, last_s)
    return total


class Bound:
    """The bound of each wait of a run."""

    def __init__(self, cell: SmallCell) -> None:
        default_s = cell.config.scheduler.starvation_after_s
        self.objective_s = {name: request.wait_objective_s or default_s for name, request in cell.requests.items()}
        self.waits = [wait for request in cell.requests.values() for wait in request.waits]
        self._marked_s: dict[str, list[float]] = {}
        for at_s, action in cell.log:
            for key in action.keys if isinstance(action, MarkUrgent) else ():
                self._marked_s.setdefault(key.request_id, []).append(at_s)
        of_request: dict[str, list[Service]] = {}
        for service in sorted(cell.services, key=lambda service: service.begin_s):
            of_request.setdefault(service.request_id, []).append(service)
        self.overdue: list[tuple[float, Service]] = []  # when the request was due, and the service after its wait
        for wait in self.waits:
            if wait.until_s >= self.due_s(wait) or self.was_marked(wait):
                after = [service for service in of_request[wait.request_id] if service.end_s >= wait.until_s]
                self.overdue.append((self.due_s(wait), after[0]))
        self.room_s = self.time_to_make_room_s(cell)

    def was_marked(self, wait: Wait) -> bool:
        """Whether it took priority before its objective had ended, because the threshold was shorter."""
        return any(wait.since_s <= at_s <= wait.until_s for at_s in self._marked_s.get(wait.request_id, ()))

    def due_s(self, wait: Wait) -> float:
        return wait.since_s + self.objective_s[wait.request_id]

    @staticmethod
    def time_to_make_room_s(cell: SmallCell) -> float:
        """Time to notice and prefetch it, run requests that have just joined, evict, copy it in and run it.

        Each step counts with its longest possible time for the longest request, not with its time in this run.
        """
        longest = max(request.prompt + request.answer for request in cell.requests.values())
        iterations = 1 + cell.config.decode.join_iterations + 2
        prefetch_s = times.PREFETCH_S if cell.shape.prefetch else 0.0
        copies_s = prefetch_s + 2 * times.copy_in_s(cell.blocks_for(longest)) + times.COPY_OUT_S
        slow_s = times.SLOWEST * (3 * times.MESSAGE_S + copies_s)
        return cell.config.scheduler.tick_s + slow_s + iterations * times.iteration_s(longest)

    def of(self, wait: Wait) -> float:
        """The bound of the wait in seconds."""
        due_s = self.due_s(wait)
        older = [
            (service.begin_s - self.room_s, service.end_s)
            for older_s, service in self.overdue
            if older_s <= due_s + LOOK_S and service.request_id != wait.request_id
        ]
        return due_s - wait.since_s + self.room_s + covered_s(older, due_s, wait.until_s)

    def broken(self) -> list[tuple[float, Wait]]:
        """Waits that exceed their bound, and by how much."""
        found = [(wait.until_s - wait.since_s - self.of(wait), wait) for wait in self.waits]
        return [(excess_s, wait) for excess_s, wait in found if excess_s > 1e-9]


class Load:
    """Requests that arrive at a cell at given times."""

    def __init__(self, cell: SmallCell, rng: random.Random) -> None:
        self.cell, self.rng = cell, rng

    def one(self, name: str, at_s: float, prompt: int, answer: int, most: int = 0, objective_s: float = 0.0) -> Request:
        request = Request(name, prompt, answer, max(most, answer), "", wait_objective_s=objective_s)
        self.cell.at(at_s, partial(self.cell.submit, [request]))
        return request

    def stream(
        self,
        name: str,
        count: int,
        every_s: float,
        prompts: tuple[int, int],
        answers: tuple[int, int],
        at_s: float = 0.0,
        objectives_s: tuple[float, ...] = (0.0,),
    ) -> None:
        """Arrivals one after another. Half of the requests may ask for more tokens than they will get."""
        rng = self.rng
        for number in range(count):
            answer, most = rng.randint(*answers), rng.choice([0, answers[1]])
            at = at_s + number * every_s * rng.uniform(0.8, 1.2)
            objective_s = rng.choice(objectives_s) if len(objectives_s) > 1 else objectives_s[0]
            self.one(f"{name}-{number}", at, rng.randint(*prompts), answer, most, objective_s)
