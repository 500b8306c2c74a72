"""The disk tier: bytes/s of demotion and promotion against fio on the same disk, and TTFT from disk against computing.

A shard of `--gib` is filled with prefixes, which are written by the tier's own code, forgotten, and read again. fio
writes and reads files of the same size with as many threads and calls of the same size, past the page cache too, by
turns with the tier. Then a prefix of `--prefix` tokens: the time to read it at the measured rate, and to compute it
according to a cost model.

    python benchmarks/disk_tier.py --folder /mnt/ssd/bench --gib 4 --rounds 3 --json disk_tier.json

fio: `apt-get install fio`, `dnf install fio`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from alignedserve.config import Config, KvPoolConfig
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.disk.shard import Shard
from alignedserve.kv_pool.disk.slot_io import PIECE_BYTES
from alignedserve.kv_pool.disk.tier import READERS, WRITERS, DiskTier
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_chain import root_digest
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.kv_pool.records import WriterKey
from alignedserve.kv_pool.table import AllocationTable, table_bytes
from alignedserve.memory import GIB
from alignedserve.model import ModelInfo
from alignedserve.scheduler.cache.values import LruPolicy
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.transfer.block_store import HostBlockStore

BLOCK = 16
ROOT = root_digest("benchmark")
WRITER = WriterKey("prefill", "prefill-0", 1)
CHUNK_TOKENS = 8192
CHAIN_BLOCKS = 64


class Rig:
    """A shard in memory of this process, full of cached prefixes, with a tier that has room for all of them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        geometry = KvGeometry("benchmark", "bfloat16", options.layers, 8, 128, BLOCK)
        self.blocks = int(options.gib * GIB) // geometry.block_bytes
        self.store = HostBlockStore.private("kv_pool-0", geometry, self.blocks)
        table = AllocationTable(memoryview(bytearray(table_bytes(self.blocks, BLOCK))), geometry, self.blocks)
        self.index = PrefixIndex(table.open_index(), BLOCK, LruPolicy())
        self.pool = KvPool("kv_pool-0", table, BLOCK, index=self.index)
        self.prefixes = [
            [number, *range(CHAIN_BLOCKS * BLOCK - 1)] for number in range(1, self.blocks // CHAIN_BLOCKS + 1)
        ]
        size = 1.1 * options.gib + 0.1
        config = Config(kv_pool=KvPoolConfig(prefix_cache=True, disk_path=str(folder), disk_gib=size))
        model = ModelInfo("benchmark", str(folder), "llama", "bfloat16", 32, 8, 128, 1, 1, (), {}, 0)

        async def settled() -> None:
            return

        shard = Shard(self.pool, self.index, self.store, list, settled, contextlib.nullcontext)
        self.tier = DiskTier(config, "kv_pool-0", model, shard)

    def fill(self) -> None:
        """Cache the prefixes. Every block has bytes of its own."""
        for tokens in self.prefixes:
            (grant,) = self.pool.want(WRITER, CHAIN_BLOCKS)
            for block in grant.block_ids:
                self.store.blocks[block] = block & 0xFF
                self.store.blocks[block, :8] = list(block.to_bytes(8, "little"))
            self.pool.cache(WRITER, ROOT, tokens, list(grant.block_ids), 0)

    def forget(self) -> None:
        (grant,) = self.pool.want(WRITER, self.blocks)
        self.pool.give_back(WRITER, grant.block_ids)

    async def write(self) -> float:
        """Bytes per second of demotion."""
        assert self.tier._opened is not None
        demotion = self.tier._opened.demotion
        demotion._ahead = self.blocks
        before, begun = demotion.written_bytes, time.perf_counter()
        while await demotion.step():
            pass
        return (demotion.written_bytes - before) / (time.perf_counter() - begun)

    async def read(self) -> float:
        """Bytes per second of promotion, prefix after prefix."""
        assert self.tier._opened is not None
        promotion = self.tier._opened.promotion
        before, begun = promotion.read_bytes, time.perf_counter()
        for tokens in self.prefixes:
            await promotion.promote(ROOT, [*tokens, 0], len(tokens) + 1)
        found = promotion.read_bytes - before
        if found < len(self.prefixes) * CHAIN_BLOCKS * self.store.block_bytes:
            raise SystemExit(f"only {found} bytes were read: {promotion.breaker.faults} faults")
        return found / (time.perf_counter() - begun)


def fio(folder: Path, doing: str, jobs: int, size: int) -> float:
    """Bytes per second of fio with `jobs` threads that each read or write their part of `size` bytes."""
    command = ["fio", f"--name={doing}", f"--rw={doing}", f"--bs={PIECE_BYTES}", "--direct=1", "--ioengine=psync"]
    command += [f"--numjobs={jobs}", f"--size={size // jobs // PIECE_BYTES * PIECE_BYTES}", "--thread"]
    command += ["--filename_format=fio.$jobnum", f"--directory={folder}", "--group_reporting", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0][doing]["bw_bytes"])


def remove_files(folder: Path) -> None:
    for file in folder.glob("fio.*"):
        file.unlink()


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"write": [], "read": [], "fio write": [], "fio read": []}
    size = int(options.gib * GIB)
    for number in range(options.rounds):
        rig = Rig(options, folder / f"tier-{number}")
        await rig.tier.start(required=True)
        rig.fill()
        found["write"].append(await rig.write())
        remove_files(folder)  # fio, too, writes to a new file
        found["fio write"].append(fio(folder, "write", WRITERS, size))
        rig.forget()
        found["read"].append(await rig.read())
        fio(folder, "write", READERS, size)  # files for as many readers
        found["fio read"].append(fio(folder, "read", READERS, size))
        await rig.tier.close()
        shutil.rmtree(folder / f"tier-{number}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the folder for temporary files")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32, help="of a model with 8 KV heads of 128 in bfloat16")
    parser.add_argument("--prefix", type=int, default=32768)
    parser.add_argument("--cost-model", default="rtxpro6000-llama-3.1-8b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed: apt-get install fio, or dnf install fio")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="disk-tier-") as folder:
        found = asyncio.run(measure(options, Path(folder)))
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    for doing in ("write", "read"):
        ratio = medians[doing] / medians[f"fio {doing}"]
        print(f"{doing}: {medians[doing] / 1e9:.2f} GB/s, fio {medians[f'fio {doing}'] / 1e9:.2f} GB/s: {ratio:.2f}")
    cost = load_step_cost(options.cost_model)
    begins = range(0, options.prefix, CHUNK_TOKENS)
    compute_s = sum(cost.step_s([ChunkShape(min(CHUNK_TOKENS, options.prefix - at), at)], ()) for at in begins)
    size = options.prefix * KvGeometry("", "bfloat16", options.layers, 8, 128, BLOCK).token_bytes
    for name, rate in (("this disk", medians["read"]), ("3 GB/s", 3e9), ("7 GB/s", 7e9), ("14 GB/s", 14e9)):
        print(
            f"{options.prefix} tokens, {size / GIB:.2f} GiB: {size / rate:.2f} s from {name}, computed in "
            f"{compute_s:.2f} s ({options.cost_model}): {size / rate / compute_s:.2f} times"
        )
    if options.json:
        options.json.write_text(json.dumps({"rates": found, "compute_s": compute_s, "prefix_bytes": size}, indent=1))


if __name__ == "__main__":
    main()
