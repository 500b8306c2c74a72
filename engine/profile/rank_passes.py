"""Measures passes of instances of several ranks on GPUs. Not yet run on GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from alignedserve.config import Config
from alignedserve.engine.decode_engine import decode_engine
from alignedserve.engine.decoding import DecodeEngine
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.parallel.processes import runner_maker
from alignedserve.engine.profile.device_passes import (
    LEAST_SHARE,
    CudaTimer,
    DevicePassBench,
    DevicePasses,
    as_captured,
    blocks_needed,
)
from alignedserve.engine.profile.passes import BLOCK_SIZE, LEAST_BLOCKS, Grid, lanes_of, measure, plan_measurements
from alignedserve.engine.profile.profiler import HostOverhead
from alignedserve.engine.profile.role_benches import LoadedRole, RoleBenches
from alignedserve.engine.runner import allocate_cache
from alignedserve.scheduler.cost.step import KERNEL_MODES
from alignedserve.transfer.block_store import BlockStore

TIMER = CudaTimer


def measure_rank_passes(
    config: Config,
    benches: RoleBenches[DevicePassBench],
    grid: Grid,
    limit_s: float,
    host_overhead_s: HostOverhead,
    host_requests: Sequence[int],
) -> DevicePasses:
    """As `measure_passes`, of the instances that `benches` has loaded, with one kernel."""
    begun_s = time.monotonic()
    plan = plan_measurements(benches.part("decode").loaded.info.max_positions, grid=grid)
    blocks = max(LEAST_BLOCKS, blocks_needed(measurement.shape for measurement in plan))
    benches.open(partial(rank_bench, config, grid, blocks))
    passes_s = max(LEAST_SHARE * limit_s, limit_s - (time.monotonic() - begun_s))
    rounds = measure(benches.run, plan, passes_s, time.monotonic)
    decode = benches.decode
    host_s = {count: host_overhead_s(decode.runner, decode.blocks, count) for count in host_requests}
    backends, overlaps = {KERNEL_MODES[0]: config.engine.attention}, decode.engine.overlaps
    return DevicePasses(plan, [], rounds, backends, host_s, waits_for_host=not overlaps)


def rank_bench(config: Config, grid: Grid, blocks: int, part: LoadedRole) -> DevicePassBench:
    """The bench of a role. Where ranks have ranges of the store, each has `blocks`."""
    geometry, ranks = part.loaded.info.geometry(BLOCK_SIZE), part.ranks
    held: BlockStore | None = None
    if ranks is None:
        store = allocate_cache(geometry, blocks, part.loaded.device)
    else:
        held, store = ranks.store("profile", geometry, blocks * ranks.ranges)
    store.normal_()  # of rank 0: the others read zeros
    runner = runner_maker(config, part.loaded, ranks)(store)
    engine: DecodeEngine = EagerDecode(runner, overlaps=False)
    if part.decodes:
        counts = {*grid.requests, *grid.held_out_requests} if runner.depth > 1 else set(grid.requests)
        sizes = sorted({len(lane) for count in counts for lane in lanes_of((1,) * count, runner.depth)})
        engine = decode_engine(runner, as_captured(config, sizes), lambda done, total: None)
    engine.warm_up()
    ranges = 1 if ranks is None else ranks.ranges
    return DevicePassBench(runner, engine, TIMER(part.loaded.device), ranges, held)
