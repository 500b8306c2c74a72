"""The parts of a decode instance: model, cache, decode loop, and links to the pool and to paired buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from alignedserve.config import Config
from alignedserve.control.role import SERVING_STATES
from alignedserve.control.runtime import RoleSettings
from alignedserve.decode_worker.buffer_access import BufferReach
from alignedserve.decode_worker.buffer_link import BufferLink
from alignedserve.decode_worker.chains import chain_of
from alignedserve.decode_worker.endings import Endings
from alignedserve.decode_worker.handover import Handover
from alignedserve.decode_worker.held import Outcome
from alignedserve.decode_worker.iteration_meter import IterationMeter
from alignedserve.decode_worker.loop import DecodeLoop
from alignedserve.decode_worker.moves import CopyWithin
from alignedserve.decode_worker.scheduling import Scheduling, books_of
from alignedserve.engine.decode_engine import decode_engine
from alignedserve.engine.decoding import DecodeEngine
from alignedserve.engine.model import host
from alignedserve.engine.model.instance_memory import InstanceMemory
from alignedserve.engine.parallel.processes import RankProcesses, runner_maker, start_ranks
from alignedserve.engine.step_progress import StepProgress
from alignedserve.errors import AlignedServeError
from alignedserve.grammar.compiled import Grammars
from alignedserve.kv_pool.attachment import PoolAttachment
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.model import ModelInfo
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.rank_host.link import open_hosts
from alignedserve.ranks.now import RankNow
from alignedserve.request import RequestKey
from alignedserve.scheduler.cost.load import configured_cost
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.sizing import StorePlan
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.copier import Copier
from alignedserve.transfer.device import compile_copies, reached_devices
from alignedserve.transfer.links import connect
from alignedserve.transfer.ranged import RangedStore
from alignedserve.transfer.topology import shard_channel

CACHING_BLOCKS = 256  # leased at most for answers that have ended

OVERLAP = {"auto": None, "on": True, "off": False}  # decode.overlap


class DecodeInstance:
    """The parts are created by `load`, except the buffer links, which follow the cluster's view.

    `settings`, `config` and `process` are those of the role. `post` gets each outcome, on the decode thread.
    `on_pool_wait` is called when the number of blocks that evictions wait for has changed.
    """

    def __init__(
        self,
        settings: RoleSettings,
        config: Config,
        process: pb.ProcessKey,
        post: Callable[[Outcome], None],
        on_pool_wait: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._config = config
        self._process = process
        self._post = post
        self._on_pool_wait = on_pool_wait
        self._linking = asyncio.Lock()  # held while the buffer links are changed
        channel = shard_channel(config.cluster.channel)
        self._pool = PoolAttachment(settings, process, config.kv_pool.copy_timeout_s, channel)  # shards and view
        # How the candidate buffers of a paired prefill instance are accessed.
        self._reach = BufferReach(settings, config, process, self._pool.segments, self._connect)
        # All copies of KV, with their checks and time limits.
        self.copier = Copier(verify=config.kv_pool.verify, timeout_s=config.kv_pool.copy_timeout_s)
        # From this node's shard, to it, and between the caches of ranks; empty until `load`.
        self._own_channels: list[Channel] = []
        self._cache_store: BlockStore | None = None  # the memory of the cache; None until `load`
        self._linked: dict[str, pb.ProcessKey] = {}  # the processes that `handover.links` lead to, by prefill id
        self.model: ModelInfo | None = None  # None until `load` has inspected the model
        self.reaches: list[str] = []  # devices whose memory its device reads directly; set by `load`
        # The GPU's memory: found, planned and used; does nothing on a CPU.
        self.memory = InstanceMemory("decode", settings.id, settings.device, config)
        self.cache = BlockAllocator(1, f"{settings.id}/cache")  # who owns which block; `load` replaces it
        self.engine: DecodeEngine | None = None  # runs iterations; None until `load`
        self.compute: DecodeLoop | None = None  # the decode thread; None until `load` has warmed it up
        self.starting = StepProgress(settings.id)  # of `load`
        self._ranks: RankProcesses | None = None  # the other ranks; None before `load`, or with one rank
        self.writer: PoolWriter | None = None  # leases blocks of this node's shard for evictions; None until `load`
        self.handover: Handover | None = None  # copies into the cache and out; has the buffer links; None until `load`
        self.draining = False  # the view removes this instance, and `compute` drains; for good

    async def on_view(self, view: sv.ClusterView) -> None:
        await self._pool.on_view(view)
        await self._follow_pairs()
        if self._settings.id in view.draining and self.compute is not None and not self.draining:
            self.draining = True
            self.compute.drain()

    async def load(self, report: Callable[[], None]) -> None:
        """Like `_load`. Raises ResourceError, which lists the use of memory, if the device runs out of it."""
        with self.memory.explained():
            await self._load(report)

    async def _load(self, report: Callable[[], None]) -> None:
        """Load the model, create the cache, attach the pool. `report` is called when the model's shape is known."""
        settings, config = self._settings, self._config
        host.prepare_process(config)
        hosts = await open_hosts(settings, self._process, config)
        devices, device = settings.devices, settings.devices[0]
        self.reaches = await asyncio.to_thread(reached_devices, device)
        await asyncio.to_thread(self._reach.check)
        await asyncio.to_thread(self.memory.look)
        self.model = await host.inspect(config, device)
        self.memory.expect(self.model)
        report()
        self._ranks = ranks = start_ranks(config, "decode", self.model, devices, hosts, settings.host)
        load_part, of_ranks = (None, None) if ranks is None else (ranks.load, ranks.store)
        loaded, tokenizer = await host.load(config, self.model, device, self.starting, load_part)
        plan = await self._pool.plan
        config = replace(config, decode=config.decode.running(plan.max_running))
        make_runner = runner_maker(config, loaded, ranks)
        weight_bytes = None if ranks is None else ranks.most_weight_bytes()
        await asyncio.to_thread(self.memory.check, loaded, plan, make_runner, weight_bytes)
        geometry = self.model.geometry(plan.block_size)
        make_store = partial(host.cache_store, of_ranks=of_ranks)
        cache_store, tensor = await asyncio.to_thread(
            make_store, f"{settings.id}/cache", geometry, plan.decode_cache, device, settings.node_id
        )
        self._cache_store = cache_store
        await asyncio.to_thread(compile_copies, cache_store)  # now, not when the first buffer is attached
        self.cache = books_of(cache_store)
        lease, weights = self._largest_request_blocks(plan), self.model.weights
        self.writer = writer = PoolWriter(self._process, settings.token, lease, self._on_pool_wait, weights)
        cached = self._caching_writer(plan)
        pool_store = await self._pool.attach(geometry, [writer, *([cached] if cached is not None else [])])
        from_pool, to_pool = self._connect(pool_store, cache_store), self._connect(cache_store, pool_store)
        self._own_channels = [from_pool, to_pool]
        reader, size = self._pool.reader(from_pool), plan.block_size
        self.handover = Handover(self.copier, reader, to_pool, writer, size, cached)
        endings = None if cached is None else Endings(self.cache, size, pool_store.store_id)
        runner = await asyncio.to_thread(make_runner, tensor)
        meter = IterationMeter(configured_cost(config.scheduler), runner.depth)
        scheduling = Scheduling.configured(config, self.cache, size, meter.cost)
        pull, overlap = self.handover.pull, OVERLAP[config.decode.overlap]
        self.engine = engine = decode_engine(runner, config, self.starting.of("CUDA graphs", "batch sizes"))
        grammars = await asyncio.to_thread(Grammars.of, tokenizer, loaded.info.vocab_size, config.engine)
        compute = DecodeLoop(
            settings.id,
            engine,
            scheduling.scheduler,
            tokenizer,
            pull,
            self._post,
            meter,
            overlap=overlap,
            grammars=grammars,
            endings=endings,
            chain_of=partial(chain_of, block_size=size, caches=cached is not None),
            placer=scheduling.placer,
            copy_within=self._copy_within(self._cache_store),
        )
        await asyncio.to_thread(compute.warm_up)
        self.memory.note_graphs(engine.graph_memory_bytes)
        self.compute = compute
        self.compute.start()
        await self._follow_pairs()

    def _copy_within(self, cache: BlockStore) -> CopyWithin | None:
        """How requests go to the cache of another rank; None if ranks have none of their own."""
        if not isinstance(cache, RangedStore):
            return None
        opened: list[Channel] = []

        def copy(source_ids: Sequence[int], block_ids: Sequence[int], label: str) -> Completion:
            """The channels are opened for the first move: some placements make none."""
            if not opened:
                opened.append(self._connect(cache, cache))
                self._own_channels.append(opened[0])
            return self.copier.copy_anew(opened[0], source_ids, block_ids, label)

        return copy

    async def read(self, pool_id: str, keys: Collection[RequestKey]) -> dict[RequestKey, pb.StoredRequest]:
        """The stored requests of these keys in the shard that can be decoded here."""
        return await self._pool.read(pool_id, keys, self.model.vocab_size if self.model is not None else 0)

    def _connect(self, source: BlockStore, destination: BlockStore) -> Channel:
        return connect(source, destination, allow_slow=self._config.cluster.allow_slow_channel)

    def _largest_request_blocks(self, plan: StorePlan) -> int:
        """The size of a standing lease: room to evict the largest request, but at most a share of the shard."""
        assert self.model is not None
        largest = -(-self.model.max_positions // plan.block_size)
        return max(1, min(largest, self.cache.request_blocks, plan.pool // 16))

    def _caching_writer(self, plan: StorePlan) -> PoolWriter | None:
        """Leases blocks for answers that have ended, never of the growth reserve; None without kv_pool.prefix_cache."""
        if not self._config.kv_pool.prefix_cache:
            return None
        assert self.model is not None
        process = pb.ProcessKey(role="cache", id=self._process.id, incarnation=self._process.incarnation)
        lease = min(CACHING_BLOCKS, max(1, plan.pool // 64))
        return PoolWriter(process, self._settings.token, lease, weights=self.model.weights)

    def _eviction_lease_blocks(self, prefill_id: str) -> int:
        """The lease for evictions: room for the largest request, but some is left for late candidates."""
        plan = self._pool.plan.result()
        served = sum(pair.prefill_id == prefill_id for pair in self._pool.view.pairs) or 1
        return max(1, min(self._largest_request_blocks(plan), plan.requests_buffer * 2 // (3 * served)))

    async def _follow_pairs(self) -> None:
        async with self._linking:
            await self._link_pairs()

    async def _link_pairs(self) -> None:
        """Open links to the buffers of paired prefill instances, and close links to instances that have ended."""
        if self.handover is None or self.compute is None:
            return
        wanted = {pair.prefill_id for pair in self._pool.view.pairs if pair.decode_id == self._settings.id}
        peers = {
            peer.process.id: peer
            for peer in self._pool.view.peers
            if peer.process.role == "prefill" and peer.state in SERVING_STATES and peer.process.id in wanted
        }
        present = {peer.process.id for peer in self._pool.view.peers}
        for prefill_id in list(self._linked):
            peer = peers.get(prefill_id)
            if prefill_id not in present and self.handover.links[prefill_id].up:
                continue  # a supervisor that has just started may not know all processes yet
            if peer is None or peer.process != self._linked[prefill_id]:
                del self._linked[prefill_id]
                await self.handover.links.pop(prefill_id).close()
        for prefill_id, peer in peers.items():
            if prefill_id not in self._linked:
                self._linked[prefill_id] = peer.process
                self.handover.links[prefill_id] = self._open_link(prefill_id, peer.address)
        for prefill_id, link in self.handover.links.items():
            link.set_lease_blocks(self._eviction_lease_blocks(prefill_id))
            if prefill_id in self._pool.view.draining:
                link.retire()

    def _open_link(self, prefill_id: str, address: str) -> BufferLink:
        assert self._cache_store is not None
        assert self.compute is not None
        link = BufferLink(
            prefill_id,
            self._process,
            self._cache_store,
            self.compute,
            self._eviction_lease_blocks(prefill_id),
            partial(self._reach.access, prefill_id, self._cache_store),
            self.refresh_lease,
        )
        link.open(address, self._settings.token)
        return link

    @property
    def channels(self) -> list[Channel]:
        """All channels that this instance copies over."""
        links = self.handover.links.values() if self.handover is not None else ()
        of_buffers = (channel for link in links for channel in link.channels)
        return [*self._own_channels, *self._pool.others.channels, *of_buffers]

    def refresh_lease(self) -> None:
        if self.handover is not None and self.compute is not None:
            self.compute.set_lease(self.handover.leased_blocks())

    @property
    def ranks(self) -> list[RankNow]:
        """All ranks, in order; empty if there is one, or before `load`."""
        return [] if self._ranks is None else self._ranks.now()

    def trouble(self) -> AlignedServeError | None:
        """The error for which this process must be replaced; None if there is none."""
        slow = next((trouble for channel in self.channels if (trouble := channel.trouble()) is not None), None)
        links = self.handover.links.values() if self.handover is not None else ()
        unreached = next((link.trouble for link in links if link.trouble is not None), None)
        lost = None if self._ranks is None else self._ranks.trouble()
        return lost or self.copier.stuck() or self._pool.trouble() or slow or unreached

    async def close(self) -> None:
        if self.compute is not None:
            await asyncio.to_thread(self.compute.stop)
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.close)
        if self.handover is not None:
            for link in list(self.handover.links.values()):
                await link.close()
        for channel in self._own_channels:
            await asyncio.to_thread(channel.close)
        self.copier.close()
        await self._pool.close()
