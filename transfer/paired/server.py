"""The serving end of a pair, of a prefill instance or a shard: takes part in the copies that are requested."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from alignedserve.errors import AlignedServeError, ConfigError, TransferError
from alignedserve.geometry import StoreSlice
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import paired_copies_pb2 as pc
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.handles import geometry_from_proto
from alignedserve.transfer.paired.blocks import PackedBlocks, packed_blocks
from alignedserve.transfer.paired.client import PULL, PUSH
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.paired.transport import Portion, Transport, Wiring, open_transport
from alignedserve.transfer.runs import check_ids

logger = logging.getLogger(__name__)

PIECE_LIMITS = (4 << 10, 1 << 30)
JOIN_MARGIN_S = 1.0


class PairServer:
    """One session of one worker, from its hello on. `close` ends it; after that none of its copies runs.

    `on_command` never blocks. `send` and `on_trouble` may be called by any thread, and must not block. `on_trouble`:
    the stream must be ended; the worker begins another.
    """

    def __init__(
        self,
        hello: pc.PairHello,
        stores: Mapping[str, BlockStore],
        wiring: Wiring,
        send: Callable[[pc.PairEvent], None],
        on_trouble: Callable[[], None],
        *,
        writable: bool = True,
    ) -> None:
        """`writable` False: only read-only sessions are served, and a push is refused.

        Raises GeometryMismatchError, naming both, and ConfigError for requests that this end cannot or must not serve.
        """
        self.peer = hello.process.id
        geometry = geometry_from_proto(hello.geometry)
        for store in stores.values():
            store.geometry.require_same(geometry)
        if hello.channel != wiring.channel:
            raise ConfigError(
                f"{self.peer} requests the channel {hello.channel!r}, but this end serves {wiring.channel!r}: "
                "cluster.channel must be the same in all processes"
            )
        if not PIECE_LIMITS[0] <= hello.piece_bytes <= PIECE_LIMITS[1]:
            raise ConfigError(f"{self.peer} requests pieces of {hello.piece_bytes} bytes, not {PIECE_LIMITS}")
        if not (writable or hello.read_only):
            raise ConfigError(f"{self.peer} requests write access to read-only stores: {', '.join(stores)}")
        self._stores, self._send, self._on_trouble = dict(stores), send, on_trouble
        self._wiring = replace(wiring, piece_bytes=hello.piece_bytes)
        self._rendezvous = Rendezvous(lambda key, value: send(pc.PairEvent(value=pc.PairValue(key=key, value=value))))
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix=f"checksums-{self.peer}")
        self._closed = False
        lanes = (PULL,) if hello.read_only else (PULL, PUSH)
        self._lanes = {
            lane: _Lane(lane, self._wiring, self._rendezvous, self._stores, send, self._broke) for lane in lanes
        }

    def start(self, process: pb.ProcessKey) -> None:
        """Open the session: send the first event, and make both connections."""
        handles = [store.handle().to_proto() for store in self._stores.values()]
        self._send(pc.PairEvent(opened=pc.PairOpened(process=process, stores=handles)))
        for lane in self._lanes.values():
            lane.start()

    def on_command(self, command: pc.PairCommand) -> None:
        kind = command.WhichOneof("body")
        if kind == "value":
            self._rendezvous.heard(command.value.key, command.value.value)
        elif kind == "copy":
            self._on_copy(command.copy)
        elif kind == "checksums_of" and not self._closed:
            self._hasher.submit(self._checksums, command.checksums_of)

    def _on_copy(self, copy: pc.PairedCopy) -> None:
        lane = self._lanes.get(PUSH if copy.push else PULL)
        if lane is not None:
            lane.ask(copy)
            return
        refused = TransferError(f"{copy.store_id} is read-only in this session")
        self._send(pc.PairEvent(ended=pc.CopyEnded(number=copy.number, failure=_failure(refused))))

    def close(self) -> bool:
        """May block for as long as a peer may be silent.

        Returns False if a copy hangs and may still write to the stores.
        """
        self._closed = True
        self._rendezvous.end("the session was closed")
        self._hasher.shutdown(wait=False, cancel_futures=True)
        for lane in self._lanes.values():
            lane.end()
        ended = [lane.join(self._wiring.silent_s + JOIN_MARGIN_S) for lane in self._lanes.values()]
        return all(ended)

    def _broke(self, error: TransferError) -> None:
        if not self._closed:
            logger.warning("the connection to %s is unusable: %s", self.peer, error.message)
            self._on_trouble()

    def _checksums(self, asked: pc.ChecksumsOf) -> None:
        answer = pc.Checksums(number=asked.number)
        try:
            store = _store(self._stores, asked.store_id)
            answer.checksums.extend(store.checksums(check_ids(asked.block_ids, store, distinct=False).tolist()))
        except AlignedServeError as error:
            answer.failure.CopyFrom(_failure(error))
        self._send(pc.PairEvent(checksums=answer))


class _Lane:
    """One direction: a thread that connects, and then takes part in one copy after the other."""

    def __init__(
        self,
        name: str,
        wiring: Wiring,
        rendezvous: Rendezvous,
        stores: Mapping[str, BlockStore],
        send: Callable[[pc.PairEvent], None],
        on_broken: Callable[[TransferError], None],
    ) -> None:
        self._name, self._wiring, self._rendezvous, self._stores = name, wiring, rendezvous, stores
        self._send, self._on_broken = send, on_broken
        self._asked: queue.SimpleQueue[pc.PairedCopy | None] = queue.SimpleQueue()
        self._packed: dict[str, PackedBlocks] = {}
        self._transport: Transport | None = None
        self._ended = self._given_up = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"pair-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, copy: pc.PairedCopy) -> None:
        self._asked.put(copy)

    def end(self) -> None:
        with self._lock:
            self._ended = True
            transport = self._transport
        self._asked.put(None)
        if transport is not None:
            transport.abort()

    def join(self, timeout_s: float) -> bool:
        """After `end`: whether it no longer uses any store."""
        if self._thread.ident is not None and not self._given_up:
            self._thread.join(timeout_s)
        with self._lock:
            connecting = self._transport is None
        if not self._thread.is_alive():
            return True
        if connecting and not self._given_up:  # NCCL waits for its peer without a limit; nothing follows after that
            self._given_up = True
            logger.warning("a thread still waits for a peer that left before it connected: %s", self._thread.name)
        return connecting

    def _run(self) -> None:
        try:
            transport = open_transport(self._wiring, self._name, self._rendezvous)
            with self._lock:
                self._transport, ended = transport, self._ended
            if ended:
                transport.abort()
            while (copy := self._asked.get()) is not None and not self._ended:
                self._take_part(transport, copy)
        except TransferError as error:
            self._on_broken(error)
        except Exception as error:  # on any error the session must end, and another follow
            logger.exception("a paired copy failed")
            self._on_broken(TransferError(f"a paired copy failed: {error!r}"))
        finally:
            if self._transport is not None:
                self._transport.abort()

    def _take_part(self, transport: Transport, copy: pc.PairedCopy) -> None:
        """Raises TransferError if the connection is unusable; a request that cannot be served is refused."""
        ended = pc.CopyEnded(number=copy.number)
        try:
            portion = self._portion(copy)
        except TransferError as error:
            ended.failure.CopyFrom(_failure(error))
            self._send(pc.PairEvent(ended=ended))
            return
        self._send(pc.PairEvent(accepted=pc.CopyAccepted(number=copy.number)))
        try:
            if copy.push:
                transport.receive(portion)
            else:
                transport.send(portion)
        except TransferError as error:
            ended.failure.CopyFrom(_failure(error))
            self._send(pc.PairEvent(ended=ended))
            raise
        self._send(pc.PairEvent(ended=ended))

    def _portion(self, copy: pc.PairedCopy) -> Portion:
        store = _store(self._stores, copy.store_id)
        part = StoreSlice(copy.layer_begin, copy.layer_end, copy.head_begin, copy.head_end)
        if store.slice.intersect(part) != part:
            raise TransferError(f"store {store.store_id} holds {store.slice}, not all of {part}")
        ids = check_ids(copy.block_ids, store, distinct=copy.push)
        if store.store_id not in self._packed:
            self._packed[store.store_id] = packed_blocks(store)
        return Portion(self._packed[store.store_id], part, ids)


def _store(stores: Mapping[str, BlockStore], store_id: str) -> BlockStore:
    if store_id not in stores:
        raise TransferError(f"there is no store {store_id} here; the stores are {', '.join(sorted(stores)) or 'none'}")
    return stores[store_id]


def _failure(error: AlignedServeError) -> pb.Failure:
    return pb.Failure(code=error.code, message=error.message)
