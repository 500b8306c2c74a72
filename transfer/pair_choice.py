"""Chooses the channel for a prefill-decode pair: the one in `cluster.channel`, or by the places of the two."""

from __future__ import annotations

import importlib.util
import os

from alignedserve.errors import ResourceError
from alignedserve.transfer.topology import (
    CUDA_IPC,
    CUDA_STAGED,
    GLOO,
    NCCL,
    NIXL,
    PCIE,
    SHARED_MEMORY,
    ChannelChoice,
    PeerAccess,
    Place,
    channel_between,
)

AUTO = "auto"
PAIRED = (NCCL, GLOO, NIXL)
"""Channels that both processes take part in."""
MULTI_RANK_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
NIXL_PACKAGES = ("nixl_cu13", "nixl_cu12")
INSTALL_NCCL = "pip install 'alignedserve[gpu-cu13]', or 'alignedserve[gpu-cu12]' for CUDA 12"
INSTALL_NIXL = "pip install 'alignedserve[nixl-cu13]', or 'alignedserve[nixl-cu12]' for CUDA 12"
_DIRECT = {
    SHARED_MEMORY: "both in host memory of this node",
    PCIE: "between host memory and a GPU of this node",
    CUDA_IPC: "GPU memory that both can access",
}


def choose_pair_channel(
    wanted: str,
    ours: tuple[str, Place],
    theirs: tuple[str, Place],
    peer_access: PeerAccess,
    *,
    no_nccl: str = "",
    allow_slow: bool = False,
) -> ChannelChoice:
    """The channel between two instances, each `(id, place)`.

    `no_nccl`: why one of them cannot use NCCL, as far as is known. Raises ResourceError, with the cause and the remedy,
    if the wanted channel is not possible and `allow_slow` does not permit the next best.
    """
    pair = f"{ours[0]} ({_describe(ours[1])}) and {theirs[0]} ({_describe(theirs[1])})"
    places = ours[1], theirs[1]
    if wanted == AUTO:
        return _best(pair, *places, peer_access, no_nccl, allow_slow=allow_slow)
    problem = _problem(wanted, *places, peer_access, no_nccl)
    if not problem:
        return ChannelChoice(wanted, f"cluster.channel is {wanted!r}")
    why = f"cluster.channel is {wanted!r}, which {pair} cannot use: {problem}"
    if not allow_slow:
        raise ResourceError(
            f"{why}. Fix that, choose another channel, or set cluster.allow_slow_channel: true to use the next best"
        )
    best = _best(pair, *places, peer_access, no_nccl, allow_slow=True)
    return ChannelChoice(best.name, f"{why}; the next best is allowed", slow=True)


def require_packages(wanted: str, no_nccl: str, *, allow_slow: bool) -> None:
    """Raises ResourceError if the configured channel needs packages that this process lacks.

    NIXL has no next best: the shards of other nodes are read over it, too.
    """
    if wanted == NIXL and (missing := nixl_missing()):
        raise ResourceError(f"cluster.channel is 'nixl', but {missing}. Every node needs it; or choose another channel")
    if wanted == NCCL and no_nccl and not allow_slow:
        raise ResourceError(
            f"cluster.channel is 'nccl', but {no_nccl}. Fix that, choose another channel, or set "
            "cluster.allow_slow_channel: true to use the next best"
        )


def cupy_missing() -> str:
    """Why NCCL is impossible here, without importing anything; "": it may be possible."""
    return "" if importlib.util.find_spec("cupy") else f"cupy is not installed: {INSTALL_NCCL}"


def nixl_missing() -> str:
    """Why NIXL is impossible here, without importing anything; "": it may be possible."""
    if any(map(importlib.util.find_spec, NIXL_PACKAGES)):
        return ""
    return f"NIXL is not installed: {INSTALL_NIXL}"


def _best(
    pair: str, first: Place, second: Place, peer_access: PeerAccess, no_nccl: str, *, allow_slow: bool
) -> ChannelChoice:
    kind = channel_between(first, second, peer_access)
    if kind is None:
        nodes = f"nodes {first.node_id} and {second.node_id}"
        problem = _problem(NCCL, first, second, peer_access, no_nccl)
        return ChannelChoice(GLOO, f"{nodes}; no NCCL: {problem}") if problem else ChannelChoice(NCCL, nodes)
    if kind != CUDA_STAGED:
        return ChannelChoice(kind, _DIRECT[kind])
    if not allow_slow:
        raise ResourceError(
            f"{pair} cannot access each other's memory (no NVLink or peer-to-peer access): set cluster.channel: nccl, "
            "or cluster.allow_slow_channel: true to copy through host memory"
        )
    return ChannelChoice(kind, "through host memory, as allowed", slow=True)


def _problem(wanted: str, first: Place, second: Place, peer_access: PeerAccess, no_nccl: str) -> str:
    """Why two places cannot have the channel; "" if they can."""
    if wanted in (GLOO, NIXL):  # instances without NIXL do not start (`require_packages`)
        return ""
    same_node = first.node_id == second.node_id
    if wanted != NCCL and not same_node:
        return f"they are on different nodes ({first.node_id}, {second.node_id})"
    if wanted == SHARED_MEMORY:
        return "KV is in the memory of a GPU" if first.on_device or second.on_device else ""
    if not (first.on_device and second.on_device):
        return "KV is in host memory"
    if wanted == CUDA_IPC:
        reached = channel_between(first, second, peer_access) == CUDA_IPC
        return "" if reached else "the GPUs cannot access each other's memory (no NVLink or peer-to-peer access)"
    if same_node and first.device == second.device and os.environ.get(MULTI_RANK_VARIABLE) != "1":
        return f"both are on {first.device}, which NCCL rejects unless {MULTI_RANK_VARIABLE}=1 is set for all processes"
    return no_nccl


def _describe(place: Place) -> str:
    return f"{place.device} of node {place.node_id}"
