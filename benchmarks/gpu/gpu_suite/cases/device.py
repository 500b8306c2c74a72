"""HBM to the HBM of another process through CUDA IPC and NCCL, compared with a copy within the device."""

from __future__ import annotations

import gc
import statistics
import time

import torch

from alignedserve.geometry import KvGeometry
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.device import attach_device_store
from alignedserve.transfer.links import connect
from alignedserve.transfer.paired.peer import PeerProcess, PeerSpec, make_store
from gpu_suite.pairs import paired
from gpu_suite.rates import around, copy_rate, release
from gpu_suite.record import Context

COPIED_BYTES = 1 << 30
GEOMETRY = KvGeometry("llama-2-7b", "bfloat16", 32, 32, 128, 16)
SMALL = KvGeometry("small", "bfloat16", 2, 2, 64, 16)


def run(context: Context) -> None:
    geometry = GEOMETRY if context.on_gpu and not context.quick else SMALL
    count = max(8, (COPIED_BYTES if geometry is GEOMETRY else 1 << 18) // geometry.block_bytes)
    if context.on_gpu:
        with context.record.case("cuda-ipc", row="device-ipc"):
            _ipc(context, geometry, count)
        gc.collect()
        release()
    with context.record.case("nccl" if context.on_gpu else "gloo", row="device-nccl"):
        _paired(context, geometry, count)


def _ipc(context: Context, geometry: KvGeometry, count: int) -> None:
    spec = PeerSpec(geometry, 2 * count, stores=("peer/buffer",), device="cuda:0")
    with PeerProcess(spec) as peer:
        buffer, cache = attach_device_store(peer.handles[0], geometry=geometry), make_store(spec, "cache")
        pull, push = connect(buffer, cache), connect(cache, buffer)
        try:
            _measure(context, "cuda-ipc", "device-ipc", {"pull": pull, "push": push}, count)
        finally:
            pull.close()
            push.close()
            buffer.close()


def _paired(context: Context, geometry: KvGeometry, count: int) -> None:
    channel = "nccl" if context.on_gpu else "gloo"
    with paired(channel, context.device, geometry, 2 * count) as pair:
        _measure(context, channel, "device-nccl", {"pull": pair.pull, "push": pair.push}, count)
        if pair.client.sessions != 1:
            raise ValueError(f"the connection broke {pair.client.sessions - 1} times")


def _measure(context: Context, name: str, row: str, channels: dict[str, Channel], count: int) -> None:
    """Record the bytes copied a second relative to a device copy (half the bytes that one reads and writes)."""
    block_bytes = next(iter(channels.values())).source.block_bytes
    repeat = 2 if context.small else 9
    with around(lambda: copy_rate(context.device) / 2) as rate:
        found = {
            (way, scattered): _seconds(context, channel, count, repeat, scattered=scattered)
            for way, channel in channels.items()
            for scattered in (True, False)
        }
    for way in channels:
        seconds, in_order = found[way, True], found[way, False]
        moved = count * block_bytes
        context.record.figure(
            f"{name}, {way}, {count} scattered blocks of {block_bytes / 2**20:g} MiB",
            moved / statistics.median(seconds) / rate.mean,
            "of a device copy",
            row=row,
            samples=seconds,
            blocks_in_order=moved / statistics.median(in_order) / rate.mean,
            bytes_per_s=moved / statistics.median(seconds),
            device_copy=rate.detail(),
        )


def _seconds(context: Context, channel: Channel, count: int, repeat: int, *, scattered: bool) -> list[float]:
    """Seconds from requesting a copy of `count` blocks to its completion, after two warm-up copies."""
    seconds = []
    for _ in range(repeat + 2):
        source, destination = (
            context.draw.sample(range(store.capacity_blocks), count) if scattered else list(range(count))
            for store in (channel.source, channel.destination)
        )
        if context.on_gpu:
            torch.cuda.synchronize()
        begun_s = time.perf_counter()
        if not channel.copy(source, destination).wait(30.0):
            raise TimeoutError("a copy did not end within 30 s")
        seconds.append(time.perf_counter() - begun_s)
    return seconds[2:]
