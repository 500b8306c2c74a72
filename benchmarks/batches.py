"""Offline batches: what interactive requests feel of one beside them, and whether `kill -9` costs or repeats a line.

One run against `alignedserve serve` with two gateways and a store. First an interactive load (Poisson) runs in turn
without and with a batch (A B B A), and the percentiles of its TTFT and TPOT are compared. Then a batch of `--lines` is
answered while processes of every role are killed in turn, and each line's answer is counted.

    python benchmarks/batches.py --lines 100000 --line-tokens 1 --json batches.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from alignedserve.cluster.cli.open_loop import Load, drive_apart
from alignedserve.cluster.cli.serve_process import ServeProcess

ENDPOINT = "/v1/completions"
ROLES = ("decode", "prefill", "kv_pool", "scheduler", "gateway", "node_agent", "supervisor")
POLL_S = 0.2
SHOW_EVERY_S = 30.0
SETTLE_S = 20.0  # after the last kill: the cluster is whole again


def write_lines(path: Path, lines: int, prompt_tokens: int, new_tokens: int, spread: int = 64) -> None:
    """Prompts have from `prompt_tokens` to, but not with, `prompt_tokens + spread` tokens."""
    with path.open("w") as file:
        for number in range(lines):
            prompt = [10 + (number * 7 + k) % 1900 for k in range(prompt_tokens + number % spread)]
            body = {"prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
            row = {"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(row) + "\n")


class Client:
    """Calls are repeated while no gateway answers. They raise RuntimeError once the server has ended."""

    def __init__(self, server: ServeProcess) -> None:
        self._server = server
        self._http = httpx.AsyncClient(base_url=server.url, timeout=60.0)

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        while True:
            try:
                answer = await self._http.request(method, path, **options)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code < 300:
                return answer
            if answer is not None and answer.status_code < 500 and answer.status_code != 429:
                raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
            if self._server.process.poll() is not None:
                raise RuntimeError(f"the server has ended: {self._server.output[-1000:]}")
            await asyncio.sleep(POLL_S)

    async def begin(self, path: Path) -> str:
        content = await asyncio.to_thread(path.read_bytes)
        file = (await self.ask("POST", "/v1/files", data={"purpose": "batch"}, files={"file": content})).json()
        body = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        return str((await self.ask("POST", "/v1/batches", json=body)).json()["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.ask("GET", f"/v1/batches/{batch_id}")).json()
        return found

    async def until(self, batch_id: str, *statuses: str, show: bool = False) -> dict[str, Any]:
        shown_s = time.monotonic()
        while (batch := await self.batch(batch_id))["status"] not in statuses:
            if show and time.monotonic() - shown_s >= SHOW_EVERY_S:
                shown_s = time.monotonic()
                print(batch["status"], batch["request_counts"], file=sys.stderr, flush=True)
            await asyncio.sleep(POLL_S)
        return batch

    async def rows(self, file_id: str) -> AsyncIterator[Any]:
        """The rows of a file, which may be larger than memory."""
        async with self._http.stream("GET", f"/v1/files/{file_id}/content") as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line:
                    yield json.loads(line)


def percentiles_ms(values: list[float]) -> dict[str, float]:
    found = statistics.quantiles(values, n=100)
    return {"p50": round(found[49] * 1e3, 1), "p99": round(found[98] * 1e3, 1)}


async def phase(
    server: ServeProcess, client: Client, options: argparse.Namespace, batch: Path | None
) -> dict[str, Any]:
    """The interactive load once, beside a batch if one is given, which is cancelled at the end."""
    batch_id, before = "", 0
    if batch is not None:
        batch_id = await client.begin(batch)
        await client.until(batch_id, "in_progress")
        before = (await client.batch(batch_id))["request_counts"]["completed"]
    load = Load(server.port, options.rate, options.seconds, options.prompt_tokens, options.new_tokens)
    outcome = await drive_apart(load)
    line: dict[str, Any] = {
        "batch": batch is not None,
        "ended": len(outcome.served),
        "refused": outcome.refused,
        "errors": outcome.errors,
        "ttft_ms": percentiles_ms([served.ttft_s for served in outcome.served]),
        "tpot_ms": percentiles_ms([served.tpot_s for served in outcome.served]),
    }
    if batch is not None:
        now = await client.batch(batch_id)
        assert now["status"] == "in_progress", "the batch ended before the load: give it more --beside lines"
        line["lines_per_s"] = round((now["request_counts"]["completed"] - before) / options.seconds, 1)
        await client.ask("POST", f"/v1/batches/{batch_id}/cancel")
        await client.until(batch_id, "cancelled")
    print(json.dumps(line), flush=True)
    return line


async def beside(server: ServeProcess, client: Client, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = folder / "beside.jsonl"
    write_lines(path, options.beside, options.prompt_tokens, options.new_tokens)
    await drive_apart(Load(server.port, 0, 3.0, options.prompt_tokens, options.new_tokens))
    lines = [await phase(server, client, options, path if number in (1, 2) else None) for number in range(4)]
    ratios = {}
    for name in ("ttft_ms", "tpot_ms"):
        for quantile in ("p50", "p99"):
            with_batch, without = (
                statistics.fmean(line[name][quantile] for line in lines if line["batch"] is wanted)
                for wanted in (True, False)
            )
            ratios[f"{name.removesuffix('_ms')}_{quantile}"] = round(with_batch / without, 2)
    return {"lines": lines, "with_over_without": ratios}


async def kill_in_turn(server: ServeProcess, kills: list[str], every_s: float) -> None:
    """Kills a process of each role in turn, and of several with a role each in turn."""
    while True:
        await asyncio.sleep(every_s)
        round_, number = divmod(len(kills), len(ROLES))
        with contextlib.suppress(OSError, ValueError):  # no gateway answers, or the process has just ended
            roles = await asyncio.to_thread(server.roles)
            found = [r for r in roles if r["role"] == ROLES[number] and r["state"] in ("ready", "degraded")]
            if found:
                os.kill(found[round_ % len(found)]["pid"], signal.SIGKILL)
                kills.append(ROLES[number])


async def killed(server: ServeProcess, client: Client, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = folder / "killed.jsonl"
    write_lines(path, options.lines, 8, options.line_tokens, options.line_spread)
    begun_s, kills = time.monotonic(), list[str]()
    batch_id = await client.begin(path)
    killing = asyncio.create_task(kill_in_turn(server, kills, options.kill_every)) if options.kill_every else None
    try:
        async with asyncio.timeout(options.most_s):
            batch = await client.until(batch_id, "completed", "failed", "expired", "cancelled", show=True)
    finally:
        if killing is not None:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
    seconds = time.monotonic() - begun_s
    await asyncio.sleep(SETTLE_S)
    found: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        async for row in client.rows(file_id):
            found[row["custom_id"]] += 1
            statuses[row["response"]["status_code"]] += 1
    return {
        "status": batch["status"],
        "counts": batch["request_counts"],
        "seconds": round(seconds, 1),
        "lines_per_s": round(options.lines / seconds, 1),
        "kills": dict(Counter(kills)),
        "lost": options.lines - len(found),
        "twice": sum(count > 1 for count in found.values()),
        "statuses": {str(status): count for status, count in statuses.items()},
    }


async def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = ("--batches-folder", str(folder / "store"), "--set", "gateway.replicas=2")
        with ServeProcess("--model", "tiny", *keys, *options.serve, timeout_s=600.0) as server:
            client = Client(server)
            result = {}
            if options.beside:
                result["beside"] = await beside(server, client, options, folder)
                print(json.dumps(result["beside"]["with_over_without"]), flush=True)
            if options.lines:
                result["killed"] = await killed(server, client, options, folder)
                print(json.dumps(result["killed"]), flush=True)
            server.check_integrity()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase of the interactive load")
    parser.add_argument("--rate", type=float, default=2.0, help="interactive requests per second")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument(
        "--beside", type=int, default=20_000, help="lines of the batch beside the load; 0: no such part"
    )
    parser.add_argument("--lines", type=int, default=2000, help="lines of the batch under kills; 0: no such part")
    parser.add_argument("--line-tokens", type=int, default=4, help="tokens of each of its answers")
    parser.add_argument("--line-spread", type=int, default=24, help="its prompts have 8 tokens to so many more")
    parser.add_argument("--kill-every", type=float, default=8.0, help="seconds between two kills; 0: none")
    parser.add_argument("--most-s", type=float, default=7200.0, help="time limit of the batch under kills")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options for `alignedserve serve`; last")
    options = parser.parse_args()
    result = asyncio.run(benchmark(options))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    killed_part = result.get("killed", {})
    whole = killed_part.get("status", "completed") == "completed"
    return 1 if not whole or killed_part.get("lost") or killed_part.get("twice") else 0


if __name__ == "__main__":
    sys.exit(main())
