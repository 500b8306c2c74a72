"""Places of memory, and the channel between two places, derived from the places alone without measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SHARED_MEMORY = "shared-memory"
PCIE = "pcie"
CUDA_IPC = "cuda-ipc"
CUDA_STAGED = "cuda-staged"
NCCL = "nccl"
GLOO = "gloo"
NIXL = "nixl"

PeerAccess = Callable[[str, str], bool]
"""Whether the first device can read the second's memory directly (NVLink, or PCIe peer to peer)."""

# By the number of copies over the bus to the host: none, one, two; between nodes, by the best possible channel.
_RANKS = {CUDA_IPC: 0, SHARED_MEMORY: 0, PCIE: 1, CUDA_STAGED: 2, NCCL: 3, GLOO: 4}


@dataclass(frozen=True, slots=True)
class Place:
    """Memory of a node: its host's ("cpu") or a device's ("cuda:N")."""

    node_id: str
    device: str = "cpu"

    @property
    def on_device(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True, slots=True)
class ChannelChoice:
    """`name` of the channel for a pair, and the reason, for `alignedserve doctor` and the log."""

    name: str
    reason: str
    slow: bool = False


def shard_channel(wanted: str) -> str:
    """The channel by which workers read the shards of other nodes. `wanted`: `cluster.channel`."""
    return NIXL if wanted == NIXL else GLOO


def channel_between(first: Place, second: Place, peer_access: PeerAccess) -> str | None:
    """The kind of one-sided channel between two places; None between nodes, where there is none."""
    if first.node_id != second.node_id:
        return None
    if not (first.on_device and second.on_device):
        return PCIE if first.on_device or second.on_device else SHARED_MEMORY
    if first.device == second.device or peer_access(first.device, second.device):
        return CUDA_IPC
    return CUDA_STAGED


def link_rank(first: Place, second: Place, peer_access: PeerAccess) -> int:
    """The rank of a pair's link, 0 the best: by the kind of channel that the two places can have."""
    kind = channel_between(first, second, peer_access)
    return _RANKS[kind or (NCCL if first.on_device and second.on_device else GLOO)]
