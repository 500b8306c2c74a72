"""The configuration keys that have an effect in a simulation: those that a run reads."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from alignedserve.config import ClusterConfig, Config, KvPoolConfig, SchedulerConfig
from alignedserve.config_sources import known_keys
from alignedserve.simulator.cell import Cell
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.replay import DECIDED, has_effect
from alignedserve.simulator.workload import Arrival, Workload
from alignedserve.testing.linear_cost import LinearStepCost

HARDWARE = Hardware(kv_tokens=640, kv_bytes_per_token=1 << 16, pool_tokens=4000, block_size=4)


class Watched:
    """A configuration, or one of its sections, that records which keys are read."""

    def __init__(self, value: Any, read: set[str], name: str = "") -> None:
        self._value, self._read, self._name = value, read, name

    def __getattr__(self, key: str) -> Any:
        made_of_keys = getattr(type(self._value), key, None)
        if self._name and isinstance(made_of_keys, property) and made_of_keys.fget is not None:
            return made_of_keys.fget(self)
        value = getattr(self._value, key)
        if not self._name:
            return Watched(value, self._read, f"{key}.")
        if key in {one.name for one in fields(self._value)}:
            self._read.add(self._name + key)
        return value


def read_by_runs() -> set[str]:
    read: set[str] = set()
    for policy, routing in ("aligned", "least-ttft"), ("aligned-cost", "least-ttft"), ("fcfs", "conductor"):
        objectives = {"ttft_objective_s": 1e6, "tpot_objective_s": 1e6}
        scheduler = SchedulerConfig(
            policy, "a100-opt-13b", "no_split", min_batch_requests=4, routing=routing, **objectives
        )
        asked = Config(cluster=ClusterConfig(decode=2), scheduler=scheduler, kv_pool=KvPoolConfig(prefix_cache=True))
        config: Any = Watched(asked, read)
        arrivals = tuple(Arrival(f"r{number}", 0.0, 30 + 9 * number, 40) for number in range(40))
        cell = Cell(
            Workload(arrivals, block_tokens=16), config, HARDWARE, (LinearStepCost(), LinearStepCost()), leap=False
        )
        cell.run()
        cell.check_nothing_is_left()
    return read


def test_a_key_has_an_effect_where_a_run_reads_it() -> None:
    assert read_by_runs() - set(DECIDED) == {key for key in known_keys() if has_effect(key)}
