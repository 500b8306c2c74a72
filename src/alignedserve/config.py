"""The configuration: frozen sections, one line of doc a key, composed, validated when built.

Later sources win: defaults, a YAML file, `ALIGNEDSERVE_SECTION__KEY` in the environment, command-line flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from alignedserve.errors import ConfigError
from alignedserve.graph_sizes import graph_sizes
from alignedserve.resources import parse_resources

CPU_PASS_TOKENS = 512
GPU_PASS_TOKENS = 8192  # fewer leave a large GPU waiting for launches and for weights
QUEUED_TOKENS = 8192


def _key(
    default: Any, doc: str, *, choices: tuple[str, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    """A configuration key with its documentation and its limits."""
    return field(default=default, metadata={"doc": doc, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    path: str = _key("tiny", "the model: 'tiny' (ships with the package), a local folder, or ORG/NAME on a hub")
    served_name: str = _key("", "the name that clients use; empty: the last part of model.path")
    dtype: str = _key(
        "auto",
        "weights and KV; auto: float32 on a CPU, the checkpoint's on a GPU",
        choices=("auto", "bfloat16", "float32", "float16"),
    )
    trust_remote_code: bool = _key(False, "run Python code that comes with the model")
    chat_template: str = _key("", "a file with a Jinja chat template, instead of the model's own")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    prefill: int = _key(1, "prefill instances", low=1, high=1024)
    decode: int = _key(1, "decode instances", low=1, high=1024)
    device: str = _key("auto", "where instances run; auto: cuda where there is a GPU", choices=("auto", "cpu", "cuda"))
    share_gpu: bool = _key(False, "let several instances share one GPU")
    gpu_memory_share: float = _key(0.9, "share of a GPU's memory that its instances use", low=0.05, high=1.0)
    prefetch: bool = _key(True, "prefetch candidate batches through the buffers of prefill instances")
    channel: str = _key(
        "auto",
        "what copies between paired instances; auto: the best there is",
        choices=("auto", "shared-memory", "cuda-ipc", "nccl", "gloo"),
    )
    allow_slow_channel: bool = _key(False, "start even where a faster channel was configured than there is")
    placement: str = _key(
        "auto",
        "pairs share a node, or instances spread; auto: pairs on GPUs, unless roles ask for resources of their own",
        choices=("auto", "pairs", "spread"),
    )
    prefill_resources: str = _key(
        "", "Ray resources that each prefill instance takes of its node: prefill_node=1,x=0.5"
    )
    decode_resources: str = _key("", "Ray resources that each decode instance takes of its node: decode_node=1")
    name: str = _key("default", "the application's name in Ray: two in one Ray cluster need different ones")
    threads: int = _key(0, "CPU threads of one model-holding worker; 0: all cores", low=0, high=1024)


@dataclass(frozen=True, slots=True)
class KvPoolConfig:
    size_gib: float = _key(0.0, "host memory of the pool on each node in GiB; 0: a quarter of what is free", low=0.0)
    block_size: int = _key(16, "tokens in a block, the same in every store", low=1, high=1024)
    growth_reserve: float = _key(0.05, "share of the pool kept for the growth of running requests", low=0.0, high=0.9)
    verify: bool = _key(False, "compare a checksum of every KV block after each copy; what differs is never used")
    copy_timeout_s: float = _key(10.0, "a copy that takes so long is stuck: its worker is ended and replaced", low=0.1)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    token_budget: int = _key(
        0,
        f"most prompt tokens that one forward pass computes; 0: {CPU_PASS_TOKENS} on a CPU, {GPU_PASS_TOKENS} on a GPU",
        low=0,
        high=1 << 20,
    )
    max_requests: int = _key(256, "most requests in one forward pass", low=1, high=65536)
    cache_blocks: int = _key(0, "KV blocks of an instance's own cache; 0: from the model and free memory", low=0)
    batch_buffer_blocks: int = _key(0, "blocks of the candidate batch buffer; 0: as decode.max_batch_share", low=0)
    requests_buffer_blocks: int = _key(
        0, "blocks of the candidate requests buffer; 0: the largest request and more", low=0
    )
    layerwise_tokens: int = _key(
        -1,
        "prompts of so many tokens go to the pool layer by layer; 0: none, -1: as measured on a GPU, none on a CPU",
        low=-1,
    )
    queue_tokens: int = _key(
        0, f"prompt tokens handed to an instance ahead of its computing; 0: {QUEUED_TOKENS}, or two passes", low=0
    )

    @property
    def pass_tokens(self) -> int:
        """`token_budget`, or a CPU's; a GPU's is there once `Config.on_device` put it."""
        return self.token_budget or CPU_PASS_TOKENS

    @property
    def queued_tokens(self) -> int:
        return self.queue_tokens or max(QUEUED_TOKENS, 2 * self.pass_tokens)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    cache_blocks: int = _key(0, "KV blocks of an instance's cache; 0: from the model and free memory", low=0)
    max_running: int = _key(256, "most requests in one iteration", low=1, high=65536)
    watermark_blocks: int = _key(0, "free blocks under which a request is evicted; 0: one a running request", low=0)
    overlap: str = _key(
        "auto",
        "launch an iteration before the tokens of the last are known; auto: where the engine computes meanwhile",
        choices=("auto", "on", "off"),
    )
    graphs: str = _key(
        "auto", "decode from CUDA graphs; auto: where attention can be captured", choices=("auto", "off")
    )
    graph_sizes: str = _key("", "batch sizes that are captured, such as 1,8,64; empty: up to decode.max_running")
    join_iterations: int = _key(8, "a join wants room for so many iterations of the batch (hysteresis)", low=1)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    policy: str = _key("aligned", "how batches are formed: a name (`alignedserve policies`) or package.module:Class")
    cost_model: str = _key("", "a measured step cost: a name that ships, a file or a folder; empty: learnt as it goes")
    kernel_mode: str = _key("split_kv", "how the cost model's attention kernel reads", choices=("split_kv", "no_split"))
    block_bandwidth_gb_s: float = _key(
        0.0, "no_split: what one thread block reads, in GB/s; 0: the cost model's default", low=0.0
    )
    max_batch_share: float = _key(0.4, "K: most blocks of a batch, as a share of the decode cache", low=0.01, high=1.0)
    max_batch_blocks: int = _key(0, "K in blocks; 0: max_batch_share", low=0)
    min_batch_requests: int = _key(36, "N: fewest requests of a candidate batch", low=1)
    max_prefix_tokens: int = _key(65536, "range of the quad-tree; longer prefixes count as this", low=4)
    leaf_tokens: int = _key(16, "width of a leaf of the quad-tree in tokens", low=1)
    cut_sibling: bool = _key(True, "take part of a sibling, nearest lengths first, where all of it would pass K")
    flush_after_s: float = _key(
        0.0, "a busy instance with room waits so long for a batch of N before it takes less", low=0.0
    )
    balance_slack: float = _key(
        0.25,
        "of several instances the one of like lengths is taken, if its iterations are at most so much longer",
        low=0.0,
    )
    join_window: float = _key(0.25, "a length matches the running batch within this share of it", low=0.0)
    starvation_after_s: float = _key(
        5.0, "a request without an objective of its own that waited so long goes before density", low=0.0
    )
    late_share: float = _key(
        0.05, "where more of the requests wait past their objective, they go first sooner; 1: never", low=0.0, high=1.0
    )
    max_queue: int = _key(65536, "most requests that wait for prefill; more are refused", low=1)
    refuse_for_load: bool = _key(True, "refuse what would wait too long or miss an objective; else it waits")
    ttft_objective_s: float = _key(0.0, "refuse what would get its first token later; 0: no objective", low=0.0)
    tpot_objective_s: float = _key(
        0.0, "refuse what would take longer a further token, and what aligned-cost keeps to; 0: none", low=0.0
    )
    max_wait_s: float = _key(300.0, "refuse what would wait longer for room in pool and batch", low=1.0)
    tick_s: float = _key(0.1, "how often time alone makes the scheduler look again", low=0.001, high=60.0)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    host: str = _key("127.0.0.1", "address that HTTP listens on")
    port: int = _key(8000, "HTTP port", low=1, high=65535)
    grpc_port: int = _key(9000, "gRPC port", low=1, high=65535)
    live_port: int = _key(
        0, "port for /live, /health and /metrics alone, which clients cannot fill; 0: any free one", low=0, high=65535
    )
    address_connections: int = _key(0, "most connections of one client address; 0: any number", low=0)
    address_requests: int = _key(0, "most requests of one client address in a second; 0: any number", low=0)
    proxy: str = _key("haproxy", "which of Ray Serve's proxies is in front", choices=("haproxy", "python"))
    replicas: int = _key(1, "gateway replicas; with max_replicas: the fewest", low=1, high=256)
    max_replicas: int = _key(0, "Ray Serve has up to so many gateways, by load; 0: always as many", low=0, high=256)
    replica_requests: int = _key(200, "with max_replicas: open requests that a gateway is to have", low=1)
    max_body_mib: float = _key(4.0, "largest request body in MiB", low=0.001, high=1024.0)
    max_queue: int = _key(1024, "most requests that a replica holds at once", low=1)
    max_prompts: int = _key(256, "most prompts in one completion request", low=1)
    route_prefix: str = _key("/", "path below which the application answers")
    api_key_file: str = _key("", "a file with one API key a line, closed to other users; empty: anybody may ask")
    request_log: str = _key("", "a file for one JSON line a request: lengths and time stamps, no text; empty: none")
    drain_s: float = _key(25.0, "at the end open requests have so long; new ones are refused", low=0.0, high=3600.0)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * (1 << 20))


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    heartbeat_s: float = _key(1.0, "every role reports this often", low=0.05, high=60.0)
    fence_after_s: float = _key(5.0, "a role that was not heard of for so long is ended and replaced", low=0.2)
    stall_after_s: float = _key(
        4.0, "a worker that has work and comes no further with it for so long is ended and replaced", low=0.2
    )
    start_timeout_s: float = _key(300.0, "a role has so long to load its model", low=1.0)
    orphan_after_s: float = _key(60.0, "a role that heard of no supervisor for so long ends itself", low=1.0)
    spares: int = _key(
        0, "warm processes that wait for a role: a dead worker's successor imports nothing", low=0, high=64
    )
    max_start_failures: int = _key(3, "the cluster fails after a role failed to start so often", low=1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    attention: str = _key(
        "auto",
        "the attention kernels; auto: on a GPU the fastest of those that serve the model, by measurement at start",
        choices=("auto", "torch", "triton", "triton_no_split", "flash_attn", "varlen"),
    )
    compile: str = _key(
        "auto",
        "norms, rotary embedding, activation by torch.compile; auto: in graphs, each that is faster, not in float32",
        choices=("auto", "off"),
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    format: str = _key("text", "one line a record", choices=("text", "json"))
    level: str = _key("info", "least severe record written", choices=("debug", "info", "warning", "error"))
    dir: str = _key("", "folder for one log file a role; empty: beside Ray's logs")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be configured. Built by `alignedserve.config_sources.load`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    kv_pool: KvPoolConfig = field(default_factory=KvPoolConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for section in fields(self):
            value = getattr(self, section.name)
            for key in fields(value):
                check_value(f"{section.name}.{key.name}", getattr(value, key.name), key.metadata)
        for role in ("prefill", "decode"):
            parse_resources(getattr(self.cluster, f"{role}_resources"), f"cluster.{role}_resources")
        graph_sizes(self.decode.graph_sizes, self.decode.max_running)
        limits = self.supervisor
        if limits.fence_after_s < 2 * limits.heartbeat_s:
            raise ConfigError(
                f"supervisor.fence_after_s ({limits.fence_after_s:g}) must be at least twice supervisor.heartbeat_s "
                f"({limits.heartbeat_s:g}): healthy roles would be ended otherwise"
            )

        gateway = self.gateway
        if gateway.max_replicas and gateway.max_replicas < gateway.replicas:
            raise ConfigError(
                f"gateway.max_replicas ({gateway.max_replicas}) must be at least gateway.replicas "
                f"({gateway.replicas}), or 0: no autoscaling"
            )

        if self.kv_pool.copy_timeout_s < 4 * limits.heartbeat_s:
            raise ConfigError(
                f"kv_pool.copy_timeout_s ({self.kv_pool.copy_timeout_s:g}) must be at least four times "
                f"supervisor.heartbeat_s ({limits.heartbeat_s:g}), with which copies are looked after"
            )

    def on_device(self, device: str) -> Config:
        """With what was left to be chosen by where instances run, "cpu" or "cuda"."""
        if device == "cpu" or self.prefill.token_budget:
            return self
        return replace(self, prefill=replace(self.prefill, token_budget=GPU_PASS_TOKENS))

    @property
    def served_model_name(self) -> str:
        name = self.model.path.rstrip("/").rsplit("/", 1)[-1]
        if name in ("", ".", "..", "~"):
            name = Path(self.model.path).expanduser().resolve().name
        return self.model.served_name or name


SECTIONS: dict[str, Callable[..., Any]] = {
    section.name: section.default_factory for section in fields(Config) if section.default_factory is not MISSING
}


def check_value(name: str, value: Any, metadata: Any) -> None:
    """Raises ConfigError where a value is outside its key's choices or limits."""
    if metadata["choices"] and value not in metadata["choices"]:
        raise ConfigError(f"{name} must be one of {', '.join(metadata['choices'])}; got {value!r}")
    low, high = metadata["low"], metadata["high"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not ((low is None or value >= low) and (high is None or value <= high)):
        limits = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise ConfigError(f"{name} must be {limits}; got {value}")
