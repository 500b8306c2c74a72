"""Prepares a model in a worker's process, without blocking its event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from alignedserve.config import Config
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.runner import allocate_cache
from alignedserve.engine.step_progress import Progress, StepProgress
from alignedserve.geometry import KvGeometry
from alignedserve.memory import describe_bytes, usable_cores
from alignedserve.model import ModelInfo, resolve_model
from alignedserve.text import Tokenizer
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.device import DeviceBlockStore
from alignedserve.transfer.segments import SegmentClient

logger = logging.getLogger(__name__)


OfRanks = Callable[[str, KvGeometry, int, str], tuple[BlockStore, torch.Tensor]]


def prepare_process(config: Config) -> None:
    """Apply settings for a process in which one thread computes and others pass messages."""
    torch.set_num_threads(config.cluster.threads or usable_cores())
    # The event loop must get the interpreter soon after the compute thread has launched a kernel.
    sys.setswitchinterval(0.0005)


async def inspect(config: Config, device: str) -> ModelInfo:
    """Resolve and read the configured model. Raises ModelError."""
    path = await asyncio.to_thread(resolve_model, config.model.path, config.model.trust_remote_code)
    return await asyncio.to_thread(
        inspect_model, config.served_model_name, path, config.model.dtype, device, config.model.trust_remote_code
    )


async def load(
    config: Config,
    info: ModelInfo,
    device: str,
    starting: StepProgress,
    load_part: Callable[[Progress], LoadedModel] | None = None,
) -> tuple[LoadedModel, Tokenizer | None]:
    """The weights on `device`, and the tokenizer if the folder has one. Raises ModelError.

    `load_part`: loads rank 0's part of them instead.
    """
    begun, progress = time.monotonic(), starting.of(f"weights ({describe_bytes(info.weight_bytes)})", "tensors")
    if load_part is not None:
        loaded = await asyncio.to_thread(load_part, progress)
    else:
        loaded = await asyncio.to_thread(load_model, info, device, config.model.trust_remote_code, progress)
    tokenizer = await asyncio.to_thread(Tokenizer.from_folder, Path(info.path))
    logger.info("loaded %s (%s) on %s in %.1f s", info.name, info.dtype, device, time.monotonic() - begun)
    return loaded, tokenizer


def cache_store(
    store_id: str,
    geometry: KvGeometry,
    blocks: int,
    device: str,
    node_id: str,
    of_ranks: OfRanks | None = None,
) -> tuple[BlockStore, torch.Tensor]:
    """An instance's cache: a store for channels, and the same memory as a tensor for the engine.

    `of_ranks` makes those of an instance of several ranks.
    """
    if of_ranks is not None:
        return of_ranks(store_id, geometry, blocks, node_id)
    if device == "cpu":
        store = HostBlockStore.private(store_id, geometry, blocks, node_id=node_id)
        return store, allocate_cache(geometry, blocks, device, store.as_memory())
    tensor = allocate_cache(geometry, blocks, device)
    return DeviceBlockStore(store_id, geometry, tensor, node_id=node_id), tensor


def buffer_store(
    store_id: str, geometry: KvGeometry, blocks: int, device: str, node_id: str, segments: SegmentClient
) -> BlockStore:
    """A store that other processes of the node can open, on the instance's device or in a segment of the node agent."""
    if device == "cpu":
        return HostBlockStore.create(segments, store_id, geometry, blocks, node_id=node_id)
    tensor = allocate_cache(geometry, blocks, device)
    return DeviceBlockStore(store_id, geometry, tensor, node_id=node_id, shared=True)
