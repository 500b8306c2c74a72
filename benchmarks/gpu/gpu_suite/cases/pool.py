"""Copies 1 GiB in scattered blocks between the page-locked pool and HBM, compared with one large copy."""

from __future__ import annotations

import statistics
import time

import torch

from alignedserve.geometry import KvGeometry
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.channel import Channel, wait_page_locked
from alignedserve.transfer.device import DeviceBlockStore
from alignedserve.transfer.links import connect
from gpu_suite.rates import Rate, around, seconds_of
from gpu_suite.record import Context

COPIED_BYTES = 1 << 30
BLOCK_SIZE = 16
# (layers, KV heads, head size) of a model with large blocks and one with small blocks.
GEOMETRIES = {"llama-2-7b": (32, 32, 128), "llama-3-8b": (32, 8, 128)}
JUDGED = "llama-2-7b"


def run(context: Context) -> None:
    copied = COPIED_BYTES if context.on_gpu and not context.quick else 4 << 20
    for name, (layers, kv_heads, head_dim) in GEOMETRIES.items():
        geometry = KvGeometry(name, "bfloat16", 2 if context.small else layers, kv_heads, head_dim, BLOCK_SIZE)
        with context.record.case(name, row="pool-copies" if name == JUDGED else ""):
            _measure(context, geometry, copied)


def _measure(context: Context, geometry: KvGeometry, copied: int) -> None:
    count = max(2, copied // geometry.block_bytes)
    pool = HostBlockStore.private("pool", geometry, 2 * count)
    memory = torch.frombuffer(pool.as_memory(), dtype=torch.int32)
    memory.random_()
    tensor = torch.empty(2 * count, geometry.block_bytes, dtype=torch.uint8, device=context.device)
    cache = DeviceBlockStore("cache", geometry, tensor)
    repeat = 2 if context.small else 9
    for name, source, destination in (("to HBM", pool, cache), ("back", cache, pool)):
        channel = connect(source, destination)
        try:
            _pinned(channel, count)
            with around(lambda to=name: _large_copy(context, copied, back=to == "back")) as rate:
                scattered = _copies(context, channel, count, repeat)
                in_order = _copies(context, channel, count, repeat, scattered=False)
        finally:
            channel.close()
        _report(context, geometry, name, count, rate, scattered, in_order)
    for store in (pool, cache):
        store.close()


def _report(
    context: Context,
    geometry: KvGeometry,
    name: str,
    count: int,
    rate: Rate,
    scattered: list[float],
    in_order: list[float],
) -> None:
    moved = count * geometry.block_bytes
    context.record.figure(
        f"{name}, {count} scattered blocks of {geometry.block_bytes / 2**20:g} MiB ({geometry.model})",
        moved / statistics.median(scattered) / rate.mean,
        "of one large copy",
        row="pool-copies" if geometry.model == JUDGED else "",
        samples=scattered,
        blocks_in_order=moved / statistics.median(in_order) / rate.mean,
        bytes_per_s=moved / statistics.median(scattered),
        large_copy=rate.detail(),
    )


def _pinned(channel: Channel, count: int) -> None:
    """Wait until the memory is page-locked in the background, then warm up."""
    wait_page_locked(channel, 60.0)
    for _ in range(3):
        channel.copy(range(count), range(count)).wait(60.0)


def _copies(context: Context, channel: Channel, count: int, repeat: int, *, scattered: bool = True) -> list[float]:
    """Seconds from requesting a copy of `count` blocks to its completion."""
    seconds = []
    for _ in range(repeat):
        source, destination = (
            _ids(context, store, count, scattered) for store in (channel.source, channel.destination)
        )
        begun_s = time.perf_counter()
        if not channel.copy(source, destination).wait(60.0):
            raise TimeoutError("a copy did not end within a minute")
        seconds.append(time.perf_counter() - begun_s)
    return seconds


def _ids(context: Context, store: BlockStore, count: int, scattered: bool) -> list[int]:
    return context.draw.sample(range(store.capacity_blocks), count) if scattered else list(range(count))


def _large_copy(context: Context, copied: int, *, back: bool) -> float:
    """Bytes a second of one page-locked copy of `copied` bytes."""
    host = torch.empty(copied, dtype=torch.uint8, pin_memory=context.on_gpu)
    host.view(torch.int32).random_()
    here = torch.empty(copied, dtype=torch.uint8, device=context.device)
    source, target = (here, host) if back else (host, here)
    seconds = seconds_of(lambda: target.copy_(source, non_blocking=True), context.device, 2 if context.small else 7)
    return copied / statistics.median(seconds)
