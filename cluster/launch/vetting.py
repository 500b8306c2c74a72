"""Checks whether a new cluster could replace the running one, while the running one still serves.

The checks cover only necessary conditions. Memory and GPUs in use do not count as missing, because the running cluster
ends first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alignedserve.cluster.launch.preflight import check_cost_model, check_model
from alignedserve.cluster.launch.units import PLACED_ALONE, ROUNDING, Unit, describe_resources
from alignedserve.config import Config
from alignedserve.errors import ResourceError
from alignedserve.memory import describe_bytes, total_memory_bytes
from alignedserve.sizing import GIB, plan_stores


def vet_node(config: Config, device: str, alone: bool) -> None:
    """Check what an instance and a shard need to start on this node; on a CPU that is the only node, what all need.

    `device`: "cpu" or "cuda". Raises ModelError, ConfigError, ResourceError.
    """
    folder = check_model(config)
    from alignedserve.engine.model.inspect import inspect_model  # its import takes seconds

    name, trusted = config.served_model_name, config.model.trust_remote_code
    model = inspect_model(name, folder, config.model.dtype, device, trusted)
    check_cost_model(config)
    wanted, total = int(config.kv_pool.size_gib * GIB), total_memory_bytes()
    if wanted > total:
        raise ResourceError(
            f"kv_pool.size_gib is {describe_bytes(wanted)}, but a node has only {describe_bytes(total)}; lower it"
        )
    if device == "cpu" and alone:
        plan_stores(config, model, total)


def eligible(nodes: Mapping[str, Mapping[str, float]], units: Sequence[Unit]) -> list[str]:
    """The nodes that could run at least one unit. `nodes` has the resources that each node could give, by node.

    Raises ResourceError if the nodes do not have the resources of all units.
    """
    for name in sorted({name for unit in units for name in unit.resources}):
        asked = sum(unit.resources.get(name, 0.0) for unit in units)
        had = sum(node.get(name, 0.0) for node in nodes.values())
        if asked > had + ROUNDING:
            raise _lacking(f"{asked:g} {name}", f"all nodes together have only {had:g}")
    for unit in units:
        if not any(unit.fits(node) for node in nodes.values()):
            what = describe_resources(unit.resources)
            hint = f" ({PLACED_ALONE})" if len(unit.instances) > 1 else ""
            raise _lacking(f"{what} on one node for {', '.join(unit.instances)}", f"no node has that{hint}")
    return [name for name, node in nodes.items() if any(unit.fits(node) for unit in units)]


def _lacking(asked: str, had: str) -> ResourceError:
    return ResourceError(
        f"the new cluster's instances need {asked} (cluster.prefill_resources, cluster.decode_resources), "
        f"but {had}; lower the requirements or add nodes first. To start a cluster that waits for its nodes, delete "
        "the application, then deploy it"
    )
