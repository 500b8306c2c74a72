"""Systems by name: the choices of `--policy`, in the cluster and in the simulator.

A disaggregated system is a batch-formation policy (`policies/`) with settings. A colocated system is an instance
scheduler (`colocated/`) whose passes mix prompts and decodes. Besides the names of `SYSTEMS` there are those that
installed packages register under the entry point group `alignedserve.policies`, and `package.module:Class`.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import importlib
import inspect
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AlignedServeError, ConfigError
from alignedserve.scheduler.colocated.base import InstanceScheduler
from alignedserve.scheduler.core.guarded_policy import Faults, GuardedPolicy, place_of
from alignedserve.scheduler.policies.aligned import AlignedPolicy
from alignedserve.scheduler.policies.base import BatchPolicy

ENTRY_POINTS = "alignedserve.policies"
FOLDER_VARIABLE = "ALIGNEDSERVE_POLICY_DIR"  # cwd of the command: the cluster's processes have another one
Option = float | int | bool | str


class Topology(enum.Enum):
    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class System:
    """`target` is `module:attribute`: a BatchPolicy, or an instance scheduler of a colocated system.

    `settings`: configuration keys that the system fixes, e.g. `{"cluster.prefetch": False}`. `options`: its own options
    with their defaults, which `--set NAME.KEY=VALUE` changes. `serves`: False: the simulator only.
    """

    name: str
    topology: Topology
    target: str
    summary: str
    settings: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    serves: bool = True


_POLICIES = "alignedserve.scheduler.policies"
_COLOCATED = "alignedserve.scheduler.colocated"
_NO_PREFETCH = {"cluster.prefetch": False}
UNBOUNDED_QUEUE = 1 << 30  # tokens queued at a prefill instance
CACHE_OPTIONS: Mapping[str, Option] = {"cache_answers": True, "cache_at_decode": False}
"""Of a simulated prefix cache: whether it keeps what was generated, and whether decode instances have one of their own,
so that only the blocks that they lack are sent to them."""
WAITING_RULES = {
    "overdue": "aligned:AlignedPolicy",
    "paper": "paper_rule:PaperRulePolicy",
    "rounds": "rounds:RoundsPolicy",
}
RULED = ("aligned", "aligned-no-prefetch")  # the policies that the waiting rule is for


def _disaggregated(name: str, target: str, summary: str, settings: Mapping[str, object] | None = None) -> System:
    return System(name, Topology.DISAGGREGATED, f"{_POLICIES}.{target}", summary, settings or {})


def _colocated(name: str, target: str, summary: str, **options: Option) -> System:
    return System(name, Topology.COLOCATED, f"{_COLOCATED}.{target}", summary, {}, options)


def _cached(name: str, routing: str, summary: str, answers: bool = True, at_decode: bool = False) -> System:
    """A system of separate prefill and decode instances in order of arrival, with a prefix cache on each node.

    Each prompt is bound to a prefill instance when it arrives. `answers`, `at_decode`: the options of `CACHE_OPTIONS`.
    """
    settings = {
        **_NO_PREFETCH,
        "kv_pool.prefix_cache": True,
        "prefill.queue_tokens": UNBOUNDED_QUEUE,
        "scheduler.routing": routing,
    }
    options: dict[str, Option] = {"cache_answers": answers, "cache_at_decode": at_decode}
    return System(name, Topology.DISAGGREGATED, f"{_POLICIES}.fcfs:FcfsPolicy", summary, settings, options, False)


SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (
        _disaggregated("aligned", "aligned:AlignedPolicy", "candidate batches of similar lengths"),
        _disaggregated(
            "aligned-cost",
            "aligned_cost:AlignedCostPolicy",
            "the candidate batch with the most predicted tokens/s",
        ),
        _disaggregated("fcfs", "fcfs:FcfsPolicy", "first come, first served, as DistServe's decode stage"),
        _disaggregated(
            "aligned-no-prefetch", "aligned:AlignedPolicy", "aligned, joining directly from the pool", _NO_PREFETCH
        ),
        _disaggregated(
            "aligned-no-prefetch-fcfs", "fcfs:FcfsPolicy", "fcfs, joining directly from the pool", _NO_PREFETCH
        ),
        _disaggregated("oracle", "oracle:OraclePolicy", "knows output lengths, fewest tokens left first"),
        System(
            "memserve-basic",
            Topology.DISAGGREGATED,
            f"{_POLICIES}.fcfs:FcfsPolicy",
            "MemServe's PD-Basic: separate prefill and decode without a prefix cache, the least load",
            {
                **_NO_PREFETCH,
                "kv_pool.prefix_cache": False,
                "prefill.queue_tokens": UNBOUNDED_QUEUE,
                "scheduler.routing": "least-loaded",
            },
            serves=False,
        ),
        _cached("memserve-1", "prefix", "MemServe's PD-Caching-1: prefill instances keep prompts' KV", answers=False),
        _cached(
            "memserve-2",
            "prefix",
            "MemServe's PD-Caching-2: decode instances keep KV too, and only what they lack is sent",
            answers=False,
            at_decode=True,
        ),
        _cached(
            "memserve-3",
            "prefix",
            "MemServe's PD-Caching-3: and what was generated is sent back to where the prompt's KV is kept",
            at_decode=True,
        ),
        _cached("mooncake", "conductor", "Mooncake: the least TTFT, with prefixes copied between nodes"),
        _cached("mooncake-least-loaded", "least-loaded", "Mooncake's baseline: the fewest tokens ahead"),
        _cached("mooncake-random", "random", "Mooncake's baseline: any prefill instance"),
        _colocated(
            "vllm",
            "vllm:VllmScheduler",
            "vLLM: running requests first, then chunked prompts; the latest is preempted and recomputed",
            # `EngineArgs.get_batch_defaults` of vLLM: of its server on a GPU with less than 70 GiB, or an A100
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            async_scheduling=True,
            reserve_full_isl=True,
            prefix_caching=True,
            prefix_hit_share=0.0,
        ),
        _colocated(
            "sarathi",
            "sarathi:SarathiScheduler",
            "Sarathi-Serve: decodes never stall, prompt chunks fill the token budget",
            max_num_seqs=128,
            token_budget=512,
            watermark=0.01,
            dynamic=False,
            chunk_high=2048,
            chunk_low=512,
            chunk_steps=4,
            chunk_tokens=8192,
        ),
        _colocated(
            "fastgen",
            "fastgen:FastGenScheduler",
            "DeepSpeed-FastGen: Dynamic SplitFuse, fills every pass up to the token budget",
            max_num_seqs=256,
            token_budget=768,
        ),
        _colocated(
            "batchllm",
            "batchllm:BatchLlmScheduler",
            "BatchLLM: groups of prompts that share a prefix, of a file that is known beforehand, as many as fit",
            token_budget=2048,
            memory_share=0.95,
        ),
        _colocated(
            "orca",
            "orca:OrcaScheduler",
            "ORCA: iteration-level scheduling, whole prompts, reserves room for the longest answer",
            max_batch=128,
            n_workers=1,
        ),
        _colocated(
            "static",
            "static:StaticScheduler",
            "static batching: a batch is fixed until its last request has ended",
            max_batch=128,
        ),
    )
}

_OTHER_NAMES = {"memserve": "memserve-3"}  # all of the paper's steps


def resolve(name: str) -> System:
    """The system called `name`: built in, `package.module:Class`, or an entry point.

    Raises ConfigError, listing the choices, if there is none, and if the target is not a policy.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    if name in _OTHER_NAMES:
        return replace(SYSTEMS[_OTHER_NAMES[name]], name=name)
    if ":" in name:
        return _system_of(name, name)
    registered = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    if name in registered:
        return _system_of(name, registered[name])
    choices = [*SYSTEMS, *sorted(registered.keys() - SYSTEMS.keys())]
    nearest = "".join(f"the nearest is {near}; " for near in difflib.get_close_matches(name, choices, n=1))
    raise ConfigError(f"unknown policy {name!r}; {nearest}choose one of: {', '.join(choices)}; or package.module:Class")


def policy_class(system: System) -> type[BatchPolicy]:
    """The batch-formation policy of a disaggregated system. Raises ConfigError if it has none."""
    if system.topology is Topology.COLOCATED:
        raise ConfigError(f"policy {system.name!r} is a colocated system: for now it runs in the simulator only")
    target = _imported(system.name, system.target)
    if not issubclass(target, BatchPolicy):
        raise ConfigError(f"policy {system.name!r}: {system.target} is not a BatchPolicy")
    return target


def configured_policy(config: SchedulerConfig) -> type[BatchPolicy]:
    """The class of the configured batch-formation policy. Raises ConfigError."""
    system = resolve(config.policy)
    if system.name in RULED:
        system = replace(system, target=f"{_POLICIES}.{WAITING_RULES[config.waiting_rule]}")
    return policy_class(system)


def default_objective_s(config: SchedulerConfig) -> float:
    """The wait objective of requests that set none: infinite if the policy itself bounds waits. Raises ConfigError.

    Decode instances get it from the scheduler, because not every process can import a user-defined policy.
    """
    return config.starvation_after_s if configured_policy(config).OVERDUE else math.inf


def sharing_of(config: SchedulerConfig) -> str:
    """`scheduler.sharing` with `auto` decided by the policy. Raises ConfigError."""
    if config.sharing != "auto":
        return config.sharing
    return "quantiles" if configured_policy(config).BY_LENGTH else "none"


def unread(config: SchedulerConfig, decode_instances: int | None = None) -> dict[str, str]:
    """Keys `scheduler.KEY` that have no effect as configured, each with what reads it. Raises ConfigError.

    A user-defined policy gets all keys; only those are known that it decides by being another policy, or that belong to
    sharing. `decode_instances`: their number, where it is fixed.
    """
    kind, ruled = configured_policy(config), config.policy in RULED
    found = {}
    if not ruled:
        found["scheduler.waiting_rule"] = f"the policies {' and '.join(RULED)} read it"
    if decode_instances == 1:
        found |= dict.fromkeys(("scheduler.sharing", "scheduler.balance_slack"), "several decode instances read it")
    elif sharing_of(config) == "none":
        found["scheduler.balance_slack"] = "scheduler.sharing quantiles or nearest read it"
    if config.routing != "conductor":
        found["scheduler.copy_threshold"] = "scheduler.routing conductor reads it"
    if config.policy not in SYSTEMS:
        return found
    if not (kind.OVERDUE or (ruled and config.waiting_rule == "paper")):
        found["scheduler.starvation_after_s"] = "scheduler.waiting_rule overdue or paper, and aligned-cost, read it"
    if not issubclass(kind, AlignedPolicy):
        of_the_tree = dict.fromkeys(("max_prefix_tokens", "leaf_tokens", "cut_sibling"), "aligned policies read it")
        found |= {f"scheduler.{key}": reader for key, reader in of_the_tree.items()}
    return found


def make_policy(config: SchedulerConfig, faults: Faults | None = None) -> BatchPolicy:
    """The configured batch-formation policy; a user-defined one is guarded. Raises ConfigError.

    `faults`: where those of a user-defined one are counted; None: in a record of its own.
    """
    system = resolve(config.policy)
    kind = configured_policy(config)
    return kind(config) if system.name in SYSTEMS else GuardedPolicy(config, system.name, kind, faults)


def decides(policy: BatchPolicy) -> str:
    """`package.module:Class` of the policy that forms batches, guarded or not."""
    kind = type(policy.inner if isinstance(policy, GuardedPolicy) else policy)
    return f"{kind.__module__}:{kind.__qualname__}"


def served_settings(name: str) -> Mapping[str, object]:
    """The configuration keys that a policy of the cluster fixes. Raises ConfigError if it cannot serve."""
    system = resolve(name)
    if policy_class(system).NEEDS_OUTPUT_LENGTHS:
        raise ConfigError(f"policy {name!r} needs output lengths: it runs in the simulator only")
    if not system.serves:
        raise ConfigError(f"policy {name!r} runs in the simulator only; a cluster has its routing: scheduler.routing")
    return system.settings


def listed() -> list[System]:
    """All named systems: built in, then of installed packages.

    Packages that cannot be imported are skipped with a warning.
    """
    found = dict(SYSTEMS)
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        if point.name not in found:
            try:
                found[point.name] = _system_of(point.name, point.value)
            except ConfigError as error:
                print(f"warning: {error.message}", file=sys.stderr)
    return list(found.values())


def scheduler_class(system: System) -> type[InstanceScheduler]:
    """The instance scheduler of a colocated system. Raises ConfigError if it has none."""
    target = _imported(system.name, system.target)
    if not issubclass(target, InstanceScheduler):
        raise ConfigError(f"policy {system.name!r} is a disaggregated system, not a colocated one")
    return target


@contextlib.contextmanager
def faults_named(system: System) -> Iterator[None]:
    """Turn errors of a user-defined system into a ConfigError with their location; others pass unchanged."""
    try:
        yield
    except Exception as error:
        if system.name in SYSTEMS or isinstance(error, ConfigError):
            raise
        said = error.message if isinstance(error, AlignedServeError) else repr(error)
        raise ConfigError(f"policy {system.name!r}: {said}{place_of(error)}") from error


def with_options(system: System, changes: Mapping[str, Option], besides: Collection[str] = ()) -> dict[str, Option]:
    """The system's options with these changes. Raises ConfigError for an unknown name or a value of another type.

    `besides`: other names that the caller accepts, to list among the choices.
    """
    options = dict(system.options)
    for key, value in changes.items():
        if key not in options:
            known = ", ".join([*options, *besides]) or "none"
            raise ConfigError(f"policy {system.name!r} has no option {key!r}; it has: {known}")
        options[key] = _as_typed(f"{system.name}.{key}", value, options[key])
    return options


def _as_typed(name: str, value: Option, default: Option) -> Option:
    """`value` in the type of `default`; an int is accepted as a float, and text is parsed."""
    kind = type(default)
    if isinstance(value, str) and kind is not str:
        words: dict[str, Option] = {"true": True, "false": False}
        with contextlib.suppress(KeyError, ValueError):
            value = words[value.lower()] if kind is bool else kind(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{name} must be of type {kind.__name__}{', finite' * (kind is float)}, not {value!r}")
    return value


def _system_of(name: str, target: str) -> System:
    found = _imported(name, target)
    # Its own docstring, not an inherited one
    summary = (found.__doc__ or "").strip().partition("\n")[0] or "no description"
    if issubclass(found, BatchPolicy):
        return System(name, Topology.DISAGGREGATED, target, summary)
    return System(name, Topology.COLOCATED, target, summary, {}, dict(found.OPTIONS))


def _imported(name: str, target: str) -> type[BatchPolicy] | type[InstanceScheduler]:
    module, _, attribute = target.partition(":")
    if module.startswith("."):
        raise ConfigError(f"policy {name!r}: {target} is relative; name it as package.module:Class")
    folder = os.environ.get(FOLDER_VARIABLE) or os.getcwd()
    if folder not in sys.path:  # a policy in the folder of the command that names it
        sys.path.append(folder)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs user code
        raise ConfigError(f"policy {name!r}: {target} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, BatchPolicy | InstanceScheduler)):
        raise ConfigError(f"policy {name!r}: {target} is neither a BatchPolicy nor an InstanceScheduler")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"policy {name!r}: {target} does not implement {missing}")
    return found
