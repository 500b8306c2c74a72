from alignedserve.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PairCommand(_message.Message):
    __slots__ = ("hello", "value", "copy", "checksums_of")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_OF_FIELD_NUMBER: _ClassVar[int]
    hello: PairHello
    value: PairValue
    copy: PairedCopy
    checksums_of: ChecksumsOf
    def __init__(self, hello: _Optional[_Union[PairHello, _Mapping]] = ..., value: _Optional[_Union[PairValue, _Mapping]] = ..., copy: _Optional[_Union[PairedCopy, _Mapping]] = ..., checksums_of: _Optional[_Union[ChecksumsOf, _Mapping]] = ...) -> None: ...

class PairEvent(_message.Message):
    __slots__ = ("opened", "value", "accepted", "ended", "checksums")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    opened: PairOpened
    value: PairValue
    accepted: CopyAccepted
    ended: CopyEnded
    checksums: Checksums
    def __init__(self, opened: _Optional[_Union[PairOpened, _Mapping]] = ..., value: _Optional[_Union[PairValue, _Mapping]] = ..., accepted: _Optional[_Union[CopyAccepted, _Mapping]] = ..., ended: _Optional[_Union[CopyEnded, _Mapping]] = ..., checksums: _Optional[_Union[Checksums, _Mapping]] = ...) -> None: ...

class PairHello(_message.Message):
    __slots__ = ("process", "channel", "geometry", "piece_bytes", "read_only")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    channel: str
    geometry: _common_pb2.Geometry
    piece_bytes: int
    read_only: bool
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., channel: _Optional[str] = ..., geometry: _Optional[_Union[_common_pb2.Geometry, _Mapping]] = ..., piece_bytes: _Optional[int] = ..., read_only: bool = ...) -> None: ...

class PairOpened(_message.Message):
    __slots__ = ("process", "stores")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    stores: _containers.RepeatedCompositeFieldContainer[_common_pb2.StoreHandle]
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., stores: _Optional[_Iterable[_Union[_common_pb2.StoreHandle, _Mapping]]] = ...) -> None: ...

class PairValue(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class PairedCopy(_message.Message):
    __slots__ = ("number", "push", "store_id", "block_ids", "layer_begin", "layer_end", "head_begin", "head_end")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    number: int
    push: bool
    store_id: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    def __init__(self, number: _Optional[int] = ..., push: bool = ..., store_id: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_begin: _Optional[int] = ..., head_end: _Optional[int] = ...) -> None: ...

class CopyAccepted(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class CopyEnded(_message.Message):
    __slots__ = ("number", "failure")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    number: int
    failure: _common_pb2.Failure
    def __init__(self, number: _Optional[int] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class ChecksumsOf(_message.Message):
    __slots__ = ("number", "store_id", "block_ids")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    store_id: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., store_id: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Checksums(_message.Message):
    __slots__ = ("number", "checksums", "failure")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    number: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    failure: _common_pb2.Failure
    def __init__(self, number: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...
