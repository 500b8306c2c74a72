"""The memory and CPU time of a waiting request in the scheduler's process, at 100,000 requests of 1,000 tokens.

The process's real server gets the messages of gateways, prefill instances and the pool, each parsed from its bytes,
without links. First all requests wait for their prefill, then all in the pool.

    python benchmarks/scheduler_memory.py --requests 100000 --prompt-tokens 1000 --json scheduler_memory.json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.process.actor import SchedulerServer

BLOCK = 16
GATEWAY = "gateway-0"


class NoLinks:
    """Counts the bytes that the scheduler sends to workers."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def send(self, role: str, instance_id: str, command: Any) -> bool:
        self.sent_bytes += len(command.SerializeToString())
        return True

    def send_all(self, role: str, command: Any) -> None:
        self.send(role, "", command)

    def send_pool(self, command: Any, pool_id: str = "") -> None:
        self.send("kv_pool", pool_id, command)

    def up(self, role: str) -> list[str]:
        return []


class Messages:
    """The submissions in the format of the installed package. `thin`: gateways send lengths, not prompts."""

    def __init__(self, prompt_tokens: int) -> None:
        self.tokens = prompt_tokens
        self.thin = hasattr(pb, "RequestHead")

    def submission(self, number: int) -> bytes:
        key = pb.RequestKey(request_id=f"cmpl-{number:024x}-0")
        shared = {"key": key, "gateway_id": GATEWAY, "group_id": f"cmpl-{number:024x}-g0#0", "group_size": 1}
        arrival_ns = time.time_ns()
        if self.thin:
            lengths = {"prompt_tokens": self.tokens, "max_tokens": 512, "submitted_ns": arrival_ns}
            requests: list[Any] = [pb.RequestHead(**shared, **lengths, arrival_ns=arrival_ns)]
        else:
            requests = [self._spec(number, shared, arrival_ns)]
        return sc.GatewayMessage(submit=sc.Submission(requests=requests)).SerializeToString()

    def _spec(self, number: int, shared: dict[str, Any], arrival_ns: int) -> pb.RequestSpec:
        values = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": number, "max_tokens": 512}
        return pb.RequestSpec(
            **shared,
            prompt_token_ids=[(number + position * 37) % 50_000 for position in range(self.tokens)],
            sampling=pb.SamplingParams(**values, eos_token_ids=[2]),
            gateway_address="10.0.0.1:12345",
            arrival_ns=arrival_ns,
            timings=pb.Timings(stage="queue", since_ns=arrival_ns),
        )

    def prefilled(self, number: int) -> bytes:
        blocks = range(number % 1000, number % 1000 + self.tokens // BLOCK + 1)
        key = pb.RequestKey(request_id=f"cmpl-{number:024x}-0")
        if self.thin:
            pooled = pb.PooledRequest(key=key, pool_id="kv_pool-0", kv_tokens=self.tokens, blocks=len(blocks))
            return pw.PrefillReport(prefilled=pooled).SerializeToString()
        shared = {"key": key, "gateway_id": GATEWAY, "group_id": f"cmpl-{number:024x}-g0#0", "group_size": 1}
        spec = self._spec(number, shared, time.time_ns())
        spec.output_token_ids.append(7)
        where = {"kv_tokens": self.tokens, "pool_tokens": self.tokens, "store_id": "kv_pool-0", "pool_id": "kv_pool-0"}
        stored = pb.StoredRequest(spec=spec, block_ids=blocks, pool_block_ids=blocks, prefill_id="prefill-0", **where)
        return pw.PrefillReport(prefilled=stored).SerializeToString()


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def new_server() -> tuple[SchedulerServer, NoLinks]:
    """A ready server, with a prefill instance that takes all requests and a pool with room for them."""
    config = {"scheduler": {"refuse_for_load": False}, "prefill": {"queue_tokens": 1 << 30}}
    server = SchedulerServer(RoleSettings("scheduler", "scheduler-0", {**to_tree(Config()), **config}, "cell", "token"))
    links = NoLinks()
    server._core = SchedulerCore(server.config, BLOCK)
    server._succession.over = True
    server._links = server._outgoing._links = links  # type: ignore[assignment]
    return server, links


def chunks(requests: int, most: int = 1000) -> Iterator[range]:
    for begin in range(0, requests, most):
        yield range(begin, min(requests, begin + most))


def measure(requests: int, prompt_tokens: int) -> list[dict[str, float | str]]:
    server, links = new_server()
    messages = Messages(prompt_tokens)
    before = resident_bytes()
    figures: list[dict[str, float | str]] = []

    def take(stage: str, spent_s: float, wire: int) -> None:
        each = (resident_bytes() - before) / requests
        figures.append(
            {"stage": stage, "bytes": each, "cpu_us": spent_s / requests * 1e6, "wire_bytes": wire / requests}
        )
        row = figures[-1]
        print(f"{stage:<22} {each:>12.0f} {row['cpu_us']:>12.1f} {row['wire_bytes']:>12.0f}", flush=True)

    print(f"{requests} requests of {prompt_tokens} tokens; of each, in the scheduler's process:")
    print(f"{'':<22} {'bytes':>12} {'CPU us':>12} {'on the wire':>12}")
    spent, wire = 0.0, 0
    for numbers in chunks(requests):
        data = [messages.submission(number) for number in numbers]
        wire += sum(map(len, data))
        begun = time.process_time()
        for message in data:
            server._on_gateway_message(GATEWAY, sc.GatewayMessage.FromString(message))
        spent += time.process_time() - begun
    take("queued for prefill", spent, wire)

    begun = time.process_time()
    open_cell(server, requests * (prompt_tokens // BLOCK + 1) * 4)
    spent, wire = time.process_time() - begun, links.sent_bytes
    for numbers in chunks(requests):
        data = [messages.prefilled(number) for number in numbers]
        wire += sum(map(len, data))
        begun = time.process_time()
        for message in data:
            server._on_report("prefill", "prefill-0", pw.PrefillReport.FromString(message))
        spent += time.process_time() - begun
    take("prefilled, in the pool", spent, wire)
    assert server._core is not None
    assert server._core.describe()["waiting_in_pool"] == requests
    server._core.check_integrity()
    return figures


def open_cell(server: SchedulerServer, pool_blocks: int) -> None:
    """A pool with room for all requests, a prefill instance that takes all, and no decode instance."""
    server._feed(ev.InstanceJoined("kv_pool", "kv_pool-0"))
    server._feed(ev.PoolReported("kv_pool-0", pool_blocks, pool_blocks))
    server._feed(ev.InstanceJoined("decode", "decode-0"))
    server._feed(ev.DecodeReported("decode-0", pool_blocks, pool_blocks, 0, 0, 0, 0, 0, 0))
    server._feed(ev.InstanceLost("decode", "decode-0"))
    server._feed(ev.InstanceJoined("prefill", "prefill-0"))
    server._feed(ev.PrefillReported("prefill-0", 0, pool_blocks, 0, 0, 0, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    async def within() -> list[dict[str, float | str]]:
        return measure(arguments.requests, arguments.prompt_tokens)

    figures = asyncio.run(within())
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
