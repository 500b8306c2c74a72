"""An instance of several ranks, as its rank 0 sees it: the ranks of its own node, and of others."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from alignedserve.config import Config
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.parallel.children import SILENT_S, RankChildren, RankOrder, devices_by_turns
from alignedserve.engine.parallel.cuts import Ranks
from alignedserve.engine.parallel.expert_runner import ExpertRunner
from alignedserve.engine.parallel.group import LOOPBACK, Groups
from alignedserve.engine.parallel.layer_times import DECODE, PREFILL, TimedPass
from alignedserve.engine.parallel.load import load_part
from alignedserve.engine.parallel.runner import DrivenRunner, RankRunner, held_by
from alignedserve.engine.parallel.stores import device_parts, host_parts, shared_store
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.step_progress import Progress
from alignedserve.errors import AlignedServeError, ConfigError, RankLostError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.model import ModelInfo
from alignedserve.ranks import forks
from alignedserve.ranks.degrees import Degrees, RankPlace, Spread
from alignedserve.ranks.now import RankNow, resident_bytes
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.parted import PartedStore
from alignedserve.transfer.ranged import RangedStore

OWN_STORES_VARIABLE = "ALIGNEDSERVE_TEST_RANK_STORES"
"""For tests: "1" gives each rank on a CPU a store of its own, as on devices."""


class RankHost(ABC):
    """The process that has an instance's ranks on another node, as rank 0 sees it. Methods may be called in threads."""

    node_id: str
    devices: Sequence[str]
    """Of its ranks, which have them by turns."""
    address: str
    """At which its ranks are reached."""

    @abstractmethod
    def start(self, orders: Sequence[RankOrder], values: Rendezvous, pass_on: Callable[[str, bytes], None]) -> None:
        """Have it start these ranks. `values`: from now on it gets those of all other nodes, and its own come here, and
        are given to `pass_on`. Never blocks.
        """

    @abstractmethod
    def tell(self, key: str, value: bytes) -> None:
        """Give it a value of another node. Never blocks."""

    @abstractmethod
    def held(self) -> list[tuple[StoreSlice, int]]:
        """As `RankChildren.held`. Blocks."""

    @abstractmethod
    def said(self) -> AlignedServeError | None:
        """As `RankChildren.said`. May block for a moment."""

    @abstractmethod
    def store(self, store_id: str, geometry: KvGeometry, blocks: int) -> list[BlockStore]:
        """Have it make its ranks' parts of the store, and give each its own. Blocks. Raises TransferError."""

    @abstractmethod
    def now(self) -> Sequence[RankNow]:
        """As `RankChildren.now`, of its last beat; empty before the ranks are started."""

    @abstractmethod
    def trouble(self) -> RankLostError | None:
        """As `RankChildren.trouble`."""

    @abstractmethod
    def close(self) -> None:
        """End it and its ranks. Idempotent."""


def start_ranks(
    config: Config,
    role: str,
    info: ModelInfo,
    devices: Sequence[str] = ("cpu",),
    hosts: Sequence[RankHost] = (),
    address: str = LOOPBACK,
) -> RankProcesses | None:
    """The other ranks of an instance of this role; None if it has one. Ranks share the threads of one.

    `devices`: of the instance on this node; ranks have them by turns. `hosts`: its other nodes, in order; `address`: at
    which they reach this one. To be called on a thread that lives as long as the process. Raises ConfigError.
    """
    degrees = config.degrees(role)
    if degrees.ranks == 1:
        forks.release()
        return None
    degrees.require_channel(config.cluster.channel, devices[0])
    threads = max(1, torch.get_num_threads() // config.spread(role).most_ranks)
    torch.set_num_threads(threads)
    trusted, backend = config.model.trust_remote_code, config.engine.attention
    own = os.environ.get(OWN_STORES_VARIABLE) == "1"
    ranks = RankProcesses(
        info,
        degrees,
        trust_remote_code=trusted,
        threads=threads,
        backend=backend,
        own_stores=own,
        devices=devices,
        hosts=hosts,
        address=address,
        timed=PREFILL if role == "prefill" else DECODE,
        connect_s=config.supervisor.start_timeout_s,
    )
    forks.release()
    return ranks


def runner_maker(
    config: Config, loaded: LoadedModel, ranks: RankProcesses | None
) -> Callable[[torch.Tensor], ModelRunner]:
    """What makes the runner of a store."""
    if ranks is not None:
        return partial(ranks.runner, loaded)
    return partial(ModelRunner, loaded, backend=config.engine.attention)


def bytes_of(loaded: LoadedModel) -> int:
    """Of the weights of a rank's part."""
    return sum(parameter.nbytes for parameter in loaded.model.parameters())


def runner_of(
    loaded: LoadedModel, cache: torch.Tensor, place: RankPlace, groups: Groups, backend: str, *, own: bool
) -> DrivenRunner:
    """The passes of the rank at `place`. `own`: `cache` is the rank's own store, not one of all ranks."""
    if place.degrees.experts > 1:
        return ExpertRunner(loaded, cache, place, groups, backend, own=own)
    return RankRunner(loaded, cache, place, groups, backend)


class RankProcesses:
    """Starts the ranks from 1 on; this process is rank 0.

    To be made on a thread that lives as long as this process: the kernel ends them when it ends.
    """

    def __init__(
        self,
        info: ModelInfo,
        degrees: Degrees,
        *,
        trust_remote_code: bool,
        threads: int,
        backend: str,
        own_stores: bool = False,
        devices: Sequence[str] = ("cpu",),
        hosts: Sequence[RankHost] = (),
        address: str = LOOPBACK,
        timed: TimedPass | None = DECODE,
        connect_s: float = SILENT_S,
    ) -> None:
        """`threads`: of each rank. `own_stores`: each has a store of its own, as on GPUs and on several nodes.
        `devices`: of this node's ranks, by turns. `hosts`, `address`: as in `start_ranks`. `timed`: as for `load_part`.
        `connect_s`: how long ranks may take until they connect.

        Raises ConfigError if so many ranks cannot share the model.
        """
        Ranks(info, 0, degrees.tensor).require()
        degrees.require_layers(info.name, info.layers)
        degrees.require_kind()
        self._spread = Spread(degrees, 1 + len(hosts))
        self._spread.require()
        self._hosts = hosts
        self._groups: Groups | None = None
        own = self._spread.ranks(0)
        self._devices = devices_by_turns(devices, len(own))  # of the ranks of this node
        self._on_gpus = devices[0] != "cpu"
        self._own_stores = own_stores or self._on_gpus or bool(hosts)
        self.ranges = degrees.experts if self._own_stores else 1
        """Equal ranges of the cache's blocks, one for each rank that holds all KV of its own requests."""
        self._held: list[StoreSlice] = []  # by each rank; known from `load` on
        self._weight_bytes: list[int] = []  # of each rank; known from `load` on
        self._info, self._timed = info, timed
        self._values = Rendezvous(self._tell_hosts) if hosts else None
        self._children = RankChildren(self._values)
        places = [("", device) for device in self._devices]
        for node, host in enumerate(hosts, 1):
            theirs = devices_by_turns(host.devices, len(self._spread.ranks(node)))
            places += [(host.address, device) for device in theirs]
        first = RankOrder(
            0,
            degrees.tensor,
            degrees.stages,
            degrees.experts,
            info.to_json(),
            trust_remote_code,
            threads,
            backend,
            connect_s=connect_s,
        )
        apart = self._on_gpus and len(set(places)) == degrees.ranks
        orders = [
            replace(first, rank=rank, device=device, apart=apart, host=(host or address) if hosts else "")
            for rank, (host, device) in enumerate(places)
        ]
        on_nodes = [orders[ranks.start : ranks.stop] for ranks in map(self._spread.ranks, range(self._spread.nodes))]
        here, *elsewhere = [[replace(order, here=len(group)) for order in group] for group in on_nodes]
        self._own = here[0]
        for order in here[1:]:
            self._children.start(order)
        for host, theirs_ in zip(hosts, elsewhere, strict=True):
            assert self._values is not None
            host.start(theirs_, self._values, partial(self._pass_on, host))

    @property
    def _others(self) -> list[RankChildren | RankHost]:
        return [self._children, *self._hosts]

    def _tell_hosts(self, key: str, value: bytes) -> None:
        for host in self._hosts:
            host.tell(key, value)

    def _pass_on(self, source: RankHost, key: str, value: bytes) -> None:
        for host in self._hosts:
            if host is not source:
                host.tell(key, value)

    def load(self, progress: Progress = lambda done, count: None) -> LoadedModel:
        """Rank 0's part of the model. Raises what `load_part` raises."""
        own = self._own
        try:
            self._groups = own.groups(self._children.rendezvous, self._values)
            loaded = load_part(
                self._info, own.place, self._groups, own.device, own.trust_remote_code, progress, self._timed
            )
            self._groups.waits.meet()
        except RankLostError as error:
            raise next((said for each in self._others if (said := each.said()) is not None), error) from None
        told = [(held_by(loaded, own.place), bytes_of(loaded)), *self._children.held()]
        for host in self._hosts:
            told += host.held()
        self._held, self._weight_bytes = [held for held, _ in told], [size for _, size in told]
        return loaded

    def store(
        self, store_id: str, geometry: KvGeometry, blocks: int, node_id: str = ""
    ) -> tuple[BlockStore, torch.Tensor]:
        """The instance's cache, and as a tensor what rank 0 has of it. The others follow its passes from then on.

        Where ranks have ranges of it, it has the greatest multiple of their number that `blocks` allows. Blocks. Raises
        ConfigError if that is none; RankLostError, TransferError.
        """
        ranges, each, held = self.ranges, blocks // self.ranges, self._held[: len(self._devices)]
        if not each:
            raise ConfigError(f"a decode cache of {blocks} blocks cannot be shared by {ranges} ranks: each needs one")
        if self._on_gpus:
            made = device_parts(store_id, geometry, each, node_id, held, self._devices)
        elif self._own_stores:
            made = host_parts(store_id, geometry, each, node_id, held)
        else:
            made = shared_store(store_id, geometry, blocks, node_id, len(held))
        self._children.give(made, geometry, each, own=self._own_stores, first=1)
        parts = [*made.parts]
        for host in self._hosts:
            parts += host.store(store_id, geometry, blocks)
        if not self._own_stores:
            return parts[0], made.own
        return (RangedStore if ranges > 1 else PartedStore)(store_id, parts), made.own

    def device_buffer(self, store_id: str, geometry: KvGeometry, blocks: int, node_id: str) -> BlockStore:
        """A candidate buffer in the GPUs of this node's ranks, which other processes of the node can open."""
        stages = len(self._devices) // self._spread.degrees.tensor
        held = [
            replace(
                part,
                layer_begin=rank // self._spread.degrees.tensor * geometry.layers // stages,
                layer_end=(rank // self._spread.degrees.tensor + 1) * geometry.layers // stages,
            )
            for rank, part in enumerate(self._held[: len(self._devices)])
        ]
        made = device_parts(store_id, geometry, blocks, node_id, held, self._devices, shared=True)
        return PartedStore(store_id, made.parts)

    def most_weight_bytes(self) -> int:
        """Of all ranks on the GPU that has most of them, on this node."""
        found = Counter[str]()
        for device, size in zip(self._devices, self._weight_bytes[: len(self._devices)], strict=True):
            found[device] += size
        return max(found.values())

    def runner(self, loaded: LoadedModel, cache: torch.Tensor) -> DrivenRunner:
        """Rank 0's passes over the store."""
        assert self._groups is not None
        runner = runner_of(loaded, cache, self._own.place, self._groups, self._own.backend, own=self._own_stores)
        if self._hosts:
            runner.lost_elsewhere = lambda: next((lost for host in self._hosts if (lost := host.trouble())), None)
        return runner

    @property
    def pids(self) -> list[int]:
        """Of rank 0 and the others of this node, in order."""
        return [os.getpid(), *self._children.pids]

    def now(self) -> list[RankNow]:
        """Of all ranks, in order."""
        waited_s = 0.0 if self._groups is None else self._groups.waited_s
        first = RankNow(0, os.getpid(), resident_bytes=resident_bytes(os.getpid()), waited_s=waited_s)
        found = [first, *self._children.now()]
        for host in self._hosts:
            found += [replace(each, node=host.node_id) for each in host.now()]
        if not self._weight_bytes:  # they still load
            return found
        several = self._spread.degrees.stages > 1
        return [
            replace(
                each,
                layers=range(held.layer_begin, held.layer_end) if several else None,
                weight_bytes=self._weight_bytes[each.rank],
            )
            for each in found
            for held in [self._held[each.rank]]
        ]

    def trouble(self) -> RankLostError | None:
        """The error if a rank has ended before `close`, or is stopped: then the instance cannot go on."""
        return next((found for each in self._others if (found := each.trouble()) is not None), None)

    def close(self) -> None:
        """End the others. Idempotent."""
        with ThreadPoolExecutor(len(self._hosts) + 1) as pool:
            list(pool.map(lambda each: each.close(), self._others))
