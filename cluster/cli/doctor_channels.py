"""The channels in `alignedserve doctor`: which channel each pair of stores uses here, and how fast it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from alignedserve.cluster.launch.gpus import GpuLinks, count_gpus
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, PlannedRole, plan_roles
from alignedserve.config import ClusterConfig, Config
from alignedserve.errors import AlignedServeError
from alignedserve.ranks.degrees import Degrees, devices_in
from alignedserve.ranks.neighbours import NVLINK, Distance, apart, neighbours_together
from alignedserve.scheduler.core.pairing import pair_up
from alignedserve.transfer.links import ask_driver
from alignedserve.transfer.pair_choice import choose_pair_channel, cupy_missing
from alignedserve.transfer.topology import CUDA_IPC, GLOO, NCCL, ChannelChoice, PeerAccess, Place, link_rank

Row = dict[str, str]
HERE = "here"


def examine_channels(config: Config) -> tuple[list[Row], list[Row], list[str]]:
    """The planned processes, the channels between them, and the problems found.

    They are those of one prefill and one decode instance if this node has no GPUs for all: others may have them.
    """
    config = here(config)
    try:
        planned = {role.id: role for role in plan_roles(config, count_gpus())}
    except AlignedServeError:
        return [], [], []  # reported by another check
    roles = [{"role": role.role, "id": role.id, "device": role.device} for role in planned.values()]
    first = {role.id: devices_in(role.device)[0] for role in planned.values()}
    rows: list[Row] = []
    problems: list[str] = []
    reached: dict[tuple[str, str, str], tuple[str, str]] = {}

    def measured(channel: str, ours: str, theirs: str) -> tuple[str, str]:
        key = (channel, ours, theirs)
        if key not in reached:
            reached[key] = _measure(*key, problems)
        return reached[key]

    for source, destination, ours, theirs in _copies(config.cluster, planned):
        row = {"source": source, "destination": destination}
        try:
            choice = _choose(config.cluster, ours, theirs)
        except AlignedServeError as error:
            problems.append(error.message)
            rows.append({**row, "channel": "none", "GB/s": "", "GB/s back": "", "reason": error.message})
            continue
        found = measured(choice.name, first[ours.id], first[theirs.id])
        there, back = found if destination.startswith(f"{ours.id}/") else reversed(found)
        rows.append({**row, "channel": choice.name, "GB/s": there, "GB/s back": back, "reason": choice.reason})
    distance = _gpu_links()
    for role in planned.values():
        if role.role in MODEL_ROLES and (degrees := config.degrees(role.role)).ranks > 1:
            rows += _between_ranks(role, degrees, measured, distance)
    return roles, rows, problems


def here(config: Config) -> Config:
    """The configuration, or that of one pair if this node has no GPUs for all."""
    try:
        plan_roles(config, count_gpus())
    except AlignedServeError:
        return replace(config, cluster=replace(config.cluster, prefill=1, decode=1))
    return config


def _gpu_links() -> Distance | None:
    """None where NVML is missing."""
    try:
        return GpuLinks().distance
    except (OSError, AttributeError):
        return None


def _between_ranks(
    role: PlannedRole,
    degrees: Degrees,
    measured: Callable[[str, str, str], tuple[str, str]],
    distance: Distance | None,
) -> Iterator[Row]:
    """The links between devices of ranks that share layers or experts, and of stages that follow each other."""
    devices = devices_in(role.device)
    apart = "" if distance is None else _apart([name.partition(":")[2] for name in devices], degrees.tensor, distance)
    for rank, partner in _partners(degrees, len(devices)):
        first, other = devices[rank], devices[partner]
        to, why = f"its rank {partner} on {other}" if rank != partner else "its other ranks", f"it has {degrees}{apart}"
        channel, there, back = GLOO, "", ""
        if first == other:
            there, back = measured(channel, first, other)
        elif ask_driver(first, other):  # as NCCL reaches it within a node
            channel = CUDA_IPC
            there, back = measured(channel, first, other)
        else:
            channel, why = NCCL, f"{why}; the two cannot access each other's memory: NCCL takes another way"
        row = {"source": f"{role.id} rank {rank}", "destination": to, "channel": channel}
        yield {**row, "GB/s": there, "GB/s back": back, "reason": why}


def _partners(degrees: Degrees, devices: int) -> Iterator[tuple[int, int]]:
    """The first rank of each stage with its others and with the first of the next stage, as far as there are devices;
    (0, 0) if all share one."""
    if devices == 1:
        yield 0, 0
        return
    each = degrees.ranks // degrees.stages
    for first in range(0, devices, each):
        for other in range(first + 1, min(first + each, devices)):
            yield first, other
        if first + each < devices:
            yield first, first + each


def _apart(gpus: Sequence[str], tensor: int, distance: Distance) -> str:
    """What to say of tensor parallel ranks whose GPUs NVLink does not connect, although it connects others here."""
    ordered = neighbours_together(gpus, tensor, distance)
    missing = apart(ordered, min(tensor, len(ordered)), distance)
    everything = [str(number) for number in range(count_gpus())]
    joined = [pair for pair in combinations(everything, 2) if distance(*pair) == NVLINK]
    if not missing or not joined:
        return ""
    pairs = ", ".join(f"cuda:{one} and {other}" for one, other in missing)
    (one, other), *_ = joined
    return f"; NVLink does not connect {pairs}, which share layers, but others, such as cuda:{one} and {other}"


def check_pairs(config: Config) -> str:
    """Check `cluster.channel` before the start. Returns a warning if a slower channel is used, as allowed, else "".

    The driver is not asked. Raises ResourceError if a pair cannot use the configured channel.
    """
    planned = {role.id: role for role in plan_roles(config, count_gpus())}
    for _, _, ours, theirs in _copies(config.cluster, planned, reach=_reached):
        choice = _choose(config.cluster, ours, theirs, reach=_reached)
        if choice.slow:
            return f"warning: the channel is {choice.name}: {choice.reason}"
    return ""


def _reached(source: str, destination: str) -> bool:
    return True


def _copies(
    cluster: ClusterConfig, planned: dict[str, PlannedRole], reach: PeerAccess = ask_driver
) -> Iterator[tuple[str, str, PlannedRole, PlannedRole]]:
    """Of each copy: source, destination, the instance that copies, and the process that owns the other memory."""
    pool = planned["kv_pool-0"]
    for role in planned.values():
        if role.role == "prefill":
            yield f"{role.id}/cache", pool.id, role, pool
        elif role.role == "decode" and not cluster.prefetch:
            yield pool.id, f"{role.id}/cache", role, pool

    def rank(decode_id: str, prefill_id: str) -> int:
        return link_rank(_place(planned[decode_id]), _place(planned[prefill_id]), reach)

    for decode_id, prefill_id in pair_up(cluster.prefill, cluster.decode, rank) if cluster.prefetch else ():
        yield pool.id, f"{prefill_id}/buffers", planned[prefill_id], pool
        yield f"{prefill_id}/buffers", f"{decode_id}/cache", planned[decode_id], planned[prefill_id]


def _choose(
    cluster: ClusterConfig, ours: PlannedRole, theirs: PlannedRole, reach: PeerAccess = ask_driver
) -> ChannelChoice:
    """The channel between two processes. `cluster.channel` applies to pairs only. Raises ResourceError."""
    wanted = cluster.channel if theirs.role == "prefill" else "auto"
    places = (ours.id, _place(ours)), (theirs.id, _place(theirs))
    slow = cluster.allow_slow_channel
    return choose_pair_channel(wanted, *places, reach, no_nccl=cupy_missing(), allow_slow=slow)


def _place(role: PlannedRole) -> Place:
    return Place(HERE, devices_in(role.device)[0])


def _measure(channel: str, ours: str, theirs: str, problems: list[str]) -> tuple[str, str]:
    """GB/s of the channel to and from the copying instance. A channel that cannot be measured is a problem."""
    from alignedserve.transfer.paired.measure import measure_channel  # imports torch

    try:
        found = measure_channel(channel, ours, theirs)
    except (AlignedServeError, RuntimeError, OSError) as error:
        problems.append(f"channel {channel} between {ours} and {theirs} does not work: {error}")
        return "none", "none"
    return f"{found.to_ours / 1e9:.3g}", f"{found.from_ours / 1e9:.3g}"
