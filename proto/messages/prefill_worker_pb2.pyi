from alignedserve.proto import common_pb2 as _common_pb2
from alignedserve.proto import kv_pool_pb2 as _kv_pool_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Buffer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUFFER_UNSPECIFIED: _ClassVar[Buffer]
    BUFFER_BATCH: _ClassVar[Buffer]
    BUFFER_REQUESTS: _ClassVar[Buffer]
BUFFER_UNSPECIFIED: Buffer
BUFFER_BATCH: Buffer
BUFFER_REQUESTS: Buffer

class PrefillCommand(_message.Message):
    __slots__ = ("prefill", "prefetch", "cancel", "give_up_pins")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    GIVE_UP_PINS_FIELD_NUMBER: _ClassVar[int]
    prefill: PrefillGroup
    prefetch: Prefetch
    cancel: _common_pb2.RequestKeys
    give_up_pins: str
    def __init__(self, prefill: _Optional[_Union[PrefillGroup, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., cancel: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., give_up_pins: _Optional[str] = ...) -> None: ...

class PrefillGroup(_message.Message):
    __slots__ = ("keys", "base", "gateway_address", "specs", "copy_from")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    COPY_FROM_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestKey]
    base: _kv_pool_pb2.Holding
    gateway_address: str
    specs: bytes
    copy_from: str
    def __init__(self, keys: _Optional[_Iterable[_Union[_common_pb2.RequestKey, _Mapping]]] = ..., base: _Optional[_Union[_kv_pool_pb2.Holding, _Mapping]] = ..., gateway_address: _Optional[str] = ..., specs: _Optional[bytes] = ..., copy_from: _Optional[str] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("decode_id", "buffer", "batch_id", "requests")
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    decode_id: str
    buffer: Buffer
    batch_id: int
    requests: _containers.RepeatedCompositeFieldContainer[_common_pb2.PooledRequest]
    def __init__(self, decode_id: _Optional[str] = ..., buffer: _Optional[_Union[Buffer, str]] = ..., batch_id: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[_common_pb2.PooledRequest, _Mapping]]] = ...) -> None: ...

class PrefillReport(_message.Message):
    __slots__ = ("description", "prefilled", "finished", "failed", "prefetched", "returned")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    description: PrefillDescription
    prefilled: _common_pb2.PooledRequest
    finished: _common_pb2.RequestKeys
    failed: RequestFailures
    prefetched: _common_pb2.RequestKeys
    returned: ReturnedRequests
    def __init__(self, description: _Optional[_Union[PrefillDescription, _Mapping]] = ..., prefilled: _Optional[_Union[_common_pb2.PooledRequest, _Mapping]] = ..., finished: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., failed: _Optional[_Union[RequestFailures, _Mapping]] = ..., prefetched: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., returned: _Optional[_Union[ReturnedRequests, _Mapping]] = ...) -> None: ...

class RequestFailures(_message.Message):
    __slots__ = ("keys", "failure", "retry", "distrust")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    DISTRUST_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestKey]
    failure: _common_pb2.Failure
    retry: bool
    distrust: bool
    def __init__(self, keys: _Optional[_Iterable[_Union[_common_pb2.RequestKey, _Mapping]]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., retry: bool = ..., distrust: bool = ...) -> None: ...

class ReturnedRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[_common_pb2.PooledRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[_common_pb2.PooledRequest, _Mapping]]] = ...) -> None: ...

class PrefillDescription(_message.Message):
    __slots__ = ("process", "pending_tokens", "cache_blocks", "cache_free_blocks", "batch_buffer_blocks", "batch_buffer_free_blocks", "requests_buffer_blocks", "requests_buffer_free_blocks", "pool_wait_blocks", "copy_s_per_token", "measured")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BATCH_BUFFER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BATCH_BUFFER_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_BUFFER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_BUFFER_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_WAIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    pending_tokens: int
    cache_blocks: int
    cache_free_blocks: int
    batch_buffer_blocks: int
    batch_buffer_free_blocks: int
    requests_buffer_blocks: int
    requests_buffer_free_blocks: int
    pool_wait_blocks: int
    copy_s_per_token: float
    measured: _common_pb2.Passes
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., pending_tokens: _Optional[int] = ..., cache_blocks: _Optional[int] = ..., cache_free_blocks: _Optional[int] = ..., batch_buffer_blocks: _Optional[int] = ..., batch_buffer_free_blocks: _Optional[int] = ..., requests_buffer_blocks: _Optional[int] = ..., requests_buffer_free_blocks: _Optional[int] = ..., pool_wait_blocks: _Optional[int] = ..., copy_s_per_token: _Optional[float] = ..., measured: _Optional[_Union[_common_pb2.Passes, _Mapping]] = ...) -> None: ...

class BufferEvent(_message.Message):
    __slots__ = ("stores", "announced", "leased")
    STORES_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    stores: BufferStores
    announced: Announcement
    leased: BufferLease
    def __init__(self, stores: _Optional[_Union[BufferStores, _Mapping]] = ..., announced: _Optional[_Union[Announcement, _Mapping]] = ..., leased: _Optional[_Union[BufferLease, _Mapping]] = ...) -> None: ...

class BufferStores(_message.Message):
    __slots__ = ("process", "batch", "requests", "no_nccl")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NO_NCCL_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    batch: _common_pb2.StoreHandle
    requests: _common_pb2.StoreHandle
    no_nccl: str
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., batch: _Optional[_Union[_common_pb2.StoreHandle, _Mapping]] = ..., requests: _Optional[_Union[_common_pb2.StoreHandle, _Mapping]] = ..., no_nccl: _Optional[str] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("buffer", "batch_id", "requests")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    buffer: Buffer
    batch_id: int
    requests: _containers.RepeatedCompositeFieldContainer[_common_pb2.StoredRequest]
    def __init__(self, buffer: _Optional[_Union[Buffer, str]] = ..., batch_id: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[_common_pb2.StoredRequest, _Mapping]]] = ...) -> None: ...

class BufferLease(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BufferCommand(_message.Message):
    __slots__ = ("hello", "consumed", "evicted", "give_back", "want_blocks", "return_blocks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_FIELD_NUMBER: _ClassVar[int]
    WANT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETURN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.ProcessKey
    consumed: _common_pb2.RequestKeys
    evicted: EvictedRequest
    give_back: _common_pb2.RequestKeys
    want_blocks: int
    return_blocks: BufferLease
    def __init__(self, hello: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., consumed: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., evicted: _Optional[_Union[EvictedRequest, _Mapping]] = ..., give_back: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., want_blocks: _Optional[int] = ..., return_blocks: _Optional[_Union[BufferLease, _Mapping]] = ...) -> None: ...

class EvictedRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.StoredRequest
    def __init__(self, request: _Optional[_Union[_common_pb2.StoredRequest, _Mapping]] = ...) -> None: ...
