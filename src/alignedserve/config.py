"""The configuration: frozen sections with one line of documentation per key, validated when they are built.

Later sources win: defaults, a YAML file, `ALIGNEDSERVE_SECTION__KEY` in the environment, command-line flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from alignedserve.batch_size import LEAST, MOST
from alignedserve.errors import ConfigError
from alignedserve.graph_sizes import graph_sizes
from alignedserve.ranks.degrees import PLACEMENT_NAMES, Degrees, Spread
from alignedserve.resources import parse_resources

CPU_PASS_TOKENS = 512
GPU_PASS_TOKENS = 8192  # with fewer tokens a large GPU waits for launches and for weights
QUEUED_TOKENS = 8192


def _key(
    default: Any, doc: str, *, choices: tuple[str, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    """A configuration key with its documentation, choices and limits."""
    return field(default=default, metadata={"doc": doc, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    path: str = _key("tiny", "the model: 'tiny' (ships with the package), a local folder, or ORG/NAME on a hub")
    served_name: str = _key("", "the model name that clients use; empty: the last part of model.path")
    aliases: str = _key("", "more names that clients may use, separated by commas; * stands for any characters")
    dtype: str = _key(
        "auto",
        "data type of weights and KV; auto: float32 on a CPU, the checkpoint's type on a GPU",
        choices=("auto", "bfloat16", "float32", "float16"),
    )
    trust_remote_code: bool = _key(False, "run Python code that comes with the model")
    chat_template: str = _key("", "file with a Jinja chat template that replaces the model's own")
    tool_parser: str = _key(
        "auto",
        "format of the model's tool calls: hermes, llama3_json, … (docs/tools.md); none; auto: by its chat template",
    )
    reasoning_parser: str = _key(
        "auto",
        "format of the model's reasoning: qwen3, deepseek_r1, … (docs/reasoning.md); none; auto: by its chat template",
    )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    prefill: int = _key(1, "prefill instances", low=1, high=1024)
    decode: int = _key(1, "decode instances", low=1, high=1024)
    device: str = _key("auto", "where instances run; auto: cuda if there is a GPU", choices=("auto", "cpu", "cuda"))
    share_gpu: bool = _key(False, "let several instances share one GPU")
    gpu_memory_share: float = _key(0.9, "share of a GPU's memory that its instances use", low=0.05, high=1.0)
    prefetch: bool = _key(True, "prefetch candidate batches through the buffers of prefill instances")
    channel: str = _key(
        "auto",
        "the channel that copies KV between paired instances; auto: the fastest available",
        choices=("auto", "shared-memory", "cuda-ipc", "nccl", "gloo", "nixl"),
    )
    role_metrics: bool = _key(False, "serve each process's metrics on a port of its own: GET /metrics/targets has them")
    ray_metrics: bool = _key(True, "show the cluster's metrics in Ray's own, too, where Ray collects metrics")
    allow_slow_channel: bool = _key(False, "start even if only a slower channel than the configured one can be used")
    placement: str = _key(
        "auto",
        "pairs: a pair shares a node; auto: on GPUs if it fits, unless roles ask for their own resources; else spread",
        choices=("auto", "pairs", "spread"),
    )
    prefill_resources: str = _key("", "Ray resources of each prefill instance on each of its nodes: fast=1,x=0.5")
    decode_resources: str = _key("", "Ray resources of each decode instance on each of its nodes: decode_node=1")
    name: str = _key("default", "the application's name in Ray; it must be unique in a Ray cluster")
    threads: int = _key(0, "CPU threads of each worker; 0: all cores", low=0, high=1024)
    tensor_parallel: int = _key(1, "ranks that share each layer of an instance's model", low=1, high=64)
    pipeline_parallel: int = _key(1, "stages that share out an instance's layers", low=1, high=64)


@dataclass(frozen=True, slots=True)
class KvPoolConfig:
    size_gib: float = _key(0.0, "host memory of each node's shard in GiB; 0: a quarter of the free memory", low=0.0)
    block_size: int = _key(16, "tokens in a KV block, the same in every store", low=1, high=1024)
    growth_reserve: float = _key(0.05, "share of each shard kept for the growth of running requests", low=0.0, high=0.9)
    verify: bool = _key(
        False, "compare a checksum of every KV block after each copy; a block that differs is never used"
    )
    prefix_cache: bool = _key(
        True, "keep the KV of ended requests in free blocks, and compute only what a prompt does not share with them"
    )
    cache_policy: str = _key(
        "value",
        "which cached KV is given up first: value (by the time to compute it again, and uses), lru",
        choices=("value", "lru"),
    )
    disk_path: str = _key("", "folder on a local SSD for cached KV that no longer fits in memory; it holds prompts' KV")
    disk_gib: float = _key(0.0, "size of each node's file in kv_pool.disk_path in GiB; 0: no disk tier", low=0.0)
    pinned_fraction: float = _key(
        0.25, "largest share of each shard that pinned prefixes may hold (alignedserve cache pin)", low=0.0, high=0.9
    )
    pinned_prompts: str = _key(
        "", "file of prompts' beginnings to pin at the start: JSON objects with text or messages, one a line"
    )
    copy_timeout_s: float = _key(
        10.0, "seconds after which a copy is stuck; its worker is fenced and replaced", low=0.1
    )


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    tensor_parallel: int = _key(0, "of prefill instances; 0: cluster.tensor_parallel", low=0, high=64)
    pipeline_parallel: int = _key(0, "of prefill instances; 0: cluster.pipeline_parallel", low=0, high=64)
    nodes: int = _key(1, "nodes over which the stages of a prefill instance are spread", low=1, high=64)
    token_budget: int = _key(
        0,
        f"maximum prompt tokens in one forward pass; 0: {CPU_PASS_TOKENS} on a CPU, {GPU_PASS_TOKENS} on a GPU",
        low=0,
        high=1 << 20,
    )
    max_requests: int = _key(256, "maximum requests in one forward pass", low=1, high=65536)
    cache_blocks: int = _key(0, "KV blocks of an instance's prefill cache; 0: from the model and free memory", low=0)
    batch_buffer_blocks: int = _key(0, "blocks of the candidate batch buffer; 0: from scheduler.max_batch_share", low=0)
    requests_buffer_blocks: int = _key(
        0, "blocks of the candidate request buffer; 0: room for at least the largest request, if memory allows", low=0
    )
    layerwise_tokens: int = _key(
        -1,
        "shortest prompt, in tokens, that is offloaded layer by layer; 0: never; -1: measured on a GPU, never on a CPU",
        low=-1,
    )
    queue_tokens: int = _key(0, f"maximum prompt tokens queued at an instance; 0: {QUEUED_TOKENS} or two passes", low=0)

    @property
    def pass_tokens(self) -> int:
        """`token_budget`, or the default of a CPU. `Config.on_device` sets the default of a GPU."""
        return self.token_budget or CPU_PASS_TOKENS

    @property
    def queued_tokens(self) -> int:
        return self.queue_tokens or max(QUEUED_TOKENS, 2 * self.pass_tokens)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    tensor_parallel: int = _key(0, "of decode instances; 0: cluster.tensor_parallel", low=0, high=64)
    pipeline_parallel: int = _key(0, "of decode instances; 0: cluster.pipeline_parallel", low=0, high=64)
    nodes: int = _key(1, "nodes over which the stages of a decode instance are spread", low=1, high=64)
    expert_parallel: int = _key(1, "ranks that share experts, each with requests of its own", low=1, high=64)
    placement: str = _key("shared-pool", "which of them computes a request (scheduler/ranks)", choices=PLACEMENT_NAMES)
    cache_blocks: int = _key(0, "KV blocks of an instance's decode cache; 0: from the model and free memory", low=0)
    max_running: int = _key(
        0,
        f"maximum requests in one iteration; 0: from the cache's size, {LEAST} to {MOST}, {LEAST} on a CPU",
        low=0,
        high=65536,
    )
    watermark_blocks: int = _key(0, "a request is evicted if fewer blocks are free; 0: one per running request", low=0)
    overlap: str = _key(
        "auto",
        "launch an iteration before the last one's tokens are known; auto: if the engine computes asynchronously",
        choices=("auto", "on", "off"),
    )
    graphs: str = _key("auto", "decode with CUDA graphs; auto: if attention can be captured", choices=("auto", "off"))
    graph_sizes: str = _key("", "batch sizes to capture, such as 1,8,64; empty: up to decode.max_running, at most 1024")
    join_iterations: int = _key(
        8, "a join requires free blocks for this many iterations of the whole batch (hysteresis)", low=1
    )

    background_slowdown: float = _key(
        0.05, "share by which requests with a priority from 1000000 on may lengthen iterations of others", low=0.01
    )

    def running(self, most: int) -> DecodeConfig:
        """With an automatic `max_running` decided."""
        return self if self.max_running else replace(self, max_running=most)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    policy: str = _key(
        "aligned", "how batches are formed: a name from `alignedserve policies`, or package.module:Class"
    )
    cost_model: str = _key("", "measured cost model: a shipped name, a file or a folder; empty: learned while serving")
    kernel_mode: str = _key(
        "split_kv",
        "how the cost model's attention kernel reads KV",
        choices=("split_kv", "no_split", "no_split_longest_first"),
    )
    block_bandwidth_gb_s: float = _key(
        0.0, "no_split: bandwidth of one thread block in GB/s; 0: the cost model's default", low=0.0
    )
    max_batch_share: float = _key(
        0.4, "K: maximum blocks of a batch, as a share of the decode cache", low=0.01, high=1.0
    )
    max_batch_blocks: int = _key(0, "K in blocks; 0: from max_batch_share", low=0)
    min_batch_requests: int = _key(36, "N: minimum requests of a candidate batch", low=1)
    max_prefix_tokens: int = _key(
        65536, "range of the quad-tree in tokens; longer prefixes count as this length", low=4
    )
    leaf_tokens: int = _key(16, "width of a leaf of the quad-tree in tokens", low=1)
    cut_sibling: bool = _key(True, "take the nearest lengths of a sibling if all of it would exceed K")
    flush_after_s: float = _key(
        0.0, "seconds that a busy instance with room waits for N requests before it takes fewer", low=0.0
    )
    routing: str = _key(
        "least-ttft",
        "prefill instance of a prompt: least predicted TTFT, least tokens ahead, random, longest cached prefix unless "
        "its instance is busy, Mooncake's Conductor",
        choices=("least-ttft", "least-loaded", "random", "prefix", "conductor"),
    )
    copy_threshold: float = _key(
        1.0,
        "conductor: a cached prefix more than this many times as long as the instance's own may be copied to it",
        low=1.0,
    )
    sharing: str = _key(
        "auto",
        "lengths among decode instances: ranges of equal cost, the nearest mean, or none; auto: as the policy wants",
        choices=("auto", "quantiles", "nearest", "none"),
    )
    balance_slack: float = _key(
        0.25,
        "an instance gets requests of its length while its load exceeds the least loaded one's by at most this share",
        low=0.0,
    )
    join_window: float = _key(
        0.25, "share by which a prefix length may differ from the running batch and still match it", low=0.0
    )
    waiting_rule: str = _key(
        "rounds",
        "policy aligned: overdue: earliest deadline first; paper: subtrees without a batch first; rounds: by length",
        choices=("overdue", "paper", "rounds"),
    )
    starvation_after_s: float = _key(
        5.0,
        "overdue: wait objective of requests that set none; paper: seconds without a batch until a subtree goes first",
        low=0.0,
    )
    late_share: float = _key(
        0.05,
        "share of late requests above which the starvation threshold is shortened; 1 disables the adjustment",
        low=0.0,
        high=1.0,
    )
    max_queue: int = _key(65536, "maximum requests that wait for prefill; further ones are refused", low=1)
    refuse_for_load: bool = _key(True, "refuse requests predicted to wait too long or miss an objective")
    ttft_objective_s: float = _key(0.0, "TTFT objective in seconds: refuse predicted misses; 0: no objective", low=0.0)
    tpot_objective_s: float = _key(
        0.0, "TPOT objective in seconds: refuse predicted misses, join only within it; 0: no objective", low=0.0
    )
    max_wait_s: float = _key(300.0, "refuse requests predicted to wait longer (s) for room in pool and batch", low=1.0)
    tick_s: float = _key(0.1, "seconds between the scheduler's periodic checks", low=0.001, high=60.0)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    host: str = _key("127.0.0.1", "address that HTTP listens on")
    port: int = _key(8000, "HTTP port", low=1, high=65535)
    grpc_port: int = _key(9000, "gRPC port", low=1, high=65535)
    live_port: int = _key(
        0,
        "separate port, with its own connection limit, for /live, /health and /metrics; 0: any free port",
        low=0,
        high=65535,
    )
    cache_isolation: str = _key(
        "none", "whose prompts share cached KV: none (all), key (those of one API key)", choices=("none", "key")
    )
    address_connections: int = _key(0, "maximum connections from one client address; 0: unlimited", low=0)
    address_requests: int = _key(0, "maximum requests per second from one client address; 0: unlimited", low=0)
    proxy: str = _key("haproxy", "the Ray Serve proxy in front of the gateways", choices=("haproxy", "python"))
    replicas: int = _key(1, "gateway replicas; with max_replicas: the minimum", low=1, high=256)
    max_replicas: int = _key(0, "maximum gateway replicas, scaled by load; 0: no autoscaling", low=0, high=256)
    replica_requests: int = _key(200, "with max_replicas: target open requests per gateway", low=1)
    max_body_mib: float = _key(4.0, "largest request body in MiB", low=0.001, high=1024.0)
    max_queue: int = _key(1024, "maximum open requests per gateway", low=1)
    max_prompts: int = _key(256, "maximum prompts in one completion call", low=1)
    route_prefix: str = _key("/", "URL path prefix of the application")
    api_key_file: str = _key("", "file with one API key per line, private to its owner; empty: no key needed")
    request_log: str = _key(
        "", "file for one JSON line per request: lengths, timestamps, hashes of blocks; empty: none"
    )
    metric_aliases: str = _key(
        "none", "also serve metrics under the names of other servers: none, vllm", choices=("none", "vllm")
    )
    dashboard: bool = _key(True, "serve the live page at / and /dashboard")
    drain_s: float = _key(25.0, "seconds that open requests get to finish when a gateway drains", low=0.0, high=3600.0)
    cors_origins: str = _key("", "web pages that may call, by origin, separated by commas; *: all; empty: none")
    cors_methods: str = _key("GET, POST", "HTTP methods that these pages may use")
    cors_headers: str = _key("*", "request headers that these pages may set, separated by commas; *: all")
    cors_credentials: bool = _key(False, "whether browsers may send cookies with these pages' requests")

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * (1 << 20))


@dataclass(frozen=True, slots=True)
class BatchesConfig:
    """Keys of `/v1/files`, `/v1/batches` and stored responses. Without a folder all are refused."""

    folder: str = _key("", "folder for files, batches and their answers, private to its owner; empty: no batches")
    shared: bool = _key(
        False, "the folder is on a file system that gateways of several nodes share; it needs POSIX locks"
    )
    max_file_mib: float = _key(1024.0, "largest uploaded file in MiB", low=0.001, high=1 << 20)
    max_lines: int = _key(1_000_000, "maximum lines in one batch", low=1, high=1 << 31)
    quota_gib: float = _key(16.0, "maximum size of all files of an API key in GiB, answers included", low=0.0)
    responses_gib: float = _key(
        1.0, "maximum size of an API key's stored responses in GiB; the oldest give way; 0: none is stored", low=0.0
    )
    retention_days: float = _key(30.0, "days after which files, ended batches and responses are deleted", low=0.0)
    lines_in_flight: int = _key(
        0, "maximum lines that a gateway answers at the same time; 0: half of gateway.max_queue", low=0
    )
    at_once: int = _key(4, "maximum batches that a gateway runs at the same time", low=1, high=256)
    lease_s: float = _key(15.0, "seconds after which the batch of a silent gateway goes to another", low=0.5)

    @property
    def max_file_bytes(self) -> int:
        return int(self.max_file_mib * (1 << 20))


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    heartbeat_s: float = _key(1.0, "seconds between heartbeats of a process", low=0.05, high=60.0)
    fence_after_s: float = _key(
        5.0, "seconds without a heartbeat after which a process is fenced and replaced", low=0.2
    )
    stall_after_s: float = _key(
        4.0, "seconds without progress after which a worker with work is fenced and replaced", low=0.2
    )
    start_timeout_s: float = _key(300.0, "maximum seconds for a process to start and load its model", low=1.0)
    orphan_after_s: float = _key(60.0, "seconds without contact to a supervisor after which a process exits", low=1.0)
    spares: int = _key(
        0, "warm spare processes; with one, a dead worker's successor starts without imports", low=0, high=64
    )
    fork_server: bool = _key(
        True,
        "start instances as forks of a process, one on each node, that has imported everything",
    )
    max_start_failures: int = _key(3, "failed starts of a process after which the cluster fails", low=1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    attention: str = _key(
        "auto",
        "the attention backend; auto: on a GPU the fastest that supports the model, measured at the start",
        choices=("auto", "torch", "triton", "triton_no_split", "flash_attn", "varlen"),
    )
    compile: str = _key(
        "auto",
        "torch.compile for norms, rotary embedding and activation; auto: with graphs, if faster, not in float32",
        choices=("auto", "off"),
    )
    grammar: str = _key(
        "llguidance",
        "the library behind structured output; xgrammar needs the extra of that name",
        choices=("llguidance", "xgrammar"),
    )
    grammar_max_kib: float = _key(1024.0, "largest grammar or JSON schema of a request in KiB", low=1.0, high=65536.0)
    grammar_compile_s: float = _key(
        3.0, "seconds after which a grammar that is still being compiled is refused", low=0.05, high=3600.0
    )


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """Where spans go is said by OpenTelemetry's standard variables."""

    enabled: bool = _key(False, "send OpenTelemetry traces; OTEL_EXPORTER_OTLP_ENDPOINT switches them on, too")
    sample: float = _key(
        1.0,
        "share of calls that are traced; a caller's traceparent and OTEL_TRACES_SAMPLER go first",
        low=0.0,
        high=1.0,
    )
    content: bool = _key(False, "put prompts and answers into traces")


@dataclass(frozen=True, slots=True)
class LogConfig:
    format: str = _key("text", "log format, one line per record", choices=("text", "json"))
    level: str = _key("info", "lowest severity that is logged", choices=("debug", "info", "warning", "error"))
    dir: str = _key("", "folder for one log file per process; empty: beside Ray's logs")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration. `alignedserve.config_sources.load` builds it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    kv_pool: KvPoolConfig = field(default_factory=KvPoolConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def degrees(self, role: str) -> Degrees:
        """Over how many ranks an instance of this role computes its model."""
        return self.spread(role).degrees

    def spread(self, role: str) -> Spread:
        """Over which nodes an instance of this role has them."""
        return Spread.configured(getattr(self, role), self.cluster)

    def __post_init__(self) -> None:
        for section in fields(self):
            value = getattr(self, section.name)
            for key in fields(value):
                check_value(f"{section.name}.{key.name}", getattr(value, key.name), key.metadata)
        self._check_prefix_cache()
        for role in ("prefill", "decode"):
            parse_resources(getattr(self.cluster, f"{role}_resources"), f"cluster.{role}_resources")
            self.spread(role).require(role)
        graph_sizes(self.decode.graph_sizes, self.decode.max_running or MOST)
        limits = self.supervisor
        if limits.fence_after_s < 2 * limits.heartbeat_s:
            raise ConfigError(
                f"supervisor.fence_after_s ({limits.fence_after_s:g}) must be at least twice supervisor.heartbeat_s "
                f"({limits.heartbeat_s:g}), or healthy processes would be fenced"
            )
        gateway = self.gateway
        if gateway.cors_credentials and "*" in gateway.cors_origins:
            raise ConfigError("gateway.cors_credentials needs origins by name in gateway.cors_origins, not *")
        if gateway.max_replicas and gateway.max_replicas < gateway.replicas:
            raise ConfigError(
                f"gateway.max_replicas ({gateway.max_replicas}) must be at least gateway.replicas "
                f"({gateway.replicas}), or 0 for no autoscaling"
            )
        if self.kv_pool.copy_timeout_s < 4 * limits.heartbeat_s:
            raise ConfigError(
                f"kv_pool.copy_timeout_s ({self.kv_pool.copy_timeout_s:g}) must be at least four times "
                f"supervisor.heartbeat_s ({limits.heartbeat_s:g}), the interval at which copies are checked"
            )

    def _check_prefix_cache(self) -> None:
        pool = self.kv_pool
        for key in ("pinned_prompts", "disk_gib"):
            if getattr(pool, key) and not pool.prefix_cache:
                raise ConfigError(f"kv_pool.{key} needs kv_pool.prefix_cache: without it nothing is cached")
        if pool.pinned_prompts and self.gateway.cache_isolation == "key":
            raise ConfigError(
                "kv_pool.pinned_prompts and gateway.cache_isolation: key exclude each other, because a file has no API "
                "key: pin with `alignedserve cache pin --api-key-file FILE`"
            )
        if self.gateway.cache_isolation == "key" and not self.gateway.api_key_file:
            raise ConfigError("gateway.cache_isolation: key needs gateway.api_key_file, where the keys are")
        if pool.disk_gib and not pool.disk_path:
            raise ConfigError("kv_pool.disk_gib needs kv_pool.disk_path, the folder of the file")
        if pool.disk_path and not pool.disk_gib:
            raise ConfigError("kv_pool.disk_path needs kv_pool.disk_gib, how much of the disk may be used")

    def on_device(self, device: str) -> Config:
        """The configuration with defaults that depend on `device` ("cpu" or "cuda") filled in."""
        if device == "cpu" or self.prefill.token_budget:
            return self
        return replace(self, prefill=replace(self.prefill, token_budget=GPU_PASS_TOKENS))

    @property
    def served_model_name(self) -> str:
        return self.model.served_name or self._folder_name

    @property
    def model_root(self) -> str:
        """A hub's name of the model; of a folder, only its own name."""
        path = self.model.path
        return self._folder_name if path.startswith(("/", ".", "~")) else path

    @property
    def _folder_name(self) -> str:
        name = self.model.path.rstrip("/").rsplit("/", 1)[-1]
        return Path(self.model.path).expanduser().resolve().name if name in ("", ".", "..", "~") else name


SECTIONS: dict[str, Callable[..., Any]] = {
    section.name: section.default_factory for section in fields(Config) if section.default_factory is not MISSING
}


def check_value(name: str, value: Any, metadata: Any) -> None:
    """Raises ConfigError if a value is outside its key's choices or limits."""
    if metadata["choices"] and value not in metadata["choices"]:
        raise ConfigError(f"{name} must be one of {', '.join(metadata['choices'])}; got {value!r}")
    low, high = metadata["low"], metadata["high"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not ((low is None or value >= low) and (high is None or value <= high)):
        limits = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise ConfigError(f"{name} must be {limits}; got {value}")
