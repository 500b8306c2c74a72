"""Runs passes on the ranks that a cluster's instances have: prompts on those of prefill, decodes on those of decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from alignedserve.config import Config
from alignedserve.device_memory import RanksHere
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.parallel.children import devices_by_turns
from alignedserve.engine.parallel.processes import RankProcesses, start_ranks
from alignedserve.engine.profile.passes import PassShape
from alignedserve.errors import ConfigError
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import Degrees, device_of, devices_in

ROLES = ("prefill", "decode")
Arranged = Callable[[Sequence[int], int], str]


def in_order(gpus: Sequence[int], _tensor: int) -> str:
    return device_of(gpus)


class Bench(Protocol):
    def run(self, shape: PassShape) -> float: ...


AnyBench = TypeVar("AnyBench", bound=Bench)


@dataclass(frozen=True, slots=True)
class LoadedRole:
    """A role's model as its rank 0 has loaded it, the other ranks, and the threads with which rank 0 computes."""

    decodes: bool
    """Whether decodes are measured on it."""
    degrees: Degrees
    devices: Sequence[str]
    loaded: LoadedModel
    ranks: RankProcesses | None
    threads: int


class RoleBenches(Generic[AnyBench]):
    """Roles of the same degrees without stages share a bench. `close` ends the other ranks."""

    def __init__(self, config: Config, info: ModelInfo, gpus: int = 0, arranged: Arranged = in_order) -> None:
        """Loads the model for each role. `gpus`: how many this machine has; 0: on its CPUs. `arranged`: puts an
        instance's GPUs, given by number, into the order of ranks, of which so many share a layer.

        Raises ConfigError if the ranks cannot share the model, or GPUs are missing, and what loading it raises.
        """
        self.degrees = {role: config.degrees(role) for role in ROLES}
        self._keys = {role: self._key(role) for role in ROLES}
        self._parts: dict[object, LoadedRole] = {}
        self._benches: dict[object, AnyBench] = {}
        self._arranged = arranged
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
    def other_pids(self) -> list[int]:
        """Of the processes of all ranks but the first ones."""
        return [pid for part in self._parts.values() if part.ranks is not None for pid in part.ranks.pids[1:]]

    def by_device(self) -> dict[str, list[RanksHere]]:
        """The ranks of each instance on a device, by device."""
        found: dict[str, list[RanksHere]] = {}
        for part in self._parts.values():
            for device, number in Counter(devices_by_turns(part.devices, part.degrees.ranks)).items():
                found.setdefault(device, []).append(RanksHere(number, part.degrees))
        return found

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
        found, first = {}, 0
        for role, key in self._keys.items():
            if key not in found:
                numbers = dict.fromkeys(number % gpus for number in range(first, first + ranks[key]))
                found[key] = devices_in(self._arranged(list(numbers), self.degrees[role].tensor))
                first += ranks[key]
        return found

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
        return LoadedRole(decodes, self.degrees[role], devices, loaded, ranks, torch.get_num_threads())
