"""The memory of the pods in deploy/kuberay: the pool, the instances' weights and processes, and the GPUs' plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.config_sources import from_tree
from alignedserve.device_memory import DeviceMemory
from alignedserve.model import ModelInfo, resolve_model
from alignedserve.sizing import GIB, plan_stores
from support import kuberay
from support.kuberay import quantity

MIB = 1 << 20
RAY_AND_SERVE_BYTES = 1212 * MIB  # resident memory of one node with a gateway, as measured (ADR 43)
ROLE_BYTES = 386 * MIB  # of a process that has imported torch and transformers, as measured (ADR 43)
H100_BYTES = 80 * GIB
QWEN3_8B = ModelInfo(  # from its config.json and its weights' index
    name="qwen3-8b",
    path="/models/Qwen3-8B",
    model_type="qwen3",
    dtype="bfloat16",
    layers=36,
    kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_positions=40960,
    eos_token_ids=(151645, 151643),
    generation_defaults={},
    weight_bytes=2 * 8_190_735_360,
    heads=32,
    hidden_size=4096,
    mlp_width=12288,
)
LLAMA_70B = replace(
    QWEN3_8B,
    name="llama-3.3-70b",
    path="/models/Llama-3.3-70B-Instruct",
    model_type="llama",
    layers=80,
    vocab_size=128256,
    max_positions=131072,
    weight_bytes=2 * 70_553_706_496,
    heads=64,
    hidden_size=8192,
    mlp_width=28672,
)
MODELS = {model.path: model for model in (QWEN3_8B, LLAMA_70B)}


@pytest.mark.parametrize("variant", kuberay.VARIANTS)
def test_the_memory_limit_covers_the_pool_and_everything_beside_it(variant: str) -> None:
    config = from_tree(kuberay.serve_config(variant)["applications"][0]["args"])
    for pods in kuberay.ray_pods(variant):
        if pods.is_head:
            continue
        degrees = {role: config.degrees(role).ranks for role in ("prefill", "decode")}
        most = int(pods.resources.get("GPU", 1 << 30)) // max(degrees.values())
        instances = min(most, config.cluster.prefill + config.cluster.decode)
        shm = sum(quantity(v["emptyDir"]["sizeLimit"]) for v in pods.spec["volumes"] if kuberay.is_memory(v))
        processes = instances * max(degrees.values()) + 3  # ranks; pool, scheduler, agent, supervisor
        others = shm + RAY_AND_SERVE_BYTES + processes * ROLE_BYTES
        free = pods.memory_bytes - others
        if config.cluster.device == "cuda":
            # While weights are read, each instance also has them in host memory.
            model = MODELS[config.model.path]
            free -= instances * model.weight_bytes
            sides = [("prefill", config.cluster.prefill), ("decode", config.cluster.decode)]
            devices = [
                (role, DeviceMemory(f"{role}-{n}", gpus_of(role, n, degrees[role]), H100_BYTES, H100_BYTES - GIB))
                for role, count in sides
                for n in range(count)
            ]
            plan = plan_stores(config, model, free, devices)  # refuses what does not fit
            block_bytes = model.geometry(config.kv_pool.block_size).block_bytes
        else:
            model = tiny()
            plan = plan_stores(config, model, free)
            block_bytes = model.geometry(config.kv_pool.block_size).block_bytes
        assert config.kv_pool.size_gib > 0
        assert plan.pool == int(config.kv_pool.size_gib * GIB) // block_bytes


def gpus_of(role: str, number: int, ranks: int) -> str:
    """GPUs that no other instance has."""
    return "cuda:" + ",".join(f"{role}{number}.{rank}" for rank in range(ranks))


def tiny() -> ModelInfo:
    from alignedserve.engine.model.inspect import inspect_model

    return inspect_model("tiny", resolve_model("tiny"), "auto", "cpu")
