"""The memory plan in `alignedserve doctor`: which stores a cluster would have on this machine."""

from __future__ import annotations

from alignedserve.cluster.cli.doctor_channels import here
from alignedserve.cluster.launch.gpus import count_gpus
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, PlannedRole, plan_roles, resolve_device
from alignedserve.config import Config
from alignedserve.device_memory import DeviceMemory, describe_plan
from alignedserve.memory import available_memory_bytes, describe_bytes
from alignedserve.model import resolve_model
from alignedserve.ranks.degrees import devices_in
from alignedserve.sizing import plan_stores

Row = dict[str, str]


def examine_memory(config: Config) -> tuple[list[Row], list[str]]:
    """The stores that would be planned if the cluster were started now, and the parts of instances on GPUs.

    Of one pair if this node has no GPUs for all, and nothing if instances are spread over several nodes. Raises
    ModelError; ConfigError, ResourceError if it cannot be.
    """
    config = here(config)
    if any(config.spread(role).nodes > 1 for role in MODEL_ROLES):
        return [], []
    from alignedserve.engine.model.inspect import inspect_model  # its import takes seconds

    gpus = count_gpus()
    device, trusted = resolve_device(config, gpus), config.model.trust_remote_code
    config = config.on_device(device)
    folder = resolve_model(config.model.path, trusted)
    info = inspect_model(config.served_model_name, folder, config.model.dtype, device, trusted)
    devices = [(role.role, _memory_of(role)) for role in plan_roles(config, gpus) if role.on_gpu]
    plan = plan_stores(config, info, available_memory_bytes(), devices)
    geometry = info.geometry(plan.block_size)
    stores = {
        "KV pool": plan.pool,
        "cache of each decode instance": plan.decode_cache,
        "cache of each prefill instance": plan.prefill_cache,
    }
    if config.cluster.prefetch:
        stores["candidate batch buffer"] = plan.batch_buffer
        stores["candidate request buffer"] = plan.requests_buffer
    rows = [
        {
            "store": name,
            "blocks": str(blocks),
            "tokens": str(blocks * plan.block_size),
            "size": describe_bytes(blocks * geometry.block_bytes),
        }
        for name, blocks in stores.items()
    ]
    return rows, describe_plan(config, plan.devices, devices)


def _memory_of(role: PlannedRole) -> DeviceMemory:
    from alignedserve.engine.model.instance_memory import CudaMeter

    free, total = CudaMeter(devices_in(role.device)).look()
    return DeviceMemory(role.id, role.device, total, free)
