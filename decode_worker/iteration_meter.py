"""Measures what iterations cost beside computing: the gap between two iterations, and the bubble."""

from __future__ import annotations

import time
from collections.abc import Sequence

from alignedserve.metrics import Histogram, Page
from alignedserve.scheduler.cost.flight import FlightCost
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.instance.lanes import by_tokens
from alignedserve.scheduler.instance.plan import IterationStatus

GAP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)
BUBBLE_BOUNDS_S = (0.0, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)


class IterationMeter:
    """Written by the decode thread, read by any thread.

    The gap is the time from the last sampled token of an iteration to the launch of the next, in which the device idles
    as far as the host can tell. It includes all work at the iteration boundary. It is 0 if the next iteration was
    launched before the tokens were known, and is not measured after a pause. The bubble is the predicted time of an
    iteration less that of the same bytes at equal prefix lengths (`scheduler.cost_model`), as in the simulator. It may
    be negative (ADR 25). It is not measured without a cost model. In a pipeline it is that of a lane's flight through
    all stages, and the iterations are rounds of all lanes.
    """

    def __init__(self, cost: StepCost | None, depth: int = 1) -> None:
        """`depth`: the stages of the instance."""
        self.cost = cost
        self._depth = depth
        self._flights = None if cost is None or depth == 1 else FlightCost(cost)
        self._ended_s: float | None = None
        self._under_way = 0
        self.gaps = Histogram(GAP_BOUNDS_S)
        self.bubbles = Histogram(BUBBLE_BOUNDS_S)
        self.predicted_s = 0.0
        self.lanes_idle_s = 0.0
        self.balanced_s = 0.0

    def begin(self) -> None:
        """Called when an iteration is launched."""
        if self._under_way:
            self.gaps.observe(0.0)
        elif self._ended_s is not None:
            self.gaps.observe(time.perf_counter() - self._ended_s)
        self._under_way += 1

    def end(self) -> None:
        """Called when the tokens of the oldest iteration under way have been sampled."""
        self._under_way -= 1
        self._ended_s = time.perf_counter()

    def pause(self) -> None:
        """Called when nothing runs: the time until the next launch is not a gap."""
        self._ended_s = None

    def bubble_s(self, lengths: Sequence[int]) -> float | None:
        """The bubble in seconds of an iteration with these prefix lengths; None without a cost model."""
        if self.cost is None:
            return None
        if self._flights is not None:
            bubble_s = self._flights.flight_s(lengths) - self._flights.balanced_flight_s(lengths)
        else:
            predicted_s = self.cost.step_s((), lengths)
            balanced_s = self.cost.balanced_step_s((), lengths)
            bubble_s = predicted_s - balanced_s
            self.predicted_s += predicted_s
            self.balanced_s += balanced_s
        self.bubbles.observe(bubble_s)
        return bubble_s

    def note_lanes(self, lanes: Sequence[Sequence[int]]) -> None:
        """A round of a pipeline's lanes, by prefix lengths. It takes as long as the slowest lane flies (as in
        `simulator/pipeline.py`). Each stage works for its part of every flight, and idles while it has none."""
        if (cost := self._flights) is None or not lanes:
            return
        flights_s = [cost.flight_s(lengths) for lengths in lanes]
        balanced_s = sum(map(cost.balanced_flight_s, lanes)) / len(lanes)
        round_s = max(flights_s)
        self.predicted_s += round_s
        self.balanced_s += min(round_s, balanced_s)
        self.lanes_idle_s += round_s - sum(flights_s) / self._depth

    def cost_of(self, lengths: Sequence[int]) -> float:
        """What an iteration with these prefix lengths takes, in seconds or, without a cost model, in other units."""
        return by_tokens(lengths) if self.cost is None else self.cost.step_s((), lengths)

    def show_metrics(self, page: Page) -> None:
        meaning = (
            "from the last token of an iteration to the launch of the next: "
            "what the device idles, as far as the host can tell"
        )
        page.histogram("iteration_gap_seconds", meaning, self.gaps)
        if self.cost is not None:
            meaning = "with a cost model: predicted cost of unequal lengths, of each iteration"
            page.histogram("iteration_bubble_seconds", meaning, self.bubbles)
            meaning = "with a cost model, in a pipeline: predicted time in which a stage has no lane to compute"
            page.counter("lanes_idle_predicted_seconds_total", meaning, self.lanes_idle_s)
            meaning = "with a cost model: predicted time of iterations"
            page.counter("iteration_predicted_seconds_total", meaning, self.predicted_s)
            meaning = "with a cost model: predicted time of the same bytes at equal lengths"
            page.counter("iteration_balanced_seconds_total", meaning, self.balanced_s)


def show_status(page: Page, status: IterationStatus) -> None:
    page.gauge("decode_running", "requests in the running batch", status.running)
    meaning = "the most requests in an iteration; fewer while the TPOT objective keeps candidates from joining"
    page.gauge("decode_max_running", meaning, status.max_running)
    page.counter("decode_iterations_total", "iterations; in a pipeline, those of each lane", status.iterations)
    meaning = "iterations that a candidate did not join, to keep the TPOT objective"
    page.counter("decode_held_iterations_total", meaning, status.held_iterations)
    meaning = "iterations with requests of two batches"
    page.counter("decode_switch_iterations_total", meaning, status.switch_iterations)
    meaning = "requests evicted to the candidate request buffer or the pool"
    page.counter("decode_evictions_total", meaning, status.evictions)
    page.gauge("decode_shortest_tokens", "shortest prefix of the running batch", status.shortest_tokens)
    page.gauge("decode_longest_tokens", "longest prefix of the running batch", status.longest_tokens)
