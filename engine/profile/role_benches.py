"""Runs passes on the ranks that a cluster's instances have: prompts on those of prefill, decodes on those of decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from alignedserve.config import Config
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.parallel.processes import RankProcesses, start_ranks
from alignedserve.engine.profile.passes import Measurement, PassBench, PassShape
from alignedserve.model import ModelInfo


class RoleBenches:
    """For CPUs. Roles of the same degrees without stages share a bench. `close` ends the other ranks."""

    def __init__(self, config: Config, info: ModelInfo, plan: Sequence[Measurement]) -> None:
        """Raises ConfigError if the ranks cannot share the model, and what loading it raises."""
        self._ranks: list[RankProcesses] = []
        self.degrees = {role: config.degrees(role) for role in ("prefill", "decode")}
        self._benches: dict[object, tuple[PassBench, int]] = {}  # and the threads, by `_key`
        threads = torch.get_num_threads()
        try:
            for role in self.degrees:
                if self._key(role) not in self._benches:
                    torch.set_num_threads(threads)
                    bench = self._bench(config, role, info, plan)
                    self._benches[self._key(role)] = bench, torch.get_num_threads()
        except BaseException:
            self.close()
            raise

    @property
    def decode(self) -> PassBench:
        """From now on this thread computes with the threads of a decode instance."""
        return self._of("decode")

    def run(self, shape: PassShape) -> float:
        """As `PassBench.run`."""
        return self._of("prefill" if shape.chunks else "decode").run(shape)

    @property
    def clocks(self) -> Counter[str]:
        """How many passes each clock has timed."""
        return sum((bench.clocks for bench, _ in self._benches.values()), Counter())

    def close(self) -> None:
        """Idempotent."""
        for ranks in self._ranks:
            ranks.close()

    def _key(self, role: str) -> object:
        """Equal for roles with the same bench. Stages are divided for each role's own passes."""
        degrees = self.degrees[role]
        return (role, degrees) if degrees.stages > 1 else degrees

    def _of(self, role: str) -> PassBench:
        bench, threads = self._benches[self._key(role)]
        torch.set_num_threads(threads)
        return bench

    def _bench(self, config: Config, role: str, info: ModelInfo, plan: Sequence[Measurement]) -> PassBench:
        ranks = start_ranks(config, role, info)
        if ranks is None:
            return PassBench(load_model(info, "cpu", config.model.trust_remote_code), plan, config.engine.attention)
        self._ranks.append(ranks)
        return PassBench(ranks.load(), plan, ranks=ranks, experts=config.degrees(role).experts)
