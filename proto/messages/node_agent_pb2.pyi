from alignedserve.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Segment(_message.Message):
    __slots__ = ("name", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class NodeDescription(_message.Message):
    __slots__ = ("node_id", "socket", "memory_total_bytes", "memory_available_bytes", "segments")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    socket: str
    memory_total_bytes: int
    memory_available_bytes: int
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, node_id: _Optional[str] = ..., socket: _Optional[str] = ..., memory_total_bytes: _Optional[int] = ..., memory_available_bytes: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class EndProcessRequest(_message.Message):
    __slots__ = ("process", "pid")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    pid: int
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., pid: _Optional[int] = ...) -> None: ...
