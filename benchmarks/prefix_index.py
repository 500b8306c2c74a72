"""The prefix index of a shard: CPU time and memory of match, insert and evict, and what it costs the pool.

Fills an index of `--blocks` blocks of 16 tokens with chains of each length, looks chains up in random order, and
evicts. Hashing is timed apart. Then a shard with an index and one without commit and release unique requests by turns.

    python benchmarks/prefix_index.py --blocks 10000000 --chains 4,64,2000 --json prefix_index.json

Times are CPU time of the process, medians over the repetitions. Memory is the growth of resident anonymous memory; the
entries, which are in the segment, are counted apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.block_table import NONE
from alignedserve.kv_pool.entries import IndexEntries, entry_bytes
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_chain import Chain, root_digest
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.kv_pool.records import WriterKey
from alignedserve.kv_pool.table import AllocationTable, table_bytes
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.values import cache_policy

BLOCK = 16
ROOT = root_digest("benchmark")
WRITER = WriterKey("prefill", "prefill-0", 1)
GEOMETRY = KvGeometry("benchmark", "float32", 2, 2, 8, BLOCK)


def resident_bytes() -> int:
    """Anonymous resident memory: without the segment, which is shared memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def shared(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))  # shared and sparse, like a shard's segment


def chain_of(number: int, blocks: int) -> Chain:
    """A chain of its own for each number."""
    tokens = (np.arange(blocks * BLOCK, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(number)) % 50_000
    tokens[0] = number  # no two chains begin alike
    return Chain(ROOT, tokens.tolist(), BLOCK)


def timed(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


class Filled:
    """An index of `capacity` blocks, filled with cached chains of `length` blocks."""

    def __init__(self, capacity: int, length: int, policy: str, *, scattered: bool) -> None:
        self.length = length
        self.memory = shared(capacity * entry_bytes(BLOCK))
        gc.collect()
        before = resident_bytes()
        self.cached = bytearray(b"\1") * capacity
        chosen = cache_policy(policy, lambda tokens: 1e-3 + 1e-5 * tokens + 1e-10 * tokens**2, BLOCK)
        self.index = PrefixIndex(IndexEntries(self.memory, BLOCK), BLOCK, chosen)
        self.order = np.random.default_rng(0).permutation(capacity) if scattered else np.arange(capacity)
        self.chains = capacity // length
        self.free: list[int] = []
        for number in range(self.chains):
            self.put(chain_of(number, length), self.order[number * length : (number + 1) * length].tolist())
        self.next = self.chains
        order_bytes = self.order.nbytes
        gc.collect()
        self.bytes_a_block = (resident_bytes() - before - order_bytes) / capacity

    def put(self, chain: Chain, ids: list[int]) -> None:
        self.index.insert(chain, 0, ids, NONE)
        self.index.queue.touch(ids)

    def repetition(self, chains: int) -> dict[str, float]:
        """Microseconds a block of each operation, over `chains` chains drawn at random.

        Few at a time, because a prompt is looked up just after it was hashed.
        """
        length, at_once = self.length, max(1, 256 // self.length)
        seconds: dict[str, float] = defaultdict(float)
        draw = np.random.default_rng(self.next)
        for _ in range(0, chains, at_once):
            numbers = draw.integers(self.next - self.chains // 2, self.next, at_once).tolist()
            self.few([chain_of(number, length) for number in numbers], seconds)
        count = -(-chains // at_once) * at_once
        seconds["miss, a chain"] *= length
        return {name: total / (count * length) * 1e6 for name, total in seconds.items()}

    def few(self, old: list[Chain], seconds: dict[str, float]) -> None:
        """Match chains that are indexed, and put as many new ones in the place of others."""
        length, index = self.length, self.index
        new = [chain_of(self.next + number, length) for number in range(len(old))]
        self.next += len(old)
        found: list[int] = []
        seconds["hash"] += timed(lambda: [chain.digests(length) for chain in old])
        seconds["match"] += timed(lambda: found.extend(len(index.match(chain, length)) for chain in old))
        for chain in new:
            chain.digests(length)
        seconds["miss, a chain"] += timed(lambda: found.extend(len(index.match(chain, length)) for chain in new))
        assert found == [length] * len(old) + [0] * len(new)
        evicted: list[int] = []
        seconds["evict"] += timed(lambda: evicted.extend(index.evict(len(new) * length, self.cached)))
        ids = [evicted[at : at + length] for at in range(0, len(evicted), length)]
        pairs = list(zip(new, ids, strict=True))
        seconds["insert"] += timed(lambda: [index.insert(chain, 0, blocks, NONE) for chain, blocks in pairs])
        seconds["touch"] += timed(lambda: [index.queue.touch(blocks) for blocks in ids])


def measure_index(capacity: int, length: int, policy: str, repetitions: int, scattered: bool) -> dict[str, float]:
    filled = Filled(capacity, length, policy, scattered=scattered)
    runs = [filled.repetition(max(1, 100_000 // length)) for _ in range(repetitions)]
    medians = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    successor = PrefixIndex(IndexEntries(filled.memory, BLOCK), BLOCK, cache_policy(policy, float, BLOCK))
    medians["recovery, s"] = round(timed(successor.recover), 2)
    assert successor.blocks == filled.chains * length
    return {**medians, "bytes a block": round(filled.bytes_a_block, 1), "entry bytes": entry_bytes(BLOCK)}


class Shard:
    def __init__(self, capacity: int, *, index: bool) -> None:
        table = AllocationTable(shared(table_bytes(capacity, BLOCK)), GEOMETRY, capacity)
        policy = cache_policy("value", lambda tokens: 1e-5 * tokens, BLOCK)
        self.index = PrefixIndex(table.open_index(), BLOCK, policy) if index else None
        self.pool = KvPool("shard", table, BLOCK, index=self.index)
        self.number = 0

    def serve(self, requests: int, length: int) -> float:
        """Microseconds a block to lease, commit and release the blocks of unique requests."""
        tokens = [chain_of(self.number + n, length).tokens for n in range(requests)]
        prompts = [np.frombuffer(each, np.uint32).tolist() for each in tokens]
        keys = [RequestKey(f"request-{self.number + n}") for n in range(requests)]
        self.number += requests

        def work() -> None:
            for key, prompt in zip(keys, prompts, strict=True):
                (grant,) = self.pool.want(WRITER, length)
                given = {"token_ids": prompt, "root": ROOT} if self.index else {}
                self.pool.commit(WRITER, key, length * BLOCK, list(grant.block_ids), **given)
                self.pool.release([key])

        return timed(work) / (requests * length) * 1e6


def measure_pool(capacity: int, length: int, repetitions: int) -> dict[str, float]:
    """By turns (ABBA): a shard without an index, and one with an index that is full, so that each lease evicts."""
    off, on = Shard(capacity, index=False), Shard(capacity, index=True)
    requests = max(1, 20_000 // length)
    on.serve(capacity // length + 1, length)
    times: dict[str, list[float]] = {"off": [], "on": []}
    for turn in range(repetitions):
        for shard, name in ((off, "off"), (on, "on"))[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(shard.serve(requests, length))
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--chains", default="4,64,2000")
    parser.add_argument("--policy", default="value", choices=("value", "lru"))
    parser.add_argument("--scattered", action="store_true", help="the blocks of a chain lie anywhere in the store")
    parser.add_argument("--pool-blocks", type=int, default=100_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {"index, us a block": {}, "pool, us a block": {}}
    for length in map(int, args.chains.split(",")):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:  # memory is that of one index
            settings = args.blocks, length, args.policy, args.repetitions, args.scattered
            found = fresh.submit(measure_index, *settings).result()
        results["index, us a block"][str(length)] = found
        print(f"index of {args.blocks} blocks, chains of {length}: {found}", flush=True)
        found = measure_pool(args.pool_blocks, length, args.repetitions)
        results["pool, us a block"][str(length)] = found
        print(f"pool of {args.pool_blocks} blocks, requests of {length}: {found}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
