from alignedserve.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankHostCommand(_message.Message):
    __slots__ = ("hello", "value", "start", "make_parts")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    MAKE_PARTS_FIELD_NUMBER: _ClassVar[int]
    hello: RankHostHello
    value: RankValue
    start: StartRanks
    make_parts: MakeParts
    def __init__(self, hello: _Optional[_Union[RankHostHello, _Mapping]] = ..., value: _Optional[_Union[RankValue, _Mapping]] = ..., start: _Optional[_Union[StartRanks, _Mapping]] = ..., make_parts: _Optional[_Union[MakeParts, _Mapping]] = ...) -> None: ...

class RankHostEvent(_message.Message):
    __slots__ = ("opened", "value", "started", "held", "made", "lost", "beat")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    opened: RankHostOpened
    value: RankValue
    started: RanksStarted
    held: RanksHeld
    made: PartsMade
    lost: _common_pb2.Failure
    beat: RanksNow
    def __init__(self, opened: _Optional[_Union[RankHostOpened, _Mapping]] = ..., value: _Optional[_Union[RankValue, _Mapping]] = ..., started: _Optional[_Union[RanksStarted, _Mapping]] = ..., held: _Optional[_Union[RanksHeld, _Mapping]] = ..., made: _Optional[_Union[PartsMade, _Mapping]] = ..., lost: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., beat: _Optional[_Union[RanksNow, _Mapping]] = ...) -> None: ...

class RankHostHello(_message.Message):
    __slots__ = ("process",)
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ...) -> None: ...

class RankHostOpened(_message.Message):
    __slots__ = ("process", "node_id", "host", "device")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    node_id: str
    host: str
    device: str
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., node_id: _Optional[str] = ..., host: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class RankValue(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class StartRanks(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, orders: _Optional[_Iterable[str]] = ...) -> None: ...

class RanksStarted(_message.Message):
    __slots__ = ("pids",)
    PIDS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pids: _Optional[_Iterable[int]] = ...) -> None: ...

class RanksHeld(_message.Message):
    __slots__ = ("ranks", "failure")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankHeld]
    failure: _common_pb2.Failure
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankHeld, _Mapping]]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class RankHeld(_message.Message):
    __slots__ = ("layer_begin", "layer_end", "head_begin", "head_end", "weight_bytes")
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    weight_bytes: int
    def __init__(self, layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_begin: _Optional[int] = ..., head_end: _Optional[int] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class RanksNow(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankNow]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankNow, _Mapping]]] = ...) -> None: ...

class RankNow(_message.Message):
    __slots__ = ("rank", "pid", "resident_bytes", "waited_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    resident_bytes: int
    waited_s: float
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class MakeParts(_message.Message):
    __slots__ = ("store_id", "geometry", "blocks")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    geometry: _common_pb2.Geometry
    blocks: int
    def __init__(self, store_id: _Optional[str] = ..., geometry: _Optional[_Union[_common_pb2.Geometry, _Mapping]] = ..., blocks: _Optional[int] = ...) -> None: ...

class PartsMade(_message.Message):
    __slots__ = ("stores", "failure")
    STORES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[_common_pb2.StoreHandle]
    failure: _common_pb2.Failure
    def __init__(self, stores: _Optional[_Iterable[_Union[_common_pb2.StoreHandle, _Mapping]]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...
