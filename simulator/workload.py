"""The requests to replay, with arrivals and lengths. Only the simulator knows output lengths, no policy does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Arrival:
    """`arrival_s`: on the virtual clock, from 0. `output_tokens`: the number of tokens it will generate, at least 1.

    `wait_objective_s`: as in `RequestSpec`; 0: it has none. `priority`: as there. `blocks`: ids of the prompt's blocks;
    prompts whose first ids are equal begin with the same tokens. `answer_blocks`: ids of the full blocks of prompt and
    answer after the prompt's own full ones.
    """

    request_id: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    wait_objective_s: float = 0.0
    priority: int = 0
    blocks: tuple[int, ...] = ()
    answer_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in order of time. `description`: source, its SHA-256, and all processing applied. JSON.

    `clients`: above 0, a closed loop: as many requests arrive at time 0, and the next one whenever one has ended.
    """

    arrivals: tuple[Arrival, ...]
    description: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Notes for readers of the results, e.g. how many of a trace's blocks repeat earlier prefixes."""
    clients: int = 0
    block_tokens: int = 0
    """Tokens of each of `Arrival.blocks`; 0: the source names no blocks."""
