"""Systems by name: what `--policy` chooses, in the cluster and in the simulator (systems.md).

A disaggregated system is a batch-formation policy (`policies/`) with settings; a colocated one is an instance scheduler
(`colocated/`) whose passes hold prompts and decodes together.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Topology(enum.Enum):
    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class System:
    """`target` is `module:attribute`: a BatchPolicy, or an instance scheduler of a colocated system.

    `settings`: configuration keys that the system fixes, e.g. `{"cluster.prefetch": False}`. `options`: its own, with
    their defaults, which `--set NAME.KEY=VALUE` changes.
    """

    name: str
    topology: Topology
    target: str
    summary: str
    settings: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, float | int | bool | str] = field(default_factory=dict)
