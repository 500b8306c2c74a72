"""The other process of a pair, without a cluster: for `alignedserve doctor`, benchmarks and tests.

It holds stores and serves one session after another; commands and events use its standard streams.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import IO, Self

import numpy as np
import torch

from alignedserve.errors import AlignedServeError, TransferError
from alignedserve.geometry import DTYPE_BYTES, KvGeometry, StoreSlice
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import paired_copies_pb2 as pc
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.device import DeviceBlockStore
from alignedserve.transfer.handles import HOST, StoreHandle
from alignedserve.transfer.paired.client import PairClient
from alignedserve.transfer.paired.server import PairServer
from alignedserve.transfer.paired.transport import PIECE_BYTES, SERVING_RANK, Wiring
from alignedserve.transfer.segment import Segment

_HEAD = struct.Struct("!II")
LOOPBACK = "127.0.0.1"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """The stores of the process: `stores` names, each of `blocks` blocks, on `device`.

    `memfd`: a descriptor passed at its start, which the first store uses; -1: none.
    """

    geometry: KvGeometry
    blocks: int
    channel: str = "gloo"
    stores: tuple[str, ...] = ("peer/batch", "peer/requests")
    device: str = "cpu"
    silent_s: float = 5.0
    memfd: int = -1

    def wiring(self, rank: int, device: str) -> Wiring:
        return Wiring(self.channel, rank, LOOPBACK, device, PIECE_BYTES.get(self.channel, 0), self.silent_s)


class PeerProcess:
    """A process started by the constructor. `connect` serves a client across broken sessions; the context ends it."""

    def __init__(self, spec: PeerSpec, environment: Mapping[str, str] | None = None) -> None:
        """Raises TransferError if the process does not start."""
        self.spec = spec
        self._client: PairClient | None = None
        self._reader: threading.Thread | None = None
        self._session = 0
        self._lock = threading.Lock()
        self._closed = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "alignedserve.transfer.paired.peer", json.dumps(asdict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[spec.memfd] if spec.memfd >= 0 else [],
            env={**os.environ, **(environment or {})},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in: IO[bytes] = self.process.stdin
        self._events = frames(self.process.stdout)
        first = next(self._events, None)
        if first is None:
            self.close()
            raise TransferError(f"the other process for {spec.channel} on {spec.device} ended at its start")
        self.handles = [StoreHandle.from_proto(store) for store in pc.PairEvent.FromString(first[1]).opened.stores]

    def connect(self, client: PairClient) -> None:
        """Begin the client's first session; each one it gives up is followed by another. It has the peer for itself."""
        self._client = client
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, name="peer-events", daemon=True)
            self._reader.start()
        self._begin(client)

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self._in.close()
        if self._client is not None:
            self._client.close()
        if self._reader is not None:
            self._reader.join(self.spec.silent_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, client: PairClient) -> None:
        def again() -> None:
            threading.Thread(target=self._again, args=(client,), daemon=True).start()

        self._session += 1
        client.begin(partial(self._send, self._session), again)
        self._send(self._session, client.hello())

    def _again(self, client: PairClient) -> None:
        client.broke("its session was unusable")
        if not self._closed and client is self._client:
            self._begin(client)

    def _send(self, session: int, command: pc.PairCommand) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # the process has ended, and its events with it
            write_frame(self._in, session, command.SerializeToString())

    def _read(self) -> None:
        for session, message in self._events:
            if session == self._session and self._client is not None:
                self._client.on_event(pc.PairEvent.FromString(message))
        if self._client is not None:
            self._client.broke("the other process has ended")


def frames(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Each message of a stream and its session, until the stream ends; closes it."""
    with contextlib.closing(stream), contextlib.suppress(ValueError, OSError):
        while len(head := stream.read(_HEAD.size)) == _HEAD.size:
            session, count = _HEAD.unpack(head)
            yield session, stream.read(count)


def write_frame(stream: IO[bytes], session: int, message: bytes) -> None:
    stream.write(_HEAD.pack(session, len(message)) + message)
    stream.flush()


def make_store(spec: PeerSpec, name: str, memfd: int = -1) -> BlockStore:
    """A store of the spec's geometry, filled with bytes that differ between blocks and between stores."""
    geometry, draw = spec.geometry, np.random.default_rng(sum(name.encode()))
    if spec.device == "cpu":
        whole = StoreSlice.whole(geometry)
        if memfd >= 0:
            segment = Segment(name, os.dup(memfd))
            store = HostBlockStore.over(segment, StoreHandle(name, HOST, geometry, whole, spec.blocks, segment=name))
        else:
            store = HostBlockStore.private(name, geometry, spec.blocks)
        for block in range(spec.blocks):
            store.blocks[block] = np.frombuffer(draw.bytes(geometry.block_bytes), np.uint8)
        return store
    dtype = _DTYPES[geometry.dtype]
    shape = (spec.blocks, geometry.block_bytes // DTYPE_BYTES[geometry.dtype])
    tensor = torch.empty(shape, dtype=dtype, device=spec.device)
    tensor.view(torch.uint8).random_(256)
    return DeviceBlockStore(name, geometry, tensor, shared=True)


class _Service:
    def __init__(self, spec: PeerSpec, out: IO[bytes]) -> None:
        self._spec, self._out = spec, out
        self._lock = threading.Lock()
        self._process = pb.ProcessKey(role="prefill", id="peer", incarnation=os.getpid())
        self._stores = {
            name: make_store(spec, name, spec.memfd if index == 0 else -1) for index, name in enumerate(spec.stores)
        }
        self._server: PairServer | None = None
        self._session = 0
        handles = [store.handle().to_proto() for store in self._stores.values()]
        self._send(0, pc.PairEvent(opened=pc.PairOpened(process=self._process, stores=handles)))

    def _send(self, session: int, event: pc.PairEvent) -> None:
        with self._lock, contextlib.suppress(OSError):
            write_frame(self._out, session, event.SerializeToString())

    def on_command(self, session: int, command: pc.PairCommand) -> None:
        """Commands of a session that was followed by another are dropped."""
        if command.WhichOneof("body") != "hello":
            if self._server is not None and session == self._session:
                self._server.on_command(command)
            return
        if self._server is not None:
            self._server.close()
        self._session = session
        wiring = self._spec.wiring(SERVING_RANK, self._spec.device)
        # The client sees the same break, and begins again.
        self._server = PairServer(command.hello, self._stores, wiring, partial(self._send, session), lambda: None)
        self._server.start(self._process)


def main(arguments: list[str], stdin: IO[bytes], stdout: IO[bytes]) -> None:
    tree = json.loads(arguments[0])
    tree |= {"geometry": KvGeometry(**tree["geometry"]), "stores": tuple(tree["stores"])}
    service = _Service(PeerSpec(**tree), stdout)
    for session, message in frames(stdin):
        try:
            service.on_command(session, pc.PairCommand.FromString(message))
        except AlignedServeError as error:
            print(f"the other process of the pair: {error}", file=sys.stderr)


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not be taken for events
    main(sys.argv[1:], sys.stdin.buffer, own)
