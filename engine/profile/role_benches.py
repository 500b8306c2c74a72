"""Runs passes on the ranks that a cluster's instances have: prompts on those of prefill, decodes on those of decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from alignedserve.config import Config
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.parallel.processes import RankProcesses, start_ranks
from alignedserve.engine.profile.passes import PassShape
from alignedserve.errors import ConfigError
from alignedserve.model import ModelInfo

ROLES = ("prefill", "decode")


class Bench(Protocol):
    def run(self, shape: PassShape) -> float: ...


AnyBench = TypeVar("AnyBench", bound=Bench)


@dataclass(frozen=True, slots=True)
class LoadedRole:
    """Rank 0 of what a role has: its part of the model, its other ranks, and the threads with which it computes."""

    decodes: bool
    """Whether decodes are measured on it."""
    experts: int
    """How many ranks share them."""
    devices: Sequence[str]
    loaded: LoadedModel
    ranks: RankProcesses | None
    threads: int


class RoleBenches(Generic[AnyBench]):
    """Roles of the same degrees without stages share a bench. `close` ends the other ranks."""

    def __init__(self, config: Config, info: ModelInfo, gpus: int = 0) -> None:
        """Loads the model for each role. `gpus`: how many this machine has; 0: on its CPUs.

        Raises ConfigError if the ranks cannot share the model, or GPUs are missing, and what loading it raises.
        """
        self.degrees = {role: config.degrees(role) for role in ROLES}
        self._keys = {role: self._key(role) for role in ROLES}
        self._parts: dict[object, LoadedRole] = {}
        self._benches: dict[object, AnyBench] = {}
        threads, devices = torch.get_num_threads(), self._devices(gpus, share=config.cluster.share_gpu)
        try:
            for role, key in self._keys.items():
                if key not in self._parts:
                    torch.set_num_threads(threads)
                    self._parts[key] = self._load(config, role, info, devices[key])
        except BaseException:
            self.close()
            raise

    def open(self, make: Callable[[LoadedRole], AnyBench]) -> None:
        """Make the benches."""
        for key, part in self._parts.items():
            torch.set_num_threads(part.threads)
            self._benches[key] = make(part)

    @property
    def decode(self) -> AnyBench:
        """From now on this thread computes with the threads of a decode instance."""
        return self._of("decode")

    def run(self, shape: PassShape) -> float:
        """As `Bench.run`."""
        return self._of("prefill" if shape.chunks else "decode").run(shape)

    def part(self, role: str) -> LoadedRole:
        return self._parts[self._keys[role]]

    @property
    def benches(self) -> list[AnyBench]:
        return list(self._benches.values())

    def close(self) -> None:
        """Idempotent."""
        for part in self._parts.values():
            if part.ranks is not None:
                part.ranks.close()

    def _key(self, role: str) -> object:
        """Equal for roles with the same bench. Stages are divided for each role's own passes."""
        degrees = self.degrees[role]
        return (role, degrees) if degrees.stages > 1 else degrees

    def _devices(self, gpus: int, *, share: bool) -> dict[object, list[str]]:
        """Of each bench: GPUs of its own, or, if ranks may share them, by turns."""
        ranks = {key: self.degrees[role].ranks for role, key in self._keys.items()}
        if not gpus:
            return {key: ["cpu"] for key in ranks}
        needed = sum(ranks.values())
        if needed > gpus and not share:
            raise ConfigError(
                f"profile measures prompts on {self.degrees['prefill'].ranks} and decodes on "
                f"{self.degrees['decode'].ranks} ranks, which need {needed} GPUs, but there are {gpus}: choose fewer "
                "ranks, or let them share GPUs (cluster.share_gpu)"
            )
        turns = iter(range(needed))
        return {key: [f"cuda:{next(turns) % gpus}" for _ in range(count)] for key, count in ranks.items()}

    def _of(self, role: str) -> AnyBench:
        torch.set_num_threads(self.part(role).threads)
        return self._benches[self._keys[role]]

    def _load(self, config: Config, role: str, info: ModelInfo, devices: Sequence[str]) -> LoadedRole:
        ranks = start_ranks(config, role, info, devices)
        try:
            loaded = load_model(info, devices[0], config.model.trust_remote_code) if ranks is None else ranks.load()
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
        decodes = self._keys[role] == self._keys["decode"]
        return LoadedRole(decodes, self.degrees[role].experts, devices, loaded, ranks, torch.get_num_threads())
