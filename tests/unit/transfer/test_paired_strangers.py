"""A stranger that reaches Gloo's ports cannot take the place of a peer, and disturbs no connected pair."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.paired.blocks import HostBlocks
from alignedserve.transfer.paired.identity import listening
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.paired.transport import Portion, Transport, Wiring, open_transport
from support.pairs import CHANNEL

GEOMETRY = KvGeometry("pair", "float16", layers=4, kv_heads=2, head_dim=8, block_size=4)
BLOCKS = 16
SILENT_S = 3.0

Look = Callable[[int, str, bytes], bytes]


def meet(look: Look, channel: str = "gloo") -> list[Transport | TransferError]:
    """Connect both ends in two threads. `look(rank, key, value)` replaces what an end tells the other."""
    ends: list[Rendezvous] = []

    def tell(rank: int) -> Callable[[str, bytes], None]:
        return lambda key, value: ends[1 - rank].heard(key, look(rank, key, value))

    ends.extend(Rendezvous(tell(rank)) for rank in range(2))

    def connect(rank: int) -> Transport | TransferError:
        wiring = Wiring(channel, rank, "127.0.0.1", "cpu", 1 << 20, SILENT_S)
        try:
            return open_transport(wiring, "pull", ends[rank])
        except TransferError as error:
            return error

    with ThreadPoolExecutor(2) as both:
        return list(both.map(connect, range(2)))


def port_in(value: bytes) -> int | None:
    """The port before the address 127.0.0.1 in Gloo's description of an end."""
    at = value.find(socket.inet_aton("127.0.0.1"))
    return struct.unpack("!H", value[at - 2 : at])[0] if at > 0 else None


class Doors:
    """The ports that both ends have named, and a function to call with each."""

    def __init__(self, on_port: Callable[[int], None] = lambda port: None) -> None:
        self.ports: list[int] = []
        self._on_port = on_port
        self._lock = threading.Lock()

    def look(self, rank: int, key: str, value: bytes) -> bytes:
        port = None if "secret" in key else port_in(value)
        if port is not None:
            with self._lock:
                self.ports.append(port)
            self._on_port(port)
        return value


def portion(fill: int) -> tuple[HostBlockStore, Portion]:
    store = HostBlockStore.private("store", GEOMETRY, BLOCKS)
    store.blocks[:] = fill
    return store, Portion(HostBlocks(store), store.slice, np.arange(BLOCKS))


def copies(ends: list[Any], fill: int) -> bool:
    """Whether data sent by one end arrives at the other."""
    _, given = portion(fill)
    store, taken = portion(0)
    with ThreadPoolExecutor(1) as sending:
        sent = sending.submit(ends[0].send, given)
        ends[1].receive(taken)
        sent.result()
    return bool((store.blocks == fill).all())


def test_once_the_ends_have_met_no_other_process_gets_a_connection() -> None:
    doors = Doors()
    ends = meet(doors.look)
    assert copies(ends, 7)
    before = len(os.listdir("/proc/self/fd"))
    for port in doors.ports:
        for _ in range(3):
            with pytest.raises(OSError, match="timed out"):
                socket.create_connection(("127.0.0.1", port), 0.3)
    assert len(doors.ports) == 2
    assert len(os.listdir("/proc/self/fd")) <= before  # Gloo would keep each until the process runs out of descriptors
    assert copies(ends, 9)


@pytest.mark.skipif(CHANNEL != "nixl", reason="test_pairs_over_nixl.py runs it")
def test_once_the_ends_have_met_over_nixl_no_other_process_gets_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # as between nodes
    before = listening()
    ends = meet(lambda rank, key, value: value, "nixl")
    doors = listening() - before
    assert copies(ends, 7)
    assert len(doors) >= 2
    for door in doors:
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection(door, 0.3)
    assert copies(ends, 9)


def test_a_stranger_that_connects_first_ends_the_session_and_nothing_is_taken_from_it() -> None:
    strangers: list[socket.socket] = []

    def connect_first(port: int) -> None:
        for number in range(8):  # Gloo counts its connections from 0
            stranger = socket.create_connection(("127.0.0.1", port))
            stranger.sendall(struct.pack("=Q", number) + bytes(64))
            strangers.append(stranger)

    ends = meet(Doors(connect_first).look)
    for stranger in strangers:
        stranger.close()
    assert all(isinstance(end, TransferError) for end in ends), ends
    assert copies(meet(Doors().look), 5)  # the next session


def test_a_peer_that_does_not_know_the_streams_secret_is_detected() -> None:
    def other_secret(rank: int, key: str, value: bytes) -> bytes:
        return bytes(len(value)) if "secret" in key else value

    ends = meet(other_secret)
    assert all(isinstance(end, TransferError) for end in ends)
    assert "is not the other process of this pair" in str(ends[0])
