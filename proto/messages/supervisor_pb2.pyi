from alignedserve.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BookCheck(_message.Message):
    __slots__ = ("store", "instance", "problem", "unknown", "capacity_blocks", "free_blocks", "owned_blocks", "cached_blocks")
    STORE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    store: str
    instance: str
    problem: str
    unknown: bool
    capacity_blocks: int
    free_blocks: int
    owned_blocks: int
    cached_blocks: int
    def __init__(self, store: _Optional[str] = ..., instance: _Optional[str] = ..., problem: _Optional[str] = ..., unknown: bool = ..., capacity_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ...) -> None: ...

class IntegrityReport(_message.Message):
    __slots__ = ("books",)
    BOOKS_FIELD_NUMBER: _ClassVar[int]
    books: _containers.RepeatedCompositeFieldContainer[BookCheck]
    def __init__(self, books: _Optional[_Iterable[_Union[BookCheck, _Mapping]]] = ...) -> None: ...

class RoleReport(_message.Message):
    __slots__ = ("hello", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: RoleHello
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[RoleHello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class RoleHello(_message.Message):
    __slots__ = ("process", "pid", "node_id", "address", "device", "started_ticks", "metrics_port")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STARTED_TICKS_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    pid: int
    node_id: str
    address: str
    device: str
    started_ticks: int
    metrics_port: int
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., pid: _Optional[int] = ..., node_id: _Optional[str] = ..., address: _Optional[str] = ..., device: _Optional[str] = ..., started_ticks: _Optional[int] = ..., metrics_port: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("state", "progress", "holds", "failure", "model_info", "stores", "gauges", "metrics", "busy", "alarms", "step_s", "reaches", "live", "drained")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MODEL_INFO_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    REACHES_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    state: str
    progress: int
    holds: str
    failure: _common_pb2.Failure
    model_info: str
    stores: _containers.RepeatedCompositeFieldContainer[_common_pb2.StoreHandle]
    gauges: _containers.ScalarMap[str, float]
    metrics: str
    busy: bool
    alarms: _containers.RepeatedScalarFieldContainer[str]
    step_s: float
    reaches: _containers.RepeatedScalarFieldContainer[str]
    live: str
    drained: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, state: _Optional[str] = ..., progress: _Optional[int] = ..., holds: _Optional[str] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., model_info: _Optional[str] = ..., stores: _Optional[_Iterable[_Union[_common_pb2.StoreHandle, _Mapping]]] = ..., gauges: _Optional[_Mapping[str, float]] = ..., metrics: _Optional[str] = ..., busy: bool = ..., alarms: _Optional[_Iterable[str]] = ..., step_s: _Optional[float] = ..., reaches: _Optional[_Iterable[str]] = ..., live: _Optional[str] = ..., drained: _Optional[_Iterable[str]] = ...) -> None: ...

class RoleOrder(_message.Message):
    __slots__ = ("view", "end", "refused", "report", "heard")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    view: ClusterView
    end: _common_pb2.Empty
    refused: _common_pb2.Failure
    report: _common_pb2.Empty
    heard: _common_pb2.Empty
    def __init__(self, view: _Optional[_Union[ClusterView, _Mapping]] = ..., end: _Optional[_Union[_common_pb2.Empty, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., report: _Optional[_Union[_common_pb2.Empty, _Mapping]] = ..., heard: _Optional[_Union[_common_pb2.Empty, _Mapping]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("process", "pid", "node_id", "address", "state", "holds", "stores", "failure", "started_unix_s", "alarms", "fenced", "device", "started_ticks", "metrics_port")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STARTED_TICKS_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    process: _common_pb2.ProcessKey
    pid: int
    node_id: str
    address: str
    state: str
    holds: str
    stores: _containers.RepeatedCompositeFieldContainer[_common_pb2.StoreHandle]
    failure: _common_pb2.Failure
    started_unix_s: float
    alarms: _containers.RepeatedScalarFieldContainer[str]
    fenced: bool
    device: str
    started_ticks: int
    metrics_port: int
    def __init__(self, process: _Optional[_Union[_common_pb2.ProcessKey, _Mapping]] = ..., pid: _Optional[int] = ..., node_id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., holds: _Optional[str] = ..., stores: _Optional[_Iterable[_Union[_common_pb2.StoreHandle, _Mapping]]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., started_unix_s: _Optional[float] = ..., alarms: _Optional[_Iterable[str]] = ..., fenced: bool = ..., device: _Optional[str] = ..., started_ticks: _Optional[int] = ..., metrics_port: _Optional[int] = ...) -> None: ...

class Pair(_message.Message):
    __slots__ = ("decode_id", "prefill_id", "link_rank")
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_RANK_FIELD_NUMBER: _ClassVar[int]
    decode_id: str
    prefill_id: str
    link_rank: int
    def __init__(self, decode_id: _Optional[str] = ..., prefill_id: _Optional[str] = ..., link_rank: _Optional[int] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("version", "peers", "model_info", "pairs", "store_plan", "ending", "grace_s", "prefill", "decode", "draining", "told_by", "supervisor", "restart", "pools", "next_node", "gone_nodes", "incarnations", "followed_prefill", "followed_decode", "was_ready", "stop_asked")
    class IncarnationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_INFO_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    STORE_PLAN_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TOLD_BY_FIELD_NUMBER: _ClassVar[int]
    SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    NEXT_NODE_FIELD_NUMBER: _ClassVar[int]
    GONE_NODES_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_DECODE_FIELD_NUMBER: _ClassVar[int]
    WAS_READY_FIELD_NUMBER: _ClassVar[int]
    STOP_ASKED_FIELD_NUMBER: _ClassVar[int]
    version: int
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    model_info: str
    pairs: _containers.RepeatedCompositeFieldContainer[Pair]
    store_plan: str
    ending: bool
    grace_s: float
    prefill: int
    decode: int
    draining: _containers.RepeatedScalarFieldContainer[str]
    told_by: int
    supervisor: Peer
    restart: Restart
    pools: _containers.RepeatedCompositeFieldContainer[PoolShard]
    next_node: int
    gone_nodes: _containers.RepeatedScalarFieldContainer[str]
    incarnations: _containers.ScalarMap[str, int]
    followed_prefill: int
    followed_decode: int
    was_ready: bool
    stop_asked: bool
    def __init__(self, version: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., model_info: _Optional[str] = ..., pairs: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., store_plan: _Optional[str] = ..., ending: bool = ..., grace_s: _Optional[float] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., draining: _Optional[_Iterable[str]] = ..., told_by: _Optional[int] = ..., supervisor: _Optional[_Union[Peer, _Mapping]] = ..., restart: _Optional[_Union[Restart, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolShard, _Mapping]]] = ..., next_node: _Optional[int] = ..., gone_nodes: _Optional[_Iterable[str]] = ..., incarnations: _Optional[_Mapping[str, int]] = ..., followed_prefill: _Optional[int] = ..., followed_decode: _Optional[int] = ..., was_ready: bool = ..., stop_asked: bool = ...) -> None: ...

class PoolShard(_message.Message):
    __slots__ = ("pool_id", "node_id", "agent_socket")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_SOCKET_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    node_id: str
    agent_socket: str
    def __init__(self, pool_id: _Optional[str] = ..., node_id: _Optional[str] = ..., agent_socket: _Optional[str] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("peers", "model_info", "cluster_id", "state", "missing", "degraded", "failure", "metrics", "prefill", "decode", "scale_failure", "restart")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_INFO_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FAILURE_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    model_info: str
    cluster_id: str
    state: str
    missing: _containers.RepeatedScalarFieldContainer[str]
    degraded: _containers.RepeatedScalarFieldContainer[str]
    failure: _common_pb2.Failure
    metrics: str
    prefill: int
    decode: int
    scale_failure: _common_pb2.Failure
    restart: Restart
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., model_info: _Optional[str] = ..., cluster_id: _Optional[str] = ..., state: _Optional[str] = ..., missing: _Optional[_Iterable[str]] = ..., degraded: _Optional[_Iterable[str]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., metrics: _Optional[str] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., scale_failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., restart: _Optional[_Union[Restart, _Mapping]] = ...) -> None: ...

class LiveQuery(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: bool
    def __init__(self, config: bool = ...) -> None: ...

class LiveState(_message.Message):
    __slots__ = ("status", "lives", "events", "config")
    class LivesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LIVES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    status: ClusterStatus
    lives: _containers.ScalarMap[str, str]
    events: _containers.RepeatedCompositeFieldContainer[ClusterEvent]
    config: str
    def __init__(self, status: _Optional[_Union[ClusterStatus, _Mapping]] = ..., lives: _Optional[_Mapping[str, str]] = ..., events: _Optional[_Iterable[_Union[ClusterEvent, _Mapping]]] = ..., config: _Optional[str] = ...) -> None: ...

class ClusterEvent(_message.Message):
    __slots__ = ("unix_s", "level", "text")
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    unix_s: float
    level: str
    text: str
    def __init__(self, unix_s: _Optional[float] = ..., level: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("refused", "prefill", "decode")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    refused: _common_pb2.Failure
    prefill: int
    decode: int
    def __init__(self, refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ("grace_s", "command_pid", "command_host")
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    COMMAND_PID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_HOST_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    command_pid: int
    command_host: str
    def __init__(self, grace_s: _Optional[float] = ..., command_pid: _Optional[int] = ..., command_host: _Optional[str] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("roles",)
    ROLES_FIELD_NUMBER: _ClassVar[int]
    roles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, roles: _Optional[_Iterable[str]] = ...) -> None: ...

class RestartReply(_message.Message):
    __slots__ = ("refused", "restart")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    refused: _common_pb2.Failure
    restart: Restart
    def __init__(self, refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., restart: _Optional[_Union[Restart, _Mapping]] = ...) -> None: ...

class Restart(_message.Message):
    __slots__ = ("since_ns", "roles", "surplus", "prefill", "decode", "gateways", "retiring", "doing", "done", "failure", "old", "supervisor")
    class OldEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    RETIRING_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    since_ns: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    surplus: _containers.RepeatedScalarFieldContainer[str]
    prefill: int
    decode: int
    gateways: int
    retiring: _containers.RepeatedScalarFieldContainer[str]
    doing: str
    done: bool
    failure: str
    old: _containers.ScalarMap[str, int]
    supervisor: int
    def __init__(self, since_ns: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., surplus: _Optional[_Iterable[str]] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., gateways: _Optional[int] = ..., retiring: _Optional[_Iterable[str]] = ..., doing: _Optional[str] = ..., done: bool = ..., failure: _Optional[str] = ..., old: _Optional[_Mapping[str, int]] = ..., supervisor: _Optional[int] = ...) -> None: ...

class HandOverRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class HandOverReply(_message.Message):
    __slots__ = ("config", "code", "view", "resizing")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    RESIZING_FIELD_NUMBER: _ClassVar[int]
    config: str
    code: str
    view: ClusterView
    resizing: bool
    def __init__(self, config: _Optional[str] = ..., code: _Optional[str] = ..., view: _Optional[_Union[ClusterView, _Mapping]] = ..., resizing: bool = ...) -> None: ...
