from alignedserve.proto import common_pb2 as _common_pb2
from alignedserve.proto import prefill_worker_pb2 as _prefill_worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeCommand(_message.Message):
    __slots__ = ("candidates", "cancel", "recall", "urgent", "default_objective_s")
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    URGENT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_OBJECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    candidates: _prefill_worker_pb2.Prefetch
    cancel: _common_pb2.RequestKeys
    recall: _common_pb2.RequestKeys
    urgent: UrgentRequests
    default_objective_s: float
    def __init__(self, candidates: _Optional[_Union[_prefill_worker_pb2.Prefetch, _Mapping]] = ..., cancel: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., recall: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., urgent: _Optional[_Union[UrgentRequests, _Mapping]] = ..., default_objective_s: _Optional[float] = ...) -> None: ...

class UrgentRequests(_message.Message):
    __slots__ = ("keys", "due_in_s")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DUE_IN_S_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestKey]
    due_in_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, keys: _Optional[_Iterable[_Union[_common_pb2.RequestKey, _Mapping]]] = ..., due_in_s: _Optional[_Iterable[float]] = ...) -> None: ...

class DecodeReport(_message.Message):
    __slots__ = ("description", "finished", "returned", "failed", "joined", "inventory")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    description: DecodeDescription
    finished: _common_pb2.RequestKeys
    returned: _prefill_worker_pb2.ReturnedRequests
    failed: _prefill_worker_pb2.RequestFailures
    joined: _common_pb2.RequestKeys
    inventory: DecodeInventory
    def __init__(self, description: _Optional[_Union[DecodeDescription, _Mapping]] = ..., finished: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., returned: _Optional[_Union[_prefill_worker_pb2.ReturnedRequests, _Mapping]] = ..., failed: _Optional[_Union[_prefill_worker_pb2.RequestFailures, _Mapping]] = ..., joined: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., inventory: _Optional[_Union[DecodeInventory, _Mapping]] = ...) -> None: ...

class DecodeInventory(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[HeldRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[HeldRequest, _Mapping]]] = ...) -> None: ...

class HeldRequest(_message.Message):
    __slots__ = ("key", "prefix_tokens", "max_total_tokens", "group_id", "gateway_id", "running", "kv_tokens", "blocks", "store_id", "wait_objective_s", "priority")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_OBJECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    prefix_tokens: int
    max_total_tokens: int
    group_id: str
    gateway_id: str
    running: bool
    kv_tokens: int
    blocks: int
    store_id: str
    wait_objective_s: float
    priority: int
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., prefix_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., group_id: _Optional[str] = ..., gateway_id: _Optional[str] = ..., running: bool = ..., kv_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., store_id: _Optional[str] = ..., wait_objective_s: _Optional[float] = ..., priority: _Optional[int] = ...) -> None: ...

class DecodeDescription(_message.Message):
    __slots__ = ("process", "cache_blocks", "cache_free_blocks", "running", "shortest_tokens", "longest_tokens", "batch_id", "batch_buffer_requests", "requests_buffer_requests", "iterations", "switch_iterations", "evictions", "pool_wait_blocks", "batch_shortest_tokens", "batch_longest_tokens", "max_running", "request_blocks", "measured")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    SHORTEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_BUFFER_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_BUFFER_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    SWITCH_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    POOL_WAIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SHORTEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_LONGEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    cache_blocks: int
    cache_free_blocks: int
    running: int
    shortest_tokens: int
    longest_tokens: int
    batch_id: int
    batch_buffer_requests: int
    requests_buffer_requests: int
    iterations: int
    switch_iterations: int
    evictions: int
    pool_wait_blocks: int
    batch_shortest_tokens: int
    batch_longest_tokens: int
    max_running: int
    request_blocks: int
    measured: _common_pb2.Passes
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., cache_blocks: _Optional[int] = ..., cache_free_blocks: _Optional[int] = ..., running: _Optional[int] = ..., shortest_tokens: _Optional[int] = ..., longest_tokens: _Optional[int] = ..., batch_id: _Optional[int] = ..., batch_buffer_requests: _Optional[int] = ..., requests_buffer_requests: _Optional[int] = ..., iterations: _Optional[int] = ..., switch_iterations: _Optional[int] = ..., evictions: _Optional[int] = ..., pool_wait_blocks: _Optional[int] = ..., batch_shortest_tokens: _Optional[int] = ..., batch_longest_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., request_blocks: _Optional[int] = ..., measured: _Optional[_Union[_common_pb2.Passes, _Mapping]] = ...) -> None: ...
