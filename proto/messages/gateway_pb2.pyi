from alignedserve.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestSpecs(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestSpec]
    def __init__(self, requests: _Optional[_Iterable[_Union[_common_pb2.RequestSpec, _Mapping]]] = ...) -> None: ...

class CallId(_message.Message):
    __slots__ = ("call_id", "owner", "whosever")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    WHOSEVER_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    owner: bytes
    whosever: bool
    def __init__(self, call_id: _Optional[str] = ..., owner: _Optional[bytes] = ..., whosever: bool = ...) -> None: ...

class RequestsQuery(_message.Message):
    __slots__ = ("id", "owner", "whosever", "newest", "most", "since_unix_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    WHOSEVER_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    owner: bytes
    whosever: bool
    newest: bool
    most: int
    since_unix_s: float
    def __init__(self, id: _Optional[str] = ..., owner: _Optional[bytes] = ..., whosever: bool = ..., newest: bool = ..., most: _Optional[int] = ..., since_unix_s: _Optional[float] = ...) -> None: ...

class RequestsFound(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class CallFound(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("sender", "events")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.ProcessKey
    events: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    def __init__(self, sender: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., events: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., rank: _Optional[int] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("key", "position", "token_ids", "logprobs", "prompt_logprobs", "finish_reason", "failure", "timings", "prefill_id", "decode_id", "cached_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish_reason: str
    failure: _common_pb2.Failure
    timings: _common_pb2.Timings
    prefill_id: str
    decode_id: str
    cached_tokens: int
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., prefill_id: _Optional[str] = ..., decode_id: _Optional[str] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
