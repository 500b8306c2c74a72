"""Over how many ranks an instance computes its model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from alignedserve.errors import ConfigError

PLACEMENTS = ("shared-pool", "balance-route", "least-tokens", "least-requests", "round-robin")
"""Names of `scheduler/ranks/names.py`, the default first."""
PLACEMENT_NAMES = (*PLACEMENTS, "balanced")
"""With the other name of balance-route."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """`tensor`: ranks that share each layer. `stages`: shares of the layers, one after the other (a pipeline).

    `experts`: ranks that share a mixture's experts, and attend for requests of their own.
    """

    tensor: int = 1
    stages: int = 1
    experts: int = 1

    @classmethod
    def configured(cls, role: Any, cluster: Any) -> Degrees:
        """By the sections of a role and of the cluster."""
        tensor = role.tensor_parallel or cluster.tensor_parallel
        stages = role.pipeline_parallel or cluster.pipeline_parallel
        return cls(tensor, stages, getattr(role, "expert_parallel", 1))

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages * self.experts

    def require_kind(self) -> None:
        """Raises ConfigError for ranks that share experts and layers."""
        if self.experts > 1 and self.tensor * self.stages > 1:
            raise ConfigError(
                f"decode.expert_parallel {self.experts} excludes tensor_parallel and pipeline_parallel of decode "
                f"instances so far: set decode.tensor_parallel and decode.pipeline_parallel to 1"
            )

    def require_experts(self, name: str, experts: int) -> None:
        """Raises ConfigError unless so many ranks can share a model's experts; the message has the numbers that can."""
        if self.experts > 1 and not experts:
            raise ConfigError(f"{name} has no experts that ranks could share (decode.expert_parallel)")
        if experts % self.experts:
            fits = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
            raise ConfigError(
                f"{name} has {experts} experts: {self.experts} ranks cannot share them (that fit: {fits})"
            )

    def require_channel(self, channel: str, device: str) -> None:
        """Raises ConfigError for a `cluster.channel` that does not reach parts of KV on the GPUs of ranks."""
        if self.ranks > 1 and device != "cpu" and channel in ("nccl", "nixl"):
            raise ConfigError(
                f"cluster.channel is {channel!r}, but parts of KV on the GPUs of ranks are reached over CUDA IPC, and "
                "from other nodes over Gloo, so far: use auto, gloo or cuda-ipc"
            )

    def __str__(self) -> str:
        if self.experts > 1:
            return f"{self.experts} ranks that share experts"
        if self.stages == 1:
            return f"{self.tensor} rank{'s' if self.tensor > 1 else ''}"
        return f"{self.stages} stages" + (f" of {self.tensor} ranks" if self.tensor > 1 else "")

    def require_layers(self, name: str, layers: int) -> None:
        """Raises ConfigError if a model has fewer layers than there are stages."""
        if self.stages > layers:
            raise ConfigError(
                f"{name} has {layers} layers: {self.stages} stages cannot share them; at most {layers} can"
            )


@dataclass(frozen=True, slots=True)
class Spread:
    """Over which nodes an instance's stages are spread: each node has stages in a row, with all of their ranks."""

    degrees: Degrees
    nodes: int = 1

    @classmethod
    def configured(cls, role: Any, cluster: Any) -> Spread:
        """By the sections of a role and of the cluster."""
        return cls(Degrees.configured(role, cluster), role.nodes)

    def require(self, role: str = "") -> None:
        """Raises ConfigError if a node would have no stage. `role`: whose, for the message."""
        if self.nodes > 1 and self.degrees.experts > 1:
            raise ConfigError(f"ranks that share experts are on one node: {role}.nodes must be 1, not {self.nodes}")
        if self.nodes > self.degrees.stages:
            raise ConfigError(
                f"an instance of {self.degrees} cannot be spread over {self.nodes} nodes ({role}.nodes): each needs a "
                f"stage of its own, so {role}.pipeline_parallel must be at least {self.nodes}"
            )

    def ranks(self, node: int) -> range:
        """The ranks on the node of this number; rank 0 is on node 0."""
        begin, end = (at * self.degrees.stages // self.nodes * self.degrees.tensor for at in (node, node + 1))
        return range(begin, end if self.nodes > 1 else self.degrees.ranks)

    def parts(self, instance_id: str) -> list[str]:
        """Ids of what an instance has on its further nodes: "decode-0.1" for the second."""
        return [f"{instance_id}.{node}" for node in range(1, self.nodes)]

    def ranks_of(self, part_id: str) -> int:
        """How many ranks an instance, or its part of this id, has on its node."""
        return len(self.ranks(part_number(part_id)))

    @property
    def most_ranks(self) -> int:
        """On one node."""
        return max(len(self.ranks(node)) for node in range(self.nodes))


def part_number(role_id: str) -> int:
    """0 for an instance, or another role; of what an instance has on its further nodes the number of that node."""
    return int(role_id.partition(".")[2] or 0)


def devices_in(text: str) -> list[str]:
    """The devices of an instance, by its `device`: "cpu", "cuda:0", or those of its ranks by turns, "cuda:0,1"."""
    kind, _, numbers = text.partition(":")
    return [f"{kind}:{number}" for number in numbers.split(",")] if numbers else [kind]


def device_of(numbers: Iterable[int | str]) -> str:
    """The `device` of an instance on these GPUs."""
    return "cuda:" + ",".join(map(str, numbers))


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of rank `rank` in an instance: ranks of one stage have numbers in a row."""

    rank: int
    degrees: Degrees

    @property
    def stage(self) -> int:
        return self.rank // self.degrees.tensor % self.degrees.stages

    @property
    def expert(self) -> int:
        """The share of the experts."""
        return self.rank // (self.degrees.tensor * self.degrees.stages)

    @property
    def part(self) -> int:
        """The part of each layer."""
        return self.rank % self.degrees.tensor

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.degrees.stages - 1
