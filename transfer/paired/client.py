"""The requesting end of a pair: of a decode instance, or of a reader of a shard. The owner of the stream drives it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from alignedserve.errors import TransferError, by_code
from alignedserve.geometry import KvGeometry
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import paired_copies_pb2 as pc
from alignedserve.transfer.handles import geometry_to_proto
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.paired.transport import Portion, Transport, Wiring, open_transport
from alignedserve.transfer.runs import IdArray

logger = logging.getLogger(__name__)

PULL, PUSH = "pull", "push"
CHECKSUMS_S = 30.0


class PairClient:
    """Copies of one pair, over consecutive sessions. A session begins and ends with a stream.

    `begin`, `on_event` and `broke` are called by the owner of the stream; `copy` and `checksums` by any thread, and
    they block. A request without a session waits for the next one, until there has been none for `away_s`.
    """

    def __init__(
        self,
        process: pb.ProcessKey,
        wiring: Wiring,
        geometry: KvGeometry,
        peer: str,
        *,
        away_s: float,
        read_only: bool = False,
        on_doubt: Callable[[], None] = lambda: None,
    ) -> None:
        """`peer`: its id, for messages. `read_only`: nothing is pushed to it, so that one connection suffices.

        `on_doubt` is called before a push fails after which the peer may still write (`settled`).
        """
        self.peer, self._on_doubt = peer, on_doubt
        self._lanes = (PULL,) if read_only else (PULL, PUSH)
        self._process, self._wiring, self._geometry, self._away_s = process, wiring, geometry, away_s
        self._changed = threading.Condition()
        self._session: ClientSession | None = None
        self._away_since: float | None = time.monotonic()  # None: connected
        self._doubtful = -1  # the last session in which a push failed
        self._opened = 0  # sessions that the peer has opened; opening one ends its work in earlier ones
        self._closed = False
        self._connecting: threading.Thread | None = None
        self._turns = {lane: Turns() for lane in self._lanes}
        self.sessions = 0

    @property
    def settled(self) -> bool:
        """Whether the peer no longer writes for a failed push: it has opened another session since."""
        return self._opened > self._doubtful

    @property
    def channel(self) -> str:
        return self._wiring.channel

    def hello(self) -> pc.PairCommand:
        """The first command of a stream."""
        return pc.PairCommand(
            hello=pc.PairHello(
                process=self._process,
                channel=self._wiring.channel,
                geometry=geometry_to_proto(self._geometry),
                piece_bytes=self._wiring.piece_bytes,
                read_only=PUSH not in self._lanes,
            )
        )

    def begin(self, send: Callable[[pc.PairCommand], None], on_trouble: Callable[[], None]) -> None:
        """A stream is about to open. Both callables may be called by any thread and must not block.

        `on_trouble`: the session is unusable; the stream must be ended, and another begun.
        """
        with self._changed:
            self.sessions += 1
            self._session = ClientSession(self.sessions, self._wiring, self._lanes, self.peer, send, on_trouble)

    def on_event(self, event: pc.PairEvent) -> None:
        session = self._session
        if session is None:
            return
        if event.WhichOneof("body") == "opened":
            with self._changed:
                self._opened = session.number
                self._changed.notify_all()
                if not self._closed:  # else no call would join the thread
                    name = f"pair-{self.peer}"
                    self._connecting = threading.Thread(target=self._connect, args=(session,), name=name, daemon=True)
                    self._connecting.start()
        else:
            session.on_event(event)

    def broke(self, reason: str) -> None:
        """The stream has ended. May block for a moment."""
        with self._changed:
            session, self._session = self._session, None
            if self._away_since is None:
                self._away_since = time.monotonic()
            self._changed.notify_all()
        if session is not None:
            session.end(reason)

    def copy(self, store_id: str, remote_ids: IdArray, portion: Portion, *, push: bool) -> None:
        """Copy blocks of the peer's store to those of the portion, or (`push`) the other way.

        Raises TransferError. When it returns or raises, neither side's blocks are used any more, except that after a
        failed push the peer's may be, until `settled`.
        """
        lane = PUSH if push else PULL
        if lane not in self._lanes:
            raise TransferError(f"stores of {self.peer} are read-only here: {store_id} cannot be written to")
        with self._turns[lane]:
            session = self._wait_up()
            try:
                session.copy(store_id, remote_ids, portion, lane)
            except CopyRefusedError as error:
                raise error.cause from None
            except Exception as error:
                session.trouble(f"a copy failed: {error}")
                if push:
                    self._doubtful = session.number
                    self._wait_settled()
                    if not self.settled:
                        self._on_doubt()
                if isinstance(error, TransferError):
                    raise
                raise TransferError(f"a copy with {self.peer} failed: {error!r}") from error

    def checksums(self, store_id: str, block_ids: Sequence[int]) -> list[int]:
        """Checksums of blocks of the peer's store, computed by the peer. Raises TransferError."""
        return self._wait_up().checksums(store_id, block_ids)

    def shut(self) -> None:
        """Fail waiting copies and begin no more; idempotent. Does not block."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Fail waiting and running copies; idempotent. May block for a moment."""
        self.shut()
        self.broke("it was closed")
        if self._connecting is not None:  # a process that ends while Gloo's threads are being joined is aborted
            self._connecting.join(self._wiring.silent_s)

    def _connect(self, session: ClientSession) -> None:
        try:
            session.connect()
        except Exception as error:  # on any error another session must follow
            logger.warning("not connected to %s yet: %s", self.peer, error)
            session.trouble(str(error))
            return
        with self._changed:
            self._away_since = None
            self._changed.notify_all()

    def _wait_up(self) -> ClientSession:
        begun_s = time.monotonic()
        with self._changed:
            while True:
                session, now = self._session, time.monotonic()
                if session is not None and session.up and not self._closed:
                    return session
                if self._away_since is None:
                    self._away_since = now
                connecting = session is not None and session.number == self._opened
                since_s = max(self._away_since, begun_s) if connecting else self._away_since
                left = since_s + self._away_s - now
                if self._closed or left <= 0:
                    why = "the pair was closed" if self._closed else f"none for {self._away_s:g} s"
                    raise TransferError(f"there is no connection to {self.peer}: {why}")
                self._changed.wait(left)

    def _wait_settled(self) -> None:
        """Wait until `settled`, or until there has been no session for `away_s`."""
        with self._changed:
            while not (self.settled or self._closed):
                left = (self._away_since or time.monotonic()) + self._away_s - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)


class ClientSession:
    """The session of one stream. Its connections are made after the peer has opened it."""

    def __init__(
        self,
        number: int,
        wiring: Wiring,
        lanes: Sequence[str],
        peer: str,
        send: Callable[[pc.PairCommand], None],
        on_trouble: Callable[[], None],
    ) -> None:
        self.number = number
        self.up = False
        self._lanes = lanes
        self._wiring, self._peer, self._send, self._on_trouble = wiring, peer, send, on_trouble
        self._rendezvous = Rendezvous(lambda key, value: send(pc.PairCommand(value=pc.PairValue(key=key, value=value))))
        self._transports: dict[str, Transport] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._replies: dict[int, _Reply] = {}
        self._broken = ""

    def connect(self) -> None:
        """Raises TransferError if the connections cannot be made."""
        for lane in self._lanes:
            transport = open_transport(self._wiring, lane, self._rendezvous)
            with self._changed:
                self._transports[lane] = transport
                broken = self._broken
            if broken:
                transport.abort()
                raise TransferError(broken)
        self.up = True

    def on_event(self, event: pc.PairEvent) -> None:
        kind = event.WhichOneof("body")
        if kind == "value":
            self._rendezvous.heard(event.value.key, event.value.value)
            return
        message = getattr(event, kind)
        with self._changed:
            reply = self._replies.get(message.number)
            if reply is None:
                return  # of a copy that is complete: the peer's end of a pull is not awaited
            if kind == "accepted":
                reply.accepted = True
            else:
                reply.end = message
            self._changed.notify_all()

    def copy(self, store_id: str, remote_ids: IdArray, portion: Portion, lane: str) -> None:
        """Raises CopyRefusedError, after which the session continues, or another error, after which it must not."""
        part = portion.part
        with self._reply() as (number, reply):
            self._send(
                pc.PairCommand(
                    copy=pc.PairedCopy(
                        number=number,
                        push=lane == PUSH,
                        store_id=store_id,
                        block_ids=remote_ids.tolist(),
                        layer_begin=part.layer_begin,
                        layer_end=part.layer_end,
                        head_begin=part.head_begin,
                        head_end=part.head_end,
                    )
                )
            )
            self._wait(lambda: reply.accepted or reply.end is not None)
            reply.require_well()
            if lane == PULL:
                self._transports[lane].receive(portion)
                return
            self._transports[lane].send(portion)
            self._wait(lambda: reply.end is not None)
            reply.require_well()

    def checksums(self, store_id: str, block_ids: Sequence[int]) -> list[int]:
        with self._reply() as (number, reply):
            asked = pc.ChecksumsOf(number=number, store_id=store_id, block_ids=block_ids)
            self._send(pc.PairCommand(checksums_of=asked))
            self._wait(lambda: reply.end is not None, CHECKSUMS_S)
            if reply.end is not None and reply.end.HasField("failure"):
                raise _cause(reply.end.failure)
            return list(reply.end.checksums) if isinstance(reply.end, pc.Checksums) else []

    @contextlib.contextmanager
    def _reply(self) -> Iterator[tuple[int, _Reply]]:
        number, reply = next(self._numbers), _Reply()
        with self._changed:
            self._replies[number] = reply
        try:
            yield number, reply
        finally:
            with self._changed:
                del self._replies[number]

    def trouble(self, reason: str) -> None:
        """The session is unusable: end it, and report it once. A report of an ended one would end its successor."""
        if self.end(reason):
            self._on_trouble()

    def end(self, reason: str) -> bool:
        """Fail waiting and running requests; idempotent. Returns whether this call has ended it."""
        with self._changed:
            self.up = False
            first, self._broken = not self._broken, self._broken or reason
            transports = list(self._transports.values())
            self._changed.notify_all()
        self._rendezvous.end(reason)
        for transport in transports:
            transport.abort()
        return first

    def _wait(self, there: Callable[[], bool], timeout_s: float | None = None) -> None:
        limit_s = timeout_s or self._wiring.silent_s
        with self._changed:
            self._changed.wait_for(lambda: self._broken or there(), limit_s)
            if there():
                return
            reason = self._broken or f"it was silent for {limit_s:g} s"
        raise TransferError(f"{self._peer} did not take part in a copy: {reason}")


@dataclass(slots=True)
class _Reply:
    """The peer's reply to one request."""

    accepted: bool = False
    end: pc.CopyEnded | pc.Checksums | None = None

    def require_well(self) -> None:
        """Raises CopyRefusedError if it ended with a failure."""
        if self.end is not None and self.end.HasField("failure"):
            raise CopyRefusedError(_cause(self.end.failure))


class CopyRefusedError(Exception):
    """The peer took no part, or reports a failure that leaves the session usable. `cause` is the reported error."""

    def __init__(self, cause: TransferError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Turns:
    """A lock that is granted in the order of requests, so that no channel of a pair starves another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = self._serving = 0

    def __enter__(self) -> None:
        with self._changed:
            mine, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._serving == mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._serving += 1
            self._changed.notify_all()


def _cause(failure: pb.Failure) -> TransferError:
    kind = by_code(failure.code)
    return kind(failure.message) if issubclass(kind, TransferError) else TransferError(failure.message)
