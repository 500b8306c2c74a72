from alignedserve.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayMessage(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "claim", "open")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    hello: GatewayHello
    submit: Submission
    cancel: _common_pb2.RequestKeys
    claim: _common_pb2.RequestKeys
    open: _common_pb2.RequestKeys
    def __init__(self, hello: _Optional[_Union[GatewayHello, _Mapping]] = ..., submit: _Optional[_Union[Submission, _Mapping]] = ..., cancel: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., claim: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., open: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ...) -> None: ...

class GatewayHello(_message.Message):
    __slots__ = ("process", "address", "running")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    address: str
    running: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestKey]
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., address: _Optional[str] = ..., running: _Optional[_Iterable[_Union[_common_pb2.RequestKey, _Mapping]]] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("requests", "specs")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestHead]
    specs: bytes
    def __init__(self, requests: _Optional[_Iterable[_Union[_common_pb2.RequestHead, _Mapping]]] = ..., specs: _Optional[bytes] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("rejected", "lost", "capacity", "whose", "unknown", "intake")
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    WHOSE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    INTAKE_FIELD_NUMBER: _ClassVar[int]
    rejected: Rejection
    lost: Loss
    capacity: Capacity
    whose: _common_pb2.RequestKeys
    unknown: _common_pb2.RequestKeys
    intake: Intake
    def __init__(self, rejected: _Optional[_Union[Rejection, _Mapping]] = ..., lost: _Optional[_Union[Loss, _Mapping]] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., whose: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., unknown: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., intake: _Optional[_Union[Intake, _Mapping]] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("keys", "failure")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestKey]
    failure: _common_pb2.Failure
    def __init__(self, keys: _Optional[_Iterable[_Union[_common_pb2.RequestKey, _Mapping]]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class Loss(_message.Message):
    __slots__ = ("keys", "reason")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestKey]
    reason: str
    def __init__(self, keys: _Optional[_Iterable[_Union[_common_pb2.RequestKey, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("max_request_tokens",)
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_request_tokens: int
    def __init__(self, max_request_tokens: _Optional[int] = ...) -> None: ...

class Intake(_message.Message):
    __slots__ = ("limited", "requests", "again_s")
    LIMITED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_S_FIELD_NUMBER: _ClassVar[int]
    limited: bool
    requests: int
    again_s: float
    def __init__(self, limited: bool = ..., requests: _Optional[int] = ..., again_s: _Optional[float] = ...) -> None: ...

class SchedulerDescription(_message.Message):
    __slots__ = ("queued", "prefilling", "waiting_in_pool", "prefetched", "decoding")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_FIELD_NUMBER: _ClassVar[int]
    WAITING_IN_POOL_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    queued: int
    prefilling: int
    waiting_in_pool: int
    prefetched: int
    decoding: int
    def __init__(self, queued: _Optional[int] = ..., prefilling: _Optional[int] = ..., waiting_in_pool: _Optional[int] = ..., prefetched: _Optional[int] = ..., decoding: _Optional[int] = ...) -> None: ...

class StaysQuery(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class StaysFound(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
