"""The sequence of NCCL calls at both ends, over a pretended library on the CPU, and (marked gpu) over NCCL."""

from __future__ import annotations

import ctypes
import queue
import random
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import paired_copies_pb2 as pc
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.device import DeviceBlockStore
from alignedserve.transfer.handles import geometry_to_proto
from alignedserve.transfer.pair_choice import MULTI_RANK_VARIABLE
from alignedserve.transfer.paired.blocks import packed_blocks
from alignedserve.transfer.paired.channel import PairedChannel
from alignedserve.transfer.paired.client import PULL, PUSH, PairClient
from alignedserve.transfer.paired.nccl import NcclTransport, id_to_bytes, nccl_problem
from alignedserve.transfer.paired.peer import PeerProcess, PeerSpec, make_store
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.paired.server import PairServer
from alignedserve.transfer.paired.transport import ASKING_RANK, SERVING_RANK, Portion, Wiring

GEOMETRY = KvGeometry("nccl", "bfloat16", layers=4, kv_heads=2, head_dim=8, block_size=4)
PIECE_BLOCKS = 5


class PretendedError(Exception):
    pass


class PretendedNccl:
    """The used part of `cupy.cuda.nccl` between two threads: a message arrives only if its length is expected."""

    NCCL_UINT8 = 1
    NcclError = PretendedError

    def __init__(self, *, signed_ids: bool = False) -> None:
        self.signed_ids = signed_ids
        self.wires: dict[bytes, queue.Queue[bytes | None]] = {}
        self.lengths: list[int] = []

    def get_unique_id(self) -> bytes | tuple[int, ...]:
        unique = bytes(random.randrange(256) for _ in range(128))
        self.wires[unique] = queue.Queue(1)
        return tuple(value - 256 if value > 127 else value for value in unique) if self.signed_ids else unique

    def NcclCommunicator(self, ranks: int, unique: Any, rank: int) -> PretendedCommunicator:
        assert ranks == 2
        if isinstance(unique, bytes) == self.signed_ids:
            raise TypeError("Argument 'commId' has incorrect type")
        return PretendedCommunicator(self, self.wires[id_to_bytes(unique)])


class PretendedCommunicator:
    def __init__(self, library: PretendedNccl, wire: queue.Queue[bytes | None]) -> None:
        self.library, self.wire = library, wire

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert kind == PretendedNccl.NCCL_UINT8
        self.library.lengths.append(count)
        self.wire.put(ctypes.string_at(address, count))

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        message = self.wire.get()
        if message is None:
            raise PretendedError("aborted")
        assert len(message) == count
        ctypes.memmove(address, message, count)

    def check_async_error(self) -> None:
        pass

    def abort(self) -> None:
        self.wire.put(None)


def store(name: str, capacity: int, part: StoreSlice | None = None) -> DeviceBlockStore:
    part = part or StoreSlice.whole(GEOMETRY)
    tensor = torch.randn(capacity, *part.shape, 2, GEOMETRY.block_size, GEOMETRY.head_dim).to(torch.bfloat16)
    return DeviceBlockStore(name, GEOMETRY, tensor, part=part)


def ends(library: PretendedNccl) -> tuple[NcclTransport, NcclTransport]:
    def tell(key: str, value: bytes) -> None:
        other.heard(key, value)

    told = Rendezvous(tell)
    other = Rendezvous(told.heard)
    wiring = Wiring("nccl", SERVING_RANK, "", "cpu", PIECE_BLOCKS * GEOMETRY.block_bytes, 5.0)
    first = NcclTransport(wiring, "pull", told, library=library)
    return first, NcclTransport(replace(wiring, rank=ASKING_RANK), "pull", other, library=library)


def portion(of: DeviceBlockStore, ids: list[int], part: StoreSlice) -> Portion:
    return Portion(packed_blocks(of), part, np.asarray(ids, dtype=np.int64))


@pytest.mark.parametrize("signed_ids", [False, True])
@pytest.mark.parametrize("part", [StoreSlice(0, 4, 0, 2), StoreSlice(1, 3, 0, 1)])
def test_both_ends_move_the_same_pieces_in_few_messages(part: StoreSlice, signed_ids: bool) -> None:
    library = PretendedNccl(signed_ids=signed_ids)
    sender, receiver = ends(library)
    theirs, ours = store("buffer", 40), store("cache", 30, part)
    sources, destinations = random.sample(range(40), 23), random.sample(range(30), 23)
    before = ours.blocks.clone()
    thread = threading.Thread(target=sender.send, args=(portion(theirs, sources, part),))
    thread.start()
    receiver.receive(portion(ours, destinations, part))
    thread.join(10)

    wanted = theirs.blocks.view(torch.bfloat16).view(40, *GEOMETRY.block_shape)[sources]
    wanted = wanted[:, part.layer_begin : part.layer_end, part.head_begin : part.head_end].contiguous()
    assert torch.equal(ours.blocks[destinations], wanted.view(23, -1).view(torch.uint8))
    others = [block for block in range(30) if block not in destinations]
    assert torch.equal(ours.blocks[others], before[others])
    width = ours.block_bytes
    step = PIECE_BLOCKS * GEOMETRY.block_bytes // width
    assert library.lengths == [step * width] * (23 // step) + ([23 % step * width] if 23 % step else [])


def test_an_abort_from_another_thread_ends_what_waits_and_what_follows() -> None:
    _, receiver = ends(PretendedNccl())
    ours = store("cache", 4)
    failed: list[TransferError] = []

    def receive() -> None:
        try:
            receiver.receive(portion(ours, [1], StoreSlice.whole(GEOMETRY)))
        except TransferError as error:
            failed.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    receiver.abort()
    thread.join(10)
    assert len(failed) == 1
    with pytest.raises(TransferError, match="was ended"):
        receiver.receive(portion(ours, [1], StoreSlice.whole(GEOMETRY)))


def test_a_session_whose_peer_went_while_it_connected_keeps_no_other_from_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ncclCommInitRank` waits for the other rank without a limit, and cannot be interrupted."""
    came, waiting = threading.Event(), threading.Semaphore(0)

    class Stuck(PretendedNccl):
        def NcclCommunicator(self, ranks: int, unique: Any, rank: int) -> PretendedCommunicator:
            waiting.release()
            came.wait(20.0)
            return super().NcclCommunicator(ranks, unique, rank)

    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", Stuck())
    store = HostBlockStore.private("prefill-0/batch", GEOMETRY, 4)
    process = pb.ProcessKey(role="decode", id="decode-0", incarnation=1)
    hello = pc.PairHello(process=process, channel="nccl", geometry=geometry_to_proto(GEOMETRY), piece_bytes=1 << 20)
    wiring = Wiring("nccl", SERVING_RANK, "127.0.0.1", "cpu", 1 << 20, 0.1)
    said: queue.SimpleQueue[pc.PairEvent] = queue.SimpleQueue()
    troubles: list[None] = []
    server = PairServer(hello, {store.store_id: store}, wiring, said.put, lambda: troubles.append(None))
    server.start(pb.ProcessKey(role="prefill", id="prefill-0", incarnation=1))
    assert all(waiting.acquire(timeout=20.0) for _ in (PULL, PUSH))
    server.on_command(pc.PairCommand(copy=pc.PairedCopy(number=1, push=True, store_id=store.store_id, block_ids=[0])))
    assert server.close()  # another session may follow
    lanes = list(server._lanes.values())
    assert all(lane._thread.is_alive() for lane in lanes)
    came.set()  # too late: the session takes no further part
    for lane in lanes:
        lane._thread.join(20.0)
        assert isinstance(lane._transport, NcclTransport)
        assert lane._transport._aborted
    assert {said.get().WhichOneof("body") for _ in range(said.qsize())} == {"opened", "value"}
    assert not troubles


def test_host_memory_is_refused() -> None:
    sender, _ = ends(PretendedNccl())
    host = HostBlockStore.private("pool", GEOMETRY, 4)
    with pytest.raises(TransferError, match="pool is not in device memory"):
        sender.send(portion(host, [1], StoreSlice.whole(GEOMETRY)))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(bool(nccl_problem()), reason=nccl_problem())
def test_two_ranks_on_one_gpu_copy_both_ways_with_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTI_RANK_VARIABLE, "1")
    spec = PeerSpec(GEOMETRY, 256, channel="nccl", device="cuda:0", silent_s=20.0)
    with PeerProcess(spec) as peer:
        wiring = replace(spec.wiring(ASKING_RANK, "cuda:0"), piece_bytes=16 * GEOMETRY.block_bytes)
        client = PairClient(pb.ProcessKey(role="decode", id="decode-0"), wiring, GEOMETRY, "peer", away_s=60.0)
        batch, requests = (RemoteBlockStore(handle, client) for handle in peer.handles)
        cache = make_store(spec, "cache")
        peer.connect(client)
        pull, push = PairedChannel(batch, cache), PairedChannel(cache, requests)
        draw = random.Random(1)
        for _ in range(20):
            theirs, ours, back = (draw.sample(range(256), 100) for _ in range(3))
            assert pull.copy(theirs, ours).wait(60)
            assert cache.checksums(ours) == batch.checksums(theirs)
            assert push.copy(ours, back).wait(60)
            assert requests.checksums(back) == cache.checksums(ours)
        assert pull.name == "nccl"
        assert client.sessions == 1
        client.close()
        pull.close()
        push.close()
