from alignedserve.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PinnedPrefix(_message.Message):
    __slots__ = ("name", "prefix", "everywhere")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    EVERYWHERE_FIELD_NUMBER: _ClassVar[int]
    name: str
    prefix: CachedPrefix
    everywhere: bool
    def __init__(self, name: _Optional[str] = ..., prefix: _Optional[_Union[CachedPrefix, _Mapping]] = ..., everywhere: bool = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("refused", "held", "blocks", "block_bytes")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    refused: _common_pb2.Failure
    held: bool
    blocks: int
    block_bytes: int
    def __init__(self, refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., held: bool = ..., blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class CacheQuery(_message.Message):
    __slots__ = ("prefixes", "most_sessions")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    MOST_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    prefixes: bool
    most_sessions: int
    def __init__(self, prefixes: bool = ..., most_sessions: _Optional[int] = ...) -> None: ...

class CacheContents(_message.Message):
    __slots__ = ("pool_id", "pins", "sessions", "session_count", "capacity_blocks", "free_blocks", "cached_blocks", "pinned_blocks", "block_bytes", "queried_tokens", "hit_tokens", "block_size")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    pins: _containers.RepeatedCompositeFieldContainer[CachedPin]
    sessions: _containers.RepeatedCompositeFieldContainer[CachedSession]
    session_count: int
    capacity_blocks: int
    free_blocks: int
    cached_blocks: int
    pinned_blocks: int
    block_bytes: int
    queried_tokens: int
    hit_tokens: int
    block_size: int
    def __init__(self, pool_id: _Optional[str] = ..., pins: _Optional[_Iterable[_Union[CachedPin, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[CachedSession, _Mapping]]] = ..., session_count: _Optional[int] = ..., capacity_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class CachedPin(_message.Message):
    __slots__ = ("pin", "tokens", "blocks", "hits", "idle_s", "stale")
    PIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    pin: PinnedPrefix
    tokens: int
    blocks: int
    hits: int
    idle_s: float
    stale: bool
    def __init__(self, pin: _Optional[_Union[PinnedPrefix, _Mapping]] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ..., idle_s: _Optional[float] = ..., stale: bool = ...) -> None: ...

class CachedSession(_message.Message):
    __slots__ = ("name", "request_id", "blocks", "turns", "idle_s", "ending", "expected_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    blocks: int
    turns: int
    idle_s: float
    ending: str
    expected_s: float
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ..., blocks: _Optional[int] = ..., turns: _Optional[int] = ..., idle_s: _Optional[float] = ..., ending: _Optional[str] = ..., expected_s: _Optional[float] = ...) -> None: ...

class DropCached(_message.Message):
    __slots__ = ("names", "prefix")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    prefix: CachedPrefix
    def __init__(self, names: _Optional[_Iterable[str]] = ..., prefix: _Optional[_Union[CachedPrefix, _Mapping]] = ...) -> None: ...

class Dropped(_message.Message):
    __slots__ = ("names", "blocks")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    blocks: int
    def __init__(self, names: _Optional[_Iterable[str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("request_id", "kind", "session", "took_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kind: str
    session: str
    took_s: float
    def __init__(self, request_id: _Optional[str] = ..., kind: _Optional[str] = ..., session: _Optional[str] = ..., took_s: _Optional[float] = ...) -> None: ...

class Endings(_message.Message):
    __slots__ = ("endings",)
    ENDINGS_FIELD_NUMBER: _ClassVar[int]
    endings: _containers.RepeatedCompositeFieldContainer[Ending]
    def __init__(self, endings: _Optional[_Iterable[_Union[Ending, _Mapping]]] = ...) -> None: ...

class CachedPrefix(_message.Message):
    __slots__ = ("token_ids", "salt", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    salt: bytes
    weights: str
    def __init__(self, token_ids: _Optional[bytes] = ..., salt: _Optional[bytes] = ..., weights: _Optional[str] = ...) -> None: ...

class PrefixFound(_message.Message):
    __slots__ = ("tokens", "ready_s")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    READY_S_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    ready_s: float
    def __init__(self, tokens: _Optional[int] = ..., ready_s: _Optional[float] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("key", "prefix")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    prefix: CachedPrefix
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., prefix: _Optional[_Union[CachedPrefix, _Mapping]] = ...) -> None: ...

class CacheBlocks(_message.Message):
    __slots__ = ("prefix", "first_block", "block_ids", "checksums", "key")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    prefix: CachedPrefix
    first_block: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    key: _common_pb2.RequestKey
    def __init__(self, prefix: _Optional[_Union[CachedPrefix, _Mapping]] = ..., first_block: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ...) -> None: ...

class PoolWriterMessage(_message.Message):
    __slots__ = ("message_id", "hello", "want_blocks", "give_back", "commit", "release", "pin", "cache", "unpin")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WANT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    message_id: int
    hello: _common_pb2.ProcessKey
    want_blocks: int
    give_back: BlockIds
    commit: Commit
    release: _common_pb2.RequestKeys
    pin: Pin
    cache: CacheBlocks
    unpin: Holding
    def __init__(self, message_id: _Optional[int] = ..., hello: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., want_blocks: _Optional[int] = ..., give_back: _Optional[_Union[BlockIds, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., release: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., pin: _Optional[_Union[Pin, _Mapping]] = ..., cache: _Optional[_Union[CacheBlocks, _Mapping]] = ..., unpin: _Optional[_Union[Holding, _Mapping]] = ...) -> None: ...

class BlockIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("key", "kv_tokens", "block_ids", "share_with", "kept_blocks", "checksums", "payload")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SHARE_WITH_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    kv_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    share_with: _common_pb2.RequestKey
    kept_blocks: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    payload: bytes
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., kv_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., share_with: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., kept_blocks: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PoolWriterReply(_message.Message):
    __slots__ = ("message_id", "granted", "committed", "refused", "recall", "pinned")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    message_id: int
    granted: BlockIds
    committed: Committed
    refused: _common_pb2.Failure
    recall: _common_pb2.Empty
    pinned: Holding
    def __init__(self, message_id: _Optional[int] = ..., granted: _Optional[_Union[BlockIds, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., recall: _Optional[_Union[_common_pb2.Empty, _Mapping]] = ..., pinned: _Optional[_Union[Holding, _Mapping]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("block_ids", "checksums")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class PoolCommand(_message.Message):
    __slots__ = ("release", "take_inventory", "drop", "adopt")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TAKE_INVENTORY_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    release: _common_pb2.RequestKeys
    take_inventory: _common_pb2.Empty
    drop: Inventory
    adopt: Adopt
    def __init__(self, release: _Optional[_Union[_common_pb2.RequestKeys, _Mapping]] = ..., take_inventory: _Optional[_Union[_common_pb2.Empty, _Mapping]] = ..., drop: _Optional[_Union[Inventory, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("heads",)
    HEADS_FIELD_NUMBER: _ClassVar[int]
    heads: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestHead]
    def __init__(self, heads: _Optional[_Iterable[_Union[_common_pb2.RequestHead, _Mapping]]] = ...) -> None: ...

class StoredRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, requests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PoolReport(_message.Message):
    __slots__ = ("description", "inventory", "adopted")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    description: PoolDescription
    inventory: Inventory
    adopted: Inventory
    def __init__(self, description: _Optional[_Union[PoolDescription, _Mapping]] = ..., inventory: _Optional[_Union[Inventory, _Mapping]] = ..., adopted: _Optional[_Union[Inventory, _Mapping]] = ...) -> None: ...

class PoolDescription(_message.Message):
    __slots__ = ("pool_id", "incarnation", "store", "capacity_blocks", "free_blocks", "owned_blocks", "cached_blocks", "leased_blocks", "pinned_blocks")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    incarnation: int
    store: _common_pb2.StoreHandle
    capacity_blocks: int
    free_blocks: int
    owned_blocks: int
    cached_blocks: int
    leased_blocks: int
    pinned_blocks: int
    def __init__(self, pool_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., store: _Optional[_Union[_common_pb2.StoreHandle, _Mapping]] = ..., capacity_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("key", "kv_tokens", "block_ids", "checksums", "blocks", "pool_id", "whole", "disk_tokens", "weights", "ready_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    READY_S_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    kv_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    blocks: int
    pool_id: str
    whole: bool
    disk_tokens: int
    weights: str
    ready_s: float
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., kv_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., blocks: _Optional[int] = ..., pool_id: _Optional[str] = ..., whole: bool = ..., disk_tokens: _Optional[int] = ..., weights: _Optional[str] = ..., ready_s: _Optional[float] = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("holdings",)
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    def __init__(self, holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ...) -> None: ...
