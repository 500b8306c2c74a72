"""`alignedserve profile` of several ranks with pretended GPUs: the passes run on ranks of CPUs, with a store each."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.device_memory import DeviceMemory, RanksHere
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.processes import OWN_STORES_VARIABLE
from alignedserve.engine.profile import profiler_gpu, rank_passes
from alignedserve.engine.profile.device_passes import GPU_GRID, DevicePassBench, Timer
from alignedserve.engine.profile.passes import Grid, lanes_of
from alignedserve.engine.profile.role_benches import RoleBenches, in_order
from alignedserve.errors import ConfigError
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import Degrees
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.cost.parts import ModelShape
from alignedserve.sizing import plan_stores
from alignedserve.testing.models import make_model
from support.pretended_gpus import pretend_gpus

GRID = Grid((1, 4), (16, 100), (16, 61), (0, 32), ((4, 16, 100),), (1, 3), 8192, (512.0,), dict(GPU_GRID.bounds))


class WallTimer(Timer):
    def __init__(self, _device: torch.device) -> None:
        self._begun_s = 0.0

    def begin(self) -> None:
        self._begun_s = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._begun_s


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 4)
    monkeypatch.setenv(OWN_STORES_VARIABLE, "1")
    monkeypatch.setattr(profiler_gpu, "GPU_GRID", GRID)
    monkeypatch.setattr(rank_passes, "TIMER", WallTimer)
    places = RoleBenches._devices
    monkeypatch.setattr(
        RoleBenches,
        "_devices",
        lambda self, gpus, **options: {key: ["cpu"] for key in places(self, gpus, **options)},
    )


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(Degrees(2), Degrees(2), id="tp2", marks=pytest.mark.slow),
        pytest.param(Degrees(), Degrees(1, 2), id="pp2"),
        pytest.param(Degrees(), Degrees(experts=2), id="ep2", marks=pytest.mark.slow),
    ],
)
def test_a_profile_of_gpus_is_of_as_many_ranks(prefill: Degrees, decode: Degrees, tmp_path: Path) -> None:
    info, config = model(tmp_path), configured(prefill, decode)
    shape = ModelShape(info.layers, info.heads, info.kv_heads, info.head_dim)
    asked: list[tuple[int, int]] = []

    def overhead(runner: object, blocks: int, count: int) -> float:
        asked.append((blocks, count))
        return 1e-5 * count

    content = profiler_gpu.profile_gpus(config, info, shape, 8 << 30, 0.1, overhead, 4)
    (tmp_path / "gpus.json").write_text(json.dumps(content))
    assert content["degrees"] == {"prefill": asdict(prefill), "decode": asdict(decode)}
    assert content["gpu"]["backends"] == {"split_kv": "torch"}
    assert "no_split" not in content
    assert content["fit"]["decode_fitted"]["rows"] > 0
    planned = (
        {"prefill": "cuda:0", "decode": "cuda:1,2"}
        if prefill.ranks == 1
        else {"prefill": "cuda:0,1", "decode": "cuda:2,3"}
    )
    memories = [(role, DeviceMemory(f"{role}-0", where, 141 << 30, 141 << 30)) for role, where in planned.items()]
    stores = plan_stores(config, info, 8 << 30, memories)
    assert content["hardware"]["kv_tokens"] == stores.decode_cache * stores.block_size  # on GPUs of their own
    assert ("sequences" in content) == (content["gpu"]["host_s"]["1"] > 0)  # the host is not hidden here
    assert asked[0] == (512, 1)  # of the first rank, where each has blocks of its own
    cost = load_step_cost(tmp_path / "gpus.json")
    assert 0.0 < cost.step_s((), [100] * 4) < 10.0
    assert not [child for child in psutil.Process().children() if "ranks.start" in " ".join(child.cmdline())]


@pytest.mark.usefixtures("pretended")
def test_ranks_that_share_experts_take_requests_by_turns_in_blocks_of_their_own(tmp_path: Path) -> None:
    benches: RoleBenches[DevicePassBench] = RoleBenches(configured(Degrees(), Degrees(experts=2)), model(tmp_path), 3)
    try:
        bench = rank_passes.rank_bench(configured(Degrees(), Degrees()), GRID, 64, benches.part("decode"))
        places = bench._places([40, 15, 16, 17])
        assert [rank for _, rank in places] == [0, 1, 0, 1]
        assert [{block // 64 for block in blocks} for blocks, _ in places] == [{0}, {1}, {0}, {1}]
        assert [len(blocks) for blocks, _ in places] == [3, 1, 1, 2]
        assert len({block for blocks, _ in places for block in blocks}) == 7
    finally:
        benches.close()


def test_each_bench_has_gpus_of_its_own_unless_they_may_be_shared(tmp_path: Path) -> None:
    info, config = model(tmp_path), configured(Degrees(2), Degrees(4))
    with pytest.raises(ConfigError, match=r"prompts on 2 and decodes on 4 ranks, which need 6 GPUs, but there are 5"):
        RoleBenches(config, info, 5)
    benches: Any = object.__new__(RoleBenches)
    benches.degrees = {"prefill": Degrees(2), "decode": Degrees(4)}
    benches._keys, benches._arranged = {"prefill": "p", "decode": "d"}, in_order
    assert benches._devices(6, share=False) == {"p": ["cuda:0", "cuda:1"], "d": [f"cuda:{n}" for n in range(2, 6)]}
    assert benches._devices(2, share=True) == {"p": ["cuda:0", "cuda:1"], "d": ["cuda:0", "cuda:1"]}
    parts = {"p": (Degrees(2), ["cuda:0", "cuda:1"]), "d": (Degrees(4), ["cuda:1", "cuda:2"])}
    benches._parts = {
        key: SimpleNamespace(degrees=degrees, devices=devices) for key, (degrees, devices) in parts.items()
    }
    assert benches.by_device() == {
        "cuda:0": [RanksHere(1, Degrees(2))],
        "cuda:1": [RanksHere(1, Degrees(2)), RanksHere(2, Degrees(4))],
        "cuda:2": [RanksHere(2, Degrees(4))],
    }
    benches._keys = {"prefill": "same", "decode": "same"}
    assert benches._devices(4, share=False) == {"same": [f"cuda:{n}" for n in range(4)]}


def test_a_lane_has_every_so_many_th_of_the_lengths() -> None:
    assert lanes_of([30, 10, 20, 40, 50], 2) == [[0, 1, 4], [2, 3]]
    assert lanes_of([7], 3) == [[0]]


def model(folder: Path) -> ModelInfo:
    path = make_model("mixtral", folder / "model", seed=3, max_position_embeddings=512)
    return inspect_model("mixtral", path, "float32", "cpu")


def configured(prefill: Degrees, decode: Degrees) -> Config:
    return from_tree(
        {
            "cluster": {"device": "cuda"},
            "kv_pool": {"size_gib": 0.5},
            "engine": {"attention": "torch"},
            "prefill": {"tensor_parallel": prefill.tensor, "pipeline_parallel": prefill.stages},
            "decode": {
                "tensor_parallel": decode.tensor,
                "pipeline_parallel": decode.stages,
                "expert_parallel": decode.experts,
            },
        }
    )
