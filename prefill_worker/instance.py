"""The parts of a prefill instance: model, cache, the candidate buffers, and the channels between these and the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from alignedserve.config import Config
from alignedserve.control.convert import key_from_proto, sampling_from_proto
from alignedserve.control.runtime import RoleSettings
from alignedserve.engine.model import host
from alignedserve.engine.model.instance_memory import InstanceMemory
from alignedserve.engine.parallel.processes import RankProcesses, runner_maker, start_ranks
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.step_progress import StepProgress
from alignedserve.errors import AlignedServeError, ChecksumError, TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.grammar.compiled import Grammars
from alignedserve.kv_pool.attachment import PoolAttachment
from alignedserve.kv_pool.stored import LastCommitted
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.model import ModelInfo
from alignedserve.prefill_worker.buffers import CandidateBuffer
from alignedserve.prefill_worker.jobs import Base, Computed
from alignedserve.prefill_worker.layerwise import Ahead, Layerwise
from alignedserve.prefill_worker.layerwise_choice import measure
from alignedserve.prefill_worker.loans import Loans
from alignedserve.prefill_worker.loop import PrefillLoop
from alignedserve.prefill_worker.offload import Offloader
from alignedserve.prefill_worker.prefetch import Prefetcher
from alignedserve.prefill_worker.prefixes import Prefixes
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.rank_host.link import open_hosts
from alignedserve.ranks.now import RankNow
from alignedserve.request import RequestKey
from alignedserve.scheduler.cost.load import configured_cost
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.scheduler.priorities import rank_of
from alignedserve.sizing import StorePlan
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.copier import Copier, Route
from alignedserve.transfer.device import reached_devices
from alignedserve.transfer.links import connect
from alignedserve.transfer.pair_choice import require_packages
from alignedserve.transfer.paired.nccl import no_nccl_here
from alignedserve.transfer.topology import shard_channel

logger = logging.getLogger(__name__)

BUFFER_NAMES = {BufferKind.BATCH: "batch", BufferKind.REQUESTS: "requests"}


class PrefillInstance:
    """The parts are created by `load`; they exist once it has returned.

    `settings`, `config` and `process` are those of the role. `post` gets each result, on the compute thread.
    `on_pool_wait` is called when the number of blocks that returning candidates wait for has changed.
    """

    def __init__(
        self,
        settings: RoleSettings,
        config: Config,
        process: pb.ProcessKey,
        post: Callable[[Computed], None],
        on_pool_wait: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._config = config
        self._process = process
        self._post = post
        self._on_pool_wait = on_pool_wait
        self.returns: PoolWriter | None = None  # leases blocks for candidates that go back; None until `load`
        channel = shard_channel(config.cluster.channel)
        self._pool = PoolAttachment(settings, process, config.kv_pool.copy_timeout_s, channel)  # shards and view
        # All copies of KV, with their checks and time limits.
        self.copier = Copier(verify=config.kv_pool.verify, timeout_s=config.kv_pool.copy_timeout_s)
        self._channels: list[Channel] = []  # between this node's shard and the cache and buffers; empty until `load`
        self.starting = StepProgress(settings.id)  # of `load`
        self._ranks: RankProcesses | None = None  # the other ranks; None before `load`, or with one rank
        self.model: ModelInfo | None = None  # None until `load` has inspected the model
        self.reaches: list[str] = []  # devices whose memory its device reads directly; set by `load`
        self.no_nccl = ""  # why this process cannot use NCCL; "" if it can; set by `load`
        # The GPU's memory: found, planned and used; does nothing on a CPU.
        self.memory = InstanceMemory("prefill", settings.id, settings.device, config)
        self.cache = BlockAllocator(1, f"{settings.id}/cache")  # who owns which block; `load` replaces it
        self.pool_id = ""  # id of this node's shard, once it is attached
        self.buffers: dict[BufferKind, CandidateBuffer] = {}  # set by `load`; stays empty without `cluster.prefetch`
        self.compute: PrefillLoop | None = None  # the compute thread; None until `load` has warmed it up
        self.offloader: Offloader | None = None  # copies computed prompts to the pool; None until `load`
        self.grammars: Grammars | None = None  # None until `load`, or without a tokenizer
        self.loans = Loans(settings.token)
        self.prefixes: Prefixes | None = None  # None until `load`, or without kv_pool.prefix_cache
        self.layerwise: Layerwise | None = None  # copies during a pass; None until `load`, or if off
        self.prefetcher: Prefetcher | None = None  # fills and empties the buffers; None until `load`

    async def on_view(self, view: sv.ClusterView) -> None:
        await self._pool.on_view(view)
        await self.loans.on_view(view)

    async def load(self, report: Callable[[], None]) -> None:
        """Like `_load`. Raises ResourceError, which lists the use of memory, if the device runs out of it."""
        with self.memory.explained():
            await self._load(report)

    async def _load(self, report: Callable[[], None]) -> None:
        """Load the model, create the stores, attach the pool. `report` is called when the model's shape is known."""
        settings, config = self._settings, self._config
        host.prepare_process(config)
        hosts = await open_hosts(settings, self._process, config)
        devices, device = settings.devices, settings.devices[0]
        self.reaches = await asyncio.to_thread(reached_devices, device)
        self.no_nccl = await asyncio.to_thread(no_nccl_here, config.cluster.channel, device)
        require_packages(config.cluster.channel, self.no_nccl, allow_slow=config.cluster.allow_slow_channel)
        await asyncio.to_thread(self.memory.look)
        self.model = await host.inspect(config, device)
        self.memory.expect(self.model)
        report()
        self._ranks = ranks = start_ranks(config, "prefill", self.model, devices, hosts, settings.host)
        load_part, of_ranks = (None, None) if ranks is None else (ranks.load, ranks.store)
        loaded, tokenizer = await host.load(config, self.model, device, self.starting, load_part)
        plan = await self._pool.plan
        make_runner = runner_maker(config, loaded, ranks)
        weight_bytes = None if ranks is None else ranks.most_weight_bytes()
        await asyncio.to_thread(self.memory.check, loaded, plan, make_runner, weight_bytes)
        geometry = self.model.geometry(plan.block_size)
        make_store = partial(host.cache_store, of_ranks=of_ranks)
        cache_store, tensor = await asyncio.to_thread(
            make_store, f"{settings.id}/cache", geometry, plan.prefill_cache, device, settings.node_id
        )
        self.cache = BlockAllocator(plan.prefill_cache, cache_store.store_id)
        self.buffers = await asyncio.to_thread(self._make_buffers, geometry, plan)
        writers = self._writers(plan)
        pool_store = await self._pool.attach(geometry, writers)
        stores = {kind: buffer.store for kind, buffer in self.buffers.items()}
        # Passes do not use the candidate buffers, so candidates are copied beside a pass, not after it.
        from_pool = {kind: self._connect(pool_store, store, computed=False) for kind, store in stores.items()}
        to_pool = {kind: self._connect(store, pool_store, computed=False) for kind, store in stores.items()}
        offload = self._connect(cache_store, pool_store)
        fetch = self._connect(pool_store, cache_store)
        self._channels = [offload, fetch, *from_pool.values(), *to_pool.values()]
        self.pool_id, size = pool_store.store_id, plan.block_size
        committed = LastCommitted()
        self.offloader = Offloader(
            settings.id,
            writers[0],
            self.copier,
            offload,
            self.pool_id,
            size,
            committed if self.buffers else None,
            self.let_go,
        )
        if config.kv_pool.prefix_cache:
            self.prefixes = Prefixes(writers[0], self.pool_id, size, self.loans)
        readers = {kind: self._pool.reader(channel) for kind, channel in from_pool.items()}
        self.prefetcher = Prefetcher(
            self.buffers, self.copier, readers, to_pool, writers[1], self._read, committed, size
        )
        runner = await asyncio.to_thread(make_runner, tensor)

        reader, loop = self._pool.reader(fetch), asyncio.get_running_loop()

        def bring(key: RequestKey, base: Base, block_ids: Sequence[int]) -> Completion:
            route = Route(reader.channel(base.pool_id), base.block_ids, base.checksums)
            copy, began_s = self.copier.copy([route, route], block_ids, key.request_id), time.perf_counter()
            if base.cached:
                copy.add_callback(lambda copied: self._fetched(copied, loop, key, base, block_ids, began_s))
            return copy

        cost = configured_cost(config.scheduler)
        self.layerwise = await self._layerwise(runner, cache_store, self.offloader)
        self.grammars = await asyncio.to_thread(Grammars.of, tokenizer, loaded.info.vocab_size, config.engine)
        compute = PrefillLoop(
            settings.id,
            runner,
            self.cache,
            config.prefill,
            tokenizer,
            bring,
            self._post,
            cost,
            self.layerwise,
            self.grammars,
            caches=config.kv_pool.prefix_cache,
        )
        await asyncio.to_thread(compute.warm_up)
        self.compute = compute
        self.compute.start()

    @property
    def channels(self) -> list[Channel]:
        """All channels that this instance copies over."""
        return [*self._channels, *self._pool.others.channels]

    async def compile_grammars(self, specs: Iterable[pb.RequestSpec]) -> None:
        """Before the requests are computed: the compute thread does not wait for it."""
        bound = [sampling_from_proto(spec.sampling) for spec in specs if spec.sampling.HasField("grammar")]
        if bound and self.grammars is not None:
            await self.grammars.prepare(bound)

    def _fetched(
        self,
        copied: Completion,
        loop: asyncio.AbstractEventLoop,
        lead: RequestKey,
        base: Base,
        block_ids: Sequence[int],
        began_s: float,
    ) -> None:
        """The copy of a cached base to `block_ids` has ended. Called in any thread."""
        assert self.prefixes is not None
        error = copied.error
        if not base.here:
            loop.call_soon_threadsafe(self.loans.give_back, lead)
        if isinstance(error, ChecksumError) and error.details.get("block") in block_ids:
            index = list(block_ids).index(error.details["block"])
            loop.call_soon_threadsafe(self.prefixes.spoiled, lead, base, index)
        elif error is None and block_ids and not base.here:
            tokens = len(block_ids) * self.prefixes.block_size
            self.loans.copied(tokens, time.perf_counter() - began_s)

    async def find_prefix(self, group: Sequence[pb.RequestSpec], copy_from: str) -> Base | None:
        """The part of the group's prompt that the prefix cache has, held for its first request until `prefix_ended`.

        `copy_from`: a shard of another node that may have more than this node's.
        """
        first = group[0]
        if self.prefixes is None or (first.sampling.HasField("prompt_logprobs") and not first.output_token_ids):
            return None
        tokens = [*first.prompt_token_ids, *first.output_token_ids]
        rank = rank_of(first.priority)
        return await self.prefixes.find(key_from_proto(first.key), tokens, first.cache_salt, copy_from, rank)

    def give_up_pins(self, pool_id: str) -> None:
        """Let go of what prompts hold in this shard, where they can do without. "": the only one of the cluster."""
        assert self.compute is not None
        assert self.offloader is not None
        self.compute.give_up_bases(pool_id or self.pool_id)
        if pool_id in ("", self.pool_id):
            self.offloader.give_up_pins()

    def let_go(self, pin: RequestKey, base: Base) -> None:
        if self.prefixes is not None:
            self.prefixes.let_go(pin, base)

    def reused(self, base: Base | None) -> None:
        if self.prefixes is not None and base is not None and base.cached:
            self.prefixes.reused(base)

    def prefix_ended(self, leads: Iterable[RequestKey], *, committed: bool = False) -> None:
        if self.prefixes is not None:
            self.prefixes.ended(leads, committed=committed)

    async def _read(self, pool_id: str, keys: Collection[RequestKey]) -> dict[RequestKey, pb.StoredRequest]:
        return await self._pool.read(pool_id, keys, self.vocab_size)

    def base_of(self, holding: kp.Holding) -> Base | None:
        """None if other weights may have computed it."""
        if self.model is None or holding.weights != self.model.weights:
            return None
        pool_id = holding.pool_id
        here = pool_id == self.pool_id
        return Base(holding.kv_tokens, list(holding.block_ids), list(holding.checksums), pool_id, here)

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the model; 0 until the model is known."""
        return self.model.vocab_size if self.model is not None else 0

    async def _layerwise(self, runner: ModelRunner, cache: BlockStore, offloader: Offloader) -> Layerwise | None:
        """Layer-wise offload from `prefill.layerwise_tokens` or a measured length on; None if it is off."""
        config, geometry = self._config.prefill, cache.geometry
        tokens = config.layerwise_tokens if runner.depth == 1 else 0  # no layer of a pipeline is known to be done alone
        if tokens < 0:
            tokens = 0
            if self._settings.device != "cpu":
                tokens = await asyncio.to_thread(self._measured_length, runner, cache)
        if not tokens:
            return None
        loop = asyncio.get_running_loop()

        def prepare(ahead: Ahead) -> None:
            loop.call_soon_threadsafe(offloader.prepare, ahead)

        def abandon(ahead: Ahead) -> None:
            loop.call_soon_threadsafe(offloader.abandon, ahead)

        return Layerwise(tokens, geometry, prepare, offloader.begin_part, abandon)

    def _measured_length(self, runner: ModelRunner, cache: BlockStore) -> int:
        """The measured threshold in tokens; 0 if layer-wise offload is never faster or could not be measured."""
        geometry, budget = cache.geometry, self._config.prefill.pass_tokens
        try:
            costs = measure(runner, cache, self._connect, budget)
        except TransferError as error:
            logger.warning("layer-wise offload is off, because the time of copies could not be measured: %s", error)
            return 0
        token_bytes = geometry.block_bytes // geometry.block_size
        tokens = costs.threshold_tokens(token_bytes, geometry.layers, budget, geometry.block_size)
        logger.info("layer-wise offload from %d tokens on (0: never), by %s", tokens, costs)
        return tokens

    def _connect(self, source: BlockStore, destination: BlockStore, *, computed: bool = True) -> Channel:
        slow = self._config.cluster.allow_slow_channel
        return connect(source, destination, allow_slow=slow, computed=computed)

    def _make_buffers(self, geometry: KvGeometry, plan: StorePlan) -> dict[BufferKind, CandidateBuffer]:
        sizes = {BufferKind.BATCH: plan.batch_buffer, BufferKind.REQUESTS: plan.requests_buffer}
        buffers: dict[BufferKind, CandidateBuffer] = {}
        if not self._config.cluster.prefetch:
            return buffers
        for kind, blocks in sizes.items():
            # A successor takes new memory: a predecessor that was stopped may still write to the old memory.
            name = f"{self._settings.id}/{BUFFER_NAMES[kind]}-{self._process.incarnation}"
            device, node_id = self._settings.devices[0], self._settings.node_id
            if self._ranks is not None and device != "cpu":
                store = self._ranks.device_buffer(name, geometry, blocks, node_id)
            else:
                store = host.buffer_store(name, geometry, blocks, device, node_id, self._pool.segments)
            buffers[kind] = CandidateBuffer(kind, store)
        return buffers

    def _writers(self, plan: StorePlan) -> list[PoolWriter]:
        """One writer for prompts, and one for requests that return from the candidate buffers.

        Only the second may use the shard's growth reserve: else a full shard and full buffers would wait for each
        other.
        """
        standing = min(self._config.prefill.queued_tokens // plan.block_size, max(1, plan.pool // 16))
        process = pb.ProcessKey(role="write_back", id=self._process.id, incarnation=self._process.incarnation)
        token, weights = self._settings.token, self.model.weights if self.model is not None else ""
        self.returns = PoolWriter(process, token, 0, self._on_pool_wait)
        return [PoolWriter(self._process, token, standing, weights=weights), self.returns]

    def holds_nothing(self) -> bool:
        """Whether there is no prompt, no candidate, no copy under way and no block leased for an eviction."""
        if self.compute is None or self.offloader is None:
            return True
        return self.compute.idle and self.offloader.idle and all(b.holds_nothing() for b in self.buffers.values())

    @property
    def ranks(self) -> list[RankNow]:
        """All ranks, in order; empty if there is one, or before `load`."""
        return [] if self._ranks is None else self._ranks.now()

    def trouble(self) -> AlignedServeError | None:
        """The error for which this process must be replaced; None if there is none."""
        slow = next((trouble for channel in self.channels if (trouble := channel.trouble()) is not None), None)
        lost = None if self._ranks is None else self._ranks.trouble()
        return lost or self.copier.stuck() or self._pool.trouble() or slow

    async def close(self) -> None:
        if self.compute is not None:
            await asyncio.to_thread(self.compute.stop)
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.close)
        for channel in self._channels:
            await asyncio.to_thread(channel.close)
        self.copier.close()
        await self._pool.close()
        await self.loans.close()
        for buffer in self.buffers.values():
            buffer.store.close()
