"""What a simulated prefill instance and the pool need of the cell that they are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from alignedserve.config import Config
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import events
from alignedserve.simulator.clock import Clock
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.links import Link
from alignedserve.simulator.requests import Replayed

if TYPE_CHECKING:
    from alignedserve.simulator.decode import SimulatedDecode
    from alignedserve.simulator.pool import Pool
    from alignedserve.simulator.sizes import Sizes


class Host(Protocol):
    """Implemented by `Cell` and `RankCell`."""

    config: Config
    hardware: Hardware
    sizes: Sizes
    block_size: int
    block_bytes: int
    clock: Clock
    counters: Counter[str]
    pools: Mapping[str, Pool]
    occupancy: list[tuple[float, int]]
    cache_answers: bool

    @property
    def decodes(self) -> Mapping[str, SimulatedDecode]: ...

    def pool_at(self, instance: str) -> Pool: ...

    def pool_link(self, *, prefill: bool = False) -> Link: ...

    def peer_link(self, *, prefill: bool = False) -> Link: ...

    def network_link(self) -> Link: ...

    def disk_link(self) -> Link: ...

    def blocks_for(self, tokens: int) -> int: ...

    def neighbour(self, prefill_id: str) -> SimulatedDecode | None: ...

    def request(self, key: RequestKey) -> Replayed: ...

    def send(self, call: Callable[..., None], *arguments: Any) -> None: ...

    def send_core(self, event: events.Event) -> None: ...

    def send_returned(self, key: RequestKey, kv_tokens: int, pool_id: str) -> None: ...

    def tell(self, event: events.Event) -> None: ...

    def end(self, request: Replayed) -> None: ...


class OnHardware:
    """What follows from the hardware alone, for every cell."""

    hardware: Hardware
    block_size: int

    def pool_link(self, *, prefill: bool = False) -> Link:
        own = self.hardware.prefill_pool_bandwidth if prefill else 0.0
        return Link(own or self.hardware.pool_bandwidth, self.hardware.copy_latency_s)

    def peer_link(self, *, prefill: bool = False) -> Link:
        own = self.hardware.prefill_peer_bandwidth if prefill else 0.0
        return Link(own or self.hardware.peer_bandwidth, self.hardware.copy_latency_s)

    def network_link(self) -> Link:
        return Link(self.hardware.network_bandwidth, self.hardware.copy_latency_s)

    def disk_link(self) -> Link:
        return Link(self.hardware.disk_bandwidth, self.hardware.disk_latency_s)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
