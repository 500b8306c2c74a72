from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestKey(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class RequestKeys(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[RequestKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[RequestKey, _Mapping]]] = ...) -> None: ...

class ProcessKey(_message.Message):
    __slots__ = ("role", "id", "incarnation")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    role: str
    id: str
    incarnation: int
    def __init__(self, role: _Optional[str] = ..., id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("model", "dtype", "layers", "kv_heads", "head_dim", "block_size")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    def __init__(self, model: _Optional[str] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class StoreHandle(_message.Message):
    __slots__ = ("store_id", "kind", "node_id", "agent_socket", "segment", "offset_bytes", "capacity_blocks", "geometry", "layer_begin", "layer_end", "head_begin", "head_end", "device", "device_handle", "memory", "parts")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_SOCKET_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    kind: str
    node_id: str
    agent_socket: str
    segment: str
    offset_bytes: int
    capacity_blocks: int
    geometry: Geometry
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    device: str
    device_handle: bytes
    memory: str
    parts: _containers.RepeatedCompositeFieldContainer[StoreHandle]
    def __init__(self, store_id: _Optional[str] = ..., kind: _Optional[str] = ..., node_id: _Optional[str] = ..., agent_socket: _Optional[str] = ..., segment: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., capacity_blocks: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_begin: _Optional[int] = ..., head_end: _Optional[int] = ..., device: _Optional[str] = ..., device_handle: _Optional[bytes] = ..., memory: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[StoreHandle, _Mapping]]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "eos_token_ids", "max_tokens", "min_tokens", "ignore_eos", "grammar", "logprob_token_ids", "allowed_token_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "bad_words", "bad_words_ids", "no_repeat_ngram_size", "skip_special_tokens", "spaces_between_special_tokens", "thinking")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FORCED_EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_IDS_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    logprobs: int
    prompt_logprobs: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    grammar: Grammar
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    suppress_tokens: _containers.RepeatedScalarFieldContainer[int]
    begin_suppress_tokens: _containers.RepeatedScalarFieldContainer[int]
    forced_bos_token_id: _containers.RepeatedScalarFieldContainer[int]
    forced_eos_token_id: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    bad_words_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    no_repeat_ngram_size: int
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    thinking: ThinkingLimit
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: bool = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., suppress_tokens: _Optional[_Iterable[int]] = ..., begin_suppress_tokens: _Optional[_Iterable[int]] = ..., forced_bos_token_id: _Optional[_Iterable[int]] = ..., forced_eos_token_id: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., bad_words_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., no_repeat_ngram_size: _Optional[int] = ..., skip_special_tokens: bool = ..., spaces_between_special_tokens: bool = ..., thinking: _Optional[_Union[ThinkingLimit, _Mapping]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ThinkingLimit(_message.Message):
    __slots__ = ("budget", "open", "close", "begun", "before", "calls")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    budget: int
    open: _containers.RepeatedScalarFieldContainer[int]
    close: _containers.RepeatedScalarFieldContainer[int]
    begun: bool
    before: _containers.RepeatedScalarFieldContainer[int]
    calls: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, budget: _Optional[int] = ..., open: _Optional[_Iterable[int]] = ..., close: _Optional[_Iterable[int]] = ..., begun: bool = ..., before: _Optional[_Iterable[int]] = ..., calls: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "whitespace")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    whitespace: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., whitespace: _Optional[str] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "pool_s", "prefetch_s", "handover_s", "decode_s", "stage", "since_ns", "bubble_s", "steps")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    POOL_S_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_S_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    pool_s: float
    prefetch_s: float
    handover_s: float
    decode_s: float
    stage: str
    since_ns: int
    bubble_s: float
    steps: _containers.RepeatedCompositeFieldContainer[StageStep]
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., pool_s: _Optional[float] = ..., prefetch_s: _Optional[float] = ..., handover_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., stage: _Optional[str] = ..., since_ns: _Optional[int] = ..., bubble_s: _Optional[float] = ..., steps: _Optional[_Iterable[_Union[StageStep, _Mapping]]] = ...) -> None: ...

class StageStep(_message.Message):
    __slots__ = ("stage", "begun_ns")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_NS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    begun_ns: int
    def __init__(self, stage: _Optional[str] = ..., begun_ns: _Optional[int] = ...) -> None: ...

class RequestSpec(_message.Message):
    __slots__ = ("key", "prompt_token_ids", "output_token_ids", "sampling", "gateway_id", "gateway_address", "group_id", "group_size", "arrival_ns", "deadline_ns", "timings", "wait_objective_s", "priority", "cache_salt")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    WAIT_OBJECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    gateway_id: str
    gateway_address: str
    group_id: str
    group_size: int
    arrival_ns: int
    deadline_ns: int
    timings: Timings
    wait_objective_s: float
    priority: int
    cache_salt: bytes
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., gateway_id: _Optional[str] = ..., gateway_address: _Optional[str] = ..., group_id: _Optional[str] = ..., group_size: _Optional[int] = ..., arrival_ns: _Optional[int] = ..., deadline_ns: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., wait_objective_s: _Optional[float] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class StoredRequest(_message.Message):
    __slots__ = ("spec", "store_id", "kv_tokens", "block_ids", "pool_id", "pool_tokens", "pool_block_ids", "prefill_id", "checksums", "pool_checksums", "evicted_ns", "evictions", "weights")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    POOL_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_NS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    spec: RequestSpec
    store_id: str
    kv_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    pool_id: str
    pool_tokens: int
    pool_block_ids: _containers.RepeatedScalarFieldContainer[int]
    prefill_id: str
    checksums: _containers.RepeatedScalarFieldContainer[int]
    pool_checksums: _containers.RepeatedScalarFieldContainer[int]
    evicted_ns: int
    evictions: int
    weights: str
    def __init__(self, spec: _Optional[_Union[RequestSpec, _Mapping]] = ..., store_id: _Optional[str] = ..., kv_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., pool_id: _Optional[str] = ..., pool_tokens: _Optional[int] = ..., pool_block_ids: _Optional[_Iterable[int]] = ..., prefill_id: _Optional[str] = ..., checksums: _Optional[_Iterable[int]] = ..., pool_checksums: _Optional[_Iterable[int]] = ..., evicted_ns: _Optional[int] = ..., evictions: _Optional[int] = ..., weights: _Optional[str] = ...) -> None: ...

class RequestHead(_message.Message):
    __slots__ = ("key", "prompt_tokens", "output_tokens", "max_tokens", "gateway_id", "group_id", "group_size", "arrival_ns", "submitted_ns", "wait_objective_s", "priority", "cached", "prefix_marks")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_OBJECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MARKS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    gateway_id: str
    group_id: str
    group_size: int
    arrival_ns: int
    submitted_ns: int
    wait_objective_s: float
    priority: int
    cached: _containers.RepeatedCompositeFieldContainer[CachedTokens]
    prefix_marks: bytes
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., gateway_id: _Optional[str] = ..., group_id: _Optional[str] = ..., group_size: _Optional[int] = ..., arrival_ns: _Optional[int] = ..., submitted_ns: _Optional[int] = ..., wait_objective_s: _Optional[float] = ..., priority: _Optional[int] = ..., cached: _Optional[_Iterable[_Union[CachedTokens, _Mapping]]] = ..., prefix_marks: _Optional[bytes] = ...) -> None: ...

class CachedTokens(_message.Message):
    __slots__ = ("pool_id", "tokens", "ready_s")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    READY_S_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    tokens: int
    ready_s: float
    def __init__(self, pool_id: _Optional[str] = ..., tokens: _Optional[int] = ..., ready_s: _Optional[float] = ...) -> None: ...

class PooledRequest(_message.Message):
    __slots__ = ("key", "pool_id", "kv_tokens", "blocks", "group_id", "evicted_ns", "shared_blocks")
    KEY_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    EVICTED_NS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    pool_id: str
    kv_tokens: int
    blocks: int
    group_id: str
    evicted_ns: int
    shared_blocks: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., pool_id: _Optional[str] = ..., kv_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., group_id: _Optional[str] = ..., evicted_ns: _Optional[int] = ..., shared_blocks: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retry_after_s: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Passes(_message.Message):
    __slots__ = ("passes", "tokens", "cached_tokens", "seconds", "padded_tokens")
    PASSES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    passes: int
    tokens: int
    cached_tokens: int
    seconds: float
    padded_tokens: int
    def __init__(self, passes: _Optional[int] = ..., tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., padded_tokens: _Optional[int] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
