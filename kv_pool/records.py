"""The records of the allocation table, and the state of a shard that a successor rebuilds from them.

A record is a kind (one byte) and its fields: names as length and UTF-8, numbers and checksums in 8 bytes each, block
ids in 4 bytes each.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from alignedserve.errors import TransferError
from alignedserve.request import RequestKey

MAX_NAME_BYTES = 1024
_NAME = struct.Struct("<H")
_NUMBER = struct.Struct("<Q")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True, order=True)
class WriterKey:
    """An incarnation of a process that writes to the pool (`ProcessKey` on the wire)."""

    role: str
    id: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.id} ({self.role}, incarnation {self.incarnation})"


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload in pages of the segment (`payloads.py`): its pages, its length in bytes and its CRC-32."""

    page_ids: tuple[int, ...]
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Holding:
    """The committed blocks of a request, in order; they hold the KV of its first `kv_tokens` tokens.

    `checksums`: one for each block if its writer computed them (kv_pool.verify), else empty. `payload`: its
    StoredRequest; None if the KV can only be used for a prefill.
    """

    key: RequestKey
    kv_tokens: int
    block_ids: tuple[int, ...]
    checksums: tuple[int, ...] = ()
    payload: Payload | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """From now on the request holds exactly `holding`. Its blocks leave the lease of `writer`."""

    holding: Holding
    writer: WriterKey | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """The request no longer holds any block."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Leased:
    """These blocks are leased to the writer, which fills them."""

    writer: WriterKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """The writer has returned these blocks of its lease."""

    writer: WriterKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """It is unknown whether the writer still writes to its leased blocks."""

    writer: WriterKey


@dataclass(frozen=True, slots=True)
class Dead:
    """The writer has ended: its leased blocks are free."""

    writer: WriterKey


Record = Held | Released | Leased | Returned | Lost | Dead


@dataclass(slots=True)
class PoolState:
    """Which request holds and which writer leases which blocks: the result of a sequence of records."""

    holdings: dict[str, Holding] = field(default_factory=dict)
    leases: dict[WriterKey, set[int]] = field(default_factory=dict)
    lost: set[WriterKey] = field(default_factory=set)

    def apply(self, record: Record) -> None:
        match record:
            case Held(holding, writer):
                self.holdings[holding.key.request_id] = holding
                if writer is not None:
                    self._end_lease(writer, holding.block_ids)
            case Released(request_id):
                self.holdings.pop(request_id, None)
            case Leased(writer, block_ids):
                self.leases.setdefault(writer, set()).update(block_ids)
            case Returned(writer, block_ids):
                self._end_lease(writer, block_ids)
            case Lost(writer):
                self.lost.add(writer)
            case Dead(writer):
                self.leases.pop(writer, None)
                self.lost.discard(writer)

    def records(self) -> Iterator[Record]:
        """The fewest records that result in this state."""
        for holding in self.holdings.values():
            yield Held(holding)
        for writer, block_ids in self.leases.items():
            yield Leased(writer, tuple(sorted(block_ids)))
        for writer in self.lost:
            yield Lost(writer)

    def _end_lease(self, writer: WriterKey, block_ids: Sequence[int]) -> None:
        leased = self.leases.get(writer)
        if leased is None:
            return
        leased.difference_update(block_ids)
        if not leased:
            del self.leases[writer]


def check_writer(writer: WriterKey) -> None:
    """Raises TransferError if a name of `writer` is too long for a record, or if its role or id is empty."""
    _writer(writer)
    if not writer.role or not writer.id:
        raise TransferError(f"{writer} does not name a process")


def encode(record: Record) -> bytes:
    """The bytes of `record`. Raises TransferError if a name is longer than `MAX_NAME_BYTES`."""
    match record:
        case Held(holding, writer):
            key = _name(holding.key.request_id) + _NUMBER.pack(holding.key.epoch)
            whose = b"\0" if writer is None else b"\1" + _writer(writer)
            blocks = _ids(holding.block_ids) + _checksums(holding.checksums) + _payload(holding.payload)
            return b"H" + key + _NUMBER.pack(holding.kv_tokens) + whose + blocks
        case Released(request_id):
            return b"R" + _name(request_id)
        case Leased(writer, block_ids):
            return b"L" + _writer(writer) + _ids(block_ids)
        case Returned(writer, block_ids):
            return b"B" + _writer(writer) + _ids(block_ids)
        case Lost(writer):
            return b"?" + _writer(writer)
        case Dead(writer):
            return b"X" + _writer(writer)


def decode(data: bytes) -> Record:
    """The inverse of `encode`. Raises TransferError for anything else."""
    reader = _Reader(data)
    try:
        kind = reader.take(1)
        if kind == b"H":
            key = RequestKey(reader.name(), reader.number())
            kv_tokens = reader.number()
            writer = reader.writer() if reader.take(1) == b"\1" else None
            return Held(Holding(key, kv_tokens, reader.ids(), reader.checksums(), reader.payload()), writer)
        if kind == b"R":
            return Released(reader.name())
        if kind == b"L":
            return Leased(reader.writer(), reader.ids())
        if kind == b"B":
            return Returned(reader.writer(), reader.ids())
        if kind == b"?":
            return Lost(reader.writer())
        if kind == b"X":
            return Dead(reader.writer())
    except (struct.error, ValueError) as error:
        raise TransferError(f"a record of the allocation table is damaged: {error}") from error
    raise TransferError(f"a record of the allocation table has the unknown kind {kind!r}")


class _Reader:
    """Takes fields off the front of a record."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) != count:
            raise ValueError("it is truncated")
        self._at += count
        return taken

    def number(self) -> int:
        return int(_NUMBER.unpack(self.take(8))[0])

    def name(self) -> str:
        return self.take(int(_NAME.unpack(self.take(2))[0])).decode()

    def writer(self) -> WriterKey:
        return WriterKey(self.name(), self.name(), self.number())

    def ids(self) -> tuple[int, ...]:
        count = int(_COUNT.unpack(self.take(4))[0])
        return tuple(array("I", self.take(count * 4)))

    def checksums(self) -> tuple[int, ...]:
        count = int(_COUNT.unpack(self.take(4))[0])
        return tuple(array("Q", self.take(count * 8)))

    def payload(self) -> Payload | None:
        page_ids = self.ids()
        if not page_ids:
            return None
        word = self.number()
        return Payload(page_ids, word >> 32, word & 0xFFFFFFFF)


def held_bytes(holding: Holding) -> int:
    """About the bytes of the record of a holding whose writer is not named."""
    pages = holding.payload.page_ids if holding.payload is not None else ()
    return 64 + len(holding.key.request_id) + 4 * (len(holding.block_ids) + len(pages)) + 8 * len(holding.checksums)


def _name(text: str) -> bytes:
    data = text.encode()
    if len(data) > MAX_NAME_BYTES:
        raise TransferError(f"a name of {len(data)} bytes is over the limit of {MAX_NAME_BYTES}: {text[:64]}...")
    return _NAME.pack(len(data)) + data


def _writer(writer: WriterKey) -> bytes:
    return _name(writer.role) + _name(writer.id) + _NUMBER.pack(writer.incarnation)


def _ids(block_ids: Sequence[int]) -> bytes:
    return _COUNT.pack(len(block_ids)) + array("I", block_ids).tobytes()


def _checksums(checksums: Sequence[int]) -> bytes:
    return _COUNT.pack(len(checksums)) + array("Q", checksums).tobytes()


def _payload(payload: Payload | None) -> bytes:
    if payload is None:
        return _ids(())
    return _ids(payload.page_ids) + _NUMBER.pack(payload.length << 32 | payload.checksum)
