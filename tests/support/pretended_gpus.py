"""A machine with GPUs for tests of `alignedserve profile`: only what asks CUDA is pretended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from alignedserve.engine.profile import profiler_gpu
from alignedserve.engine.profile.copies import device_copies


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """H200s with 2 GiB free; passes and copies run on the CPU."""
    cpu, properties = torch.device("cpu"), SimpleNamespace(multi_processor_count=132, total_memory=141 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 141 << 30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(profiler_gpu, "device_rates", lambda device, timer: {"copy_bytes_s": 4e12})
    monkeypatch.setattr(profiler_gpu, "bandwidth_by_blocks", lambda device: {1: 50e9, 132: 4e12})
    monkeypatch.setattr(profiler_gpu, "device_copies", lambda geometry, devices: device_copies(geometry, [cpu]))
    monkeypatch.setattr(profiler_gpu, "LEAST_PASSES_S", 0.05)
