"""The results of a simulated run, from which every summary, table and plot is made."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from alignedserve.simulator.workload import Arrival


@dataclass(slots=True)
class RequestResult:
    """One request. Seconds of the virtual clock.

    `token_s`: when each output token came, in order; empty for a refused request. `pool_wait_s`: from the end of
    prefill (or an eviction) to the next decode iteration, summed; 0 in colocated systems. `objective_waits`: how many
    such waits it had if it has a wait objective; `objective_waits_met`: those that were no longer. `stages_s`: further
    stages, by name.
    """

    arrival: Arrival
    token_s: array[float] = field(default_factory=lambda: array("d"))
    refused: str = ""
    pool_wait_s: float = 0.0
    objective_waits: int = 0
    objective_waits_met: int = 0
    preemptions: int = 0
    stages_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class StepColumns:
    """Every pass of every instance, in columns of equal length. Seconds, tokens.

    `balanced_s`: the same bytes at equal lengths (`StepCost.balanced_step_s`); `seconds - balanced_s` is the bubble.
    `gap_s`: scheduling and copies charged before the pass. `switching`: 1 in a batch switch.
    """

    instance: array[int] = field(default_factory=lambda: array("H"))
    start_s: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    balanced_s: array[float] = field(default_factory=lambda: array("d"))
    gap_s: array[float] = field(default_factory=lambda: array("d"))
    decodes: array[int] = field(default_factory=lambda: array("I"))
    prefill_tokens: array[int] = field(default_factory=lambda: array("I"))
    shortest: array[int] = field(default_factory=lambda: array("I"))
    longest: array[int] = field(default_factory=lambda: array("I"))
    total: array[int] = field(default_factory=lambda: array("Q"))
    switching: array[int] = field(default_factory=lambda: array("B"))


@dataclass(slots=True)
class Barriers:
    """Iterations of decode instances whose `ranks` ranks wait for each other, in columns of equal length. Seconds.

    `seconds`: of the slowest rank. `own_s`: the sum of what the ranks take alone. `last_join_s`: when the last request
    began to decode; from then on ranks only run empty. KV was copied from rank to rank (`moved_bytes`), from the pool
    to ranks (`joined_bytes`) and back (`evicted_bytes`).
    """

    ranks: int
    last_join_s: float
    moved_bytes: int = 0
    joined_bytes: int = 0
    evicted_bytes: int = 0
    start_s: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    own_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class RunResult:
    """The result of one policy, workload and seed. `instances`: names by the number in `StepColumns.instance`.

    `pool_blocks`: (seconds, blocks owned), recorded at each change of more than a hundredth of the capacity.
    """

    policy: str
    requests: list[RequestResult]
    steps: StepColumns
    instances: tuple[str, ...]
    end_s: float
    pool_blocks: list[tuple[float, int]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    configuration: Mapping[str, object] = field(default_factory=dict)
    barriers: Barriers | None = None
