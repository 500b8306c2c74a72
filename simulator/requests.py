"""A replayed request: what it has generated, and its time in each stage. Only the simulator knows when it ends."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from alignedserve.request import RequestKey, Stage
from alignedserve.simulator.report.results import RequestResult
from alignedserve.simulator.workload import Arrival


@dataclass(slots=True)
class Replayed:
    """`tokens` excludes those of a running decode: its instance adds them when the request leaves it."""

    arrival: Arrival
    result: RequestResult
    key: RequestKey
    ended: bool = False
    stage: Stage = Stage.QUEUE
    stage_since_s: float = 0.0
    waiting_since_s: float | None = None  # since its prefill, or an eviction
    pool: str = ""  # the shard that its KV was written to last
    stages_s: dict[Stage, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.result.token_s)

    @property
    def prefix_tokens(self) -> int:
        """The prompt and the generated tokens."""
        return self.arrival.input_tokens + len(self.result.token_s)

    @property
    def kv_tokens(self) -> int:
        """Tokens with KV: all but the newest token, whose KV is computed with the next one."""
        return self.arrival.input_tokens + len(self.result.token_s) - 1

    @property
    def missing_tokens(self) -> int:
        return self.arrival.output_tokens - len(self.result.token_s)

    def enter(self, stage: Stage, now_s: float) -> None:
        self.stages_s[self.stage] = self.stages_s.get(self.stage, 0.0) + now_s - self.stage_since_s
        self.stage, self.stage_since_s = stage, now_s

    def wait(self, now_s: float) -> None:
        self.waiting_since_s = now_s

    def stop_waiting(self, now_s: float, *, dropped: bool = False) -> None:
        """It decodes, or with `dropped` its KV was dropped: then the wait did not end within the objective."""
        if self.waiting_since_s is not None:
            waited_s = now_s - self.waiting_since_s
            self.result.pool_wait_s += waited_s
            if objective_s := self.arrival.wait_objective_s:
                self.result.objective_waits += 1
                self.result.objective_waits_met += waited_s <= objective_s and not dropped
            self.waiting_since_s = None

    def generate(self, times_s: array[float] | list[float]) -> bool:
        """Add tokens that came at these times. Returns whether the request is complete."""
        self.result.token_s.extend(times_s)
        return len(self.result.token_s) >= self.arrival.output_tokens

    def end(self, now_s: float) -> None:
        self.ended = True
        self.enter(self.stage, now_s)
        self.result.stages_s = {stage.value: self.stages_s[stage] for stage in Stage if stage in self.stages_s}
