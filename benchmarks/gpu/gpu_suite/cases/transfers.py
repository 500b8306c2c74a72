"""10,000 hand-overs through every channel, with every block compared by checksum."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from alignedserve.geometry import KvGeometry
from alignedserve.proto import common_pb2 as pb
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.device import DeviceBlockStore, attach_device_store
from alignedserve.transfer.handles import StoreHandle
from alignedserve.transfer.links import connect
from gpu_suite.ends import End, PairEnd, RemoteEnd, StoreEnd, end_process, serve, start_process
from gpu_suite.pairs import Pair, paired
from gpu_suite.record import Context

HANDOVERS = 10_000
CAPACITY = 512
MOST_BLOCKS = 16  # in one hand-over
GEOMETRY = KvGeometry("random", "bfloat16", layers=4, kv_heads=4, head_dim=16, block_size=16)
Way = tuple[Channel, End, End]
"""A channel, its source and its destination."""


def run(context: Context) -> None:
    channels = {"shared-memory": _shared_memory, "pcie": _pcie, "gloo": _gloo}
    if context.on_gpu:
        channels |= {"cuda-ipc": _cuda_ipc, "nccl": _nccl}
    for name, made in channels.items():
        with context.record.case(name, row="transfers"), made(context) as ways:
            hand_over(context, name, ways)


def hand_over(context: Context, name: str, ways: list[Way]) -> None:
    """Run all hand-overs of a channel, alternating the direction, and record how many blocks are wrong."""
    wanted = HANDOVERS if context.on_gpu and not context.quick else 200
    done = blocks = wrong = touched = rounds = 0
    begun_s = time.perf_counter()
    while done < wanted:
        channel, source, destination = ways[rounds % len(ways)]
        rounds += 1
        sent = source.fill(context.draw.randrange(1 << 30))
        destination.poison()
        before = destination.checksums()
        expected = list(before)
        free = list(range(CAPACITY))
        context.draw.shuffle(free)
        copies = []
        while len(free) >= MOST_BLOCKS and done < wanted:
            count = context.draw.randint(1, MOST_BLOCKS)
            targets = [free.pop() for _ in range(count)]
            sources = context.draw.sample(range(CAPACITY), count)
            copies.append(channel.copy(sources, targets))
            for source_id, target in zip(sources, targets, strict=True):
                expected[target] = sent[source_id]
            done += 1
            blocks += count
        for copy in copies:
            if not copy.wait(30.0):
                raise TimeoutError(f"{name}: a hand-over did not end within 30 s")
        found = destination.checksums()
        written = [index for index in range(CAPACITY) if expected[index] != before[index]]
        wrong += sum(found[index] != expected[index] for index in written)
        touched += sum(found[i] != before[i] for i in range(CAPACITY) if expected[i] == before[i])
    context.record.figure(
        f"{name}, blocks that differ",
        wrong + touched,
        f"of {blocks} in {done} hand-overs",
        row="transfers",
        overwritten_beside=touched,
        seconds=time.perf_counter() - begun_s,
        channel=ways[0][0].name,
    )


@contextmanager
def _shared_memory(context: Context) -> Iterator[list[Way]]:
    stores = [HostBlockStore.private(name, GEOMETRY, CAPACITY) for name in ("pool", "buffer")]
    ends = [StoreEnd(store) for store in stores]
    channels = [connect(*stores), connect(*reversed(stores))]
    try:
        yield [(channels[0], ends[0], ends[1]), (channels[1], ends[1], ends[0])]
    finally:
        _close(channels)


@contextmanager
def _pcie(context: Context) -> Iterator[list[Way]]:
    pool, cache = HostBlockStore.private("pool", GEOMETRY, CAPACITY), _device_store("cache", context.device)
    channels = [connect(pool, cache), connect(cache, pool)]
    ends = StoreEnd(pool), StoreEnd(cache)
    try:
        yield [(channels[0], ends[0], ends[1]), (channels[1], ends[1], ends[0])]
    finally:
        _close(channels)


@contextmanager
def _cuda_ipc(context: Context) -> Iterator[list[Way]]:
    """The buffer belongs to another process, as a prefill instance's does. This process has the cache and copies."""
    process, connection = start_process(_own_buffer, context.device)
    channels: list[Channel] = []
    try:
        if not connection.poll(60.0):
            raise TimeoutError("the other process did not share its buffer within a minute")
        handle = StoreHandle.from_proto(pb.StoreHandle.FromString(connection.recv()))
        buffer, cache = attach_device_store(handle, geometry=GEOMETRY), _device_store("cache", context.device)
        channels += [connect(buffer, cache), connect(cache, buffer)]
        theirs, ours = RemoteEnd(connection), StoreEnd(cache)
        yield [(channels[0], theirs, ours), (channels[1], ours, theirs)]
    finally:
        _close(channels)
        end_process(process, connection)


def _own_buffer(connection: Connection, device: str) -> None:
    store = _device_store("buffer", device, shared=True)
    connection.send(store.handle().to_proto().SerializeToString())
    serve(connection, StoreEnd(store))


@contextmanager
def _gloo(context: Context) -> Iterator[list[Way]]:
    with paired("gloo", context.device, GEOMETRY, CAPACITY) as pair:
        yield _ways(pair)


@contextmanager
def _nccl(context: Context) -> Iterator[list[Way]]:
    with paired("nccl", context.device, GEOMETRY, CAPACITY) as pair:
        yield _ways(pair)


def _ways(pair: Pair) -> list[Way]:
    """Push first: the pull copies back what was pushed."""
    ours, theirs = StoreEnd(pair.cache), PairEnd(pair.remote)
    return [(pair.push, ours, theirs), (pair.pull, theirs, ours)]


def _device_store(store_id: str, device: str, *, shared: bool = False) -> DeviceBlockStore:
    tensor = torch.zeros(CAPACITY, GEOMETRY.block_bytes, dtype=torch.uint8, device=device)
    return DeviceBlockStore(store_id, GEOMETRY, tensor, shared=shared)


def _close(channels: list[Channel]) -> None:
    for channel in channels:
        channel.close()
