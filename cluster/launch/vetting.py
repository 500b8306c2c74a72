"""Whether another cluster could take the place of one that runs: found out while that one still serves.

What is asked for here is little enough that every cluster that could start has it. Memory and GPUs that are in use are
not counted as missing, since the cluster that runs ends first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alignedserve.cluster.launch.preflight import check_cost_model, check_model
from alignedserve.cluster.launch.units import ROUNDING, Unit, describe_resources
from alignedserve.config import Config
from alignedserve.errors import ResourceError
from alignedserve.memory import describe_bytes, total_memory_bytes
from alignedserve.sizing import GIB


def vet_node(config: Config, device: str) -> None:
    """What an instance and a shard of the pool find when they start on this node.

    `device`: "cpu" or "cuda". Raises ModelError, ConfigError, ResourceError.
    """
    folder = check_model(config)
    from alignedserve.engine.model.inspect import inspect_model  # takes seconds, which a mistyped path does not need

    inspect_model(config.served_model_name, folder, config.model.dtype, device, config.model.trust_remote_code)
    check_cost_model(config)
    wanted, total = int(config.kv_pool.size_gib * GIB), total_memory_bytes()
    if wanted > total:
        raise ResourceError(
            f"kv_pool.size_gib asks for {describe_bytes(wanted)}, but a node has {describe_bytes(total)}; ask for less"
        )


def eligible(nodes: Mapping[str, Mapping[str, float]], units: Sequence[Unit]) -> list[str]:
    """The nodes, of `nodes` with the resources that each could give, that some unit could be on.

    Raises ResourceError where they do not have what all units ask for.
    """
    for name in sorted({name for unit in units for name in unit.resources}):
        asked = sum(unit.resources.get(name, 0.0) for unit in units)
        had = sum(node.get(name, 0.0) for node in nodes.values())
        if asked > had + ROUNDING:
            raise _lacking(f"{asked:g} {name}", f"all nodes together could give {had:g}")
    for unit in units:
        if not any(unit.fits(node) for node in nodes.values()):
            what = describe_resources(unit.resources)
            raise _lacking(f"{what} on one node for {', '.join(unit.instances)}", "no node could give that")
    return [name for name, node in nodes.items() if any(unit.fits(node) for unit in units)]


def _lacking(asked: str, had: str) -> ResourceError:
    return ResourceError(
        f"the new cluster's instances ask for {asked} (cluster.prefill_resources, cluster.decode_resources, a GPU "
        f"each), but {had}; ask for less, or have such nodes first. One that waits for its nodes can be had, too: "
        "delete the application, then deploy it"
    )
