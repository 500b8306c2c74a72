"""`serve deploy` of changed configurations, and `alignedserve restart`, under greedy streams.

    python benchmarks/redeploy.py [--streams 16] [--tokens 200] [--proxy haproxy] [--only gateway,restart]

Half of the streams use our client over gRPC, the others the `openai` package over HTTP, all with default settings. Each
sends its next request after its answer. Every answer is compared with one from an undisturbed run. A pause is the
longest time that any stream waited for its next token, from its request on. Exit status 1 if a request failed or a
token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rigs  # noqa: F401
import yaml

from support.endless_streams import EndlessStreams
from support.ray_head import RayHead

SERVE_YAML = Path(__file__).parents[1] / "deploy" / "serve.yaml"
SETTLED_WITHIN_S = 300.0
AFTER_S = 3.0  # streams go on for this time after the cluster has settled
HEADER = ("what", "answers", "failed", "other tokens", "seconds", "longest pause", "new processes")


@dataclass(frozen=True, slots=True)
class Step:
    """`change` is merged into the arguments; None: run `alignedserve restart` instead. `calm`: the undisturbed run."""

    name: str
    change: dict[str, dict[str, Any]] | None = field(default_factory=dict)
    calm_s: float = 0.0


STEPS = (
    Step("nothing happens", calm_s=20.0),
    Step("deploy, unchanged"),
    Step("deploy, a gateway key", {"gateway": {"max_queue": 900}}),
    Step("deploy, a scheduler key", {"scheduler": {"min_batch_requests": 20}}),
    Step("deploy, decode: 2", {"cluster": {"decode": 2}}),
    Step("restart, every role", None),
    Step("deploy, another pool", {"kv_pool": {"size_gib": 0.25}}),
)


class Bench:
    """One application on its own Ray cluster."""

    def __init__(self, head: RayHead, config: dict[str, Any], streams: int, tokens: int) -> None:
        self._head = head
        self._config = config
        self._streams = streams
        self._tokens = tokens

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        arguments: dict[str, dict[str, Any]] = self._config["applications"][0]["args"]
        return arguments

    async def run(self, step: Step) -> tuple[list[str], bool]:
        """A row of the table, and whether all answers were correct."""
        before = await self._pids()
        load = EndlessStreams(self._head.url, self._head.grpc_address, count=self._streams, tokens=self._tokens)
        async with load:
            begun = time.monotonic()
            if step.calm_s:
                await asyncio.sleep(step.calm_s)
            elif step.change is None:
                await self._restart()
            else:
                for section, keys in step.change.items():
                    self.arguments.setdefault(section, {}).update(keys)
                await asyncio.to_thread(self._head.deploy, self._config)
                await self._settled()
            seconds = time.monotonic() - begun
            await asyncio.sleep(AFTER_S)
        report, after = load.report, await self._pids()
        for line in (*report.failed, *report.different):
            print(f"  {line}", file=sys.stderr)
        new = [name for name, pid in after.items() if before.get(name) != pid]
        kinds = ", ".join(sorted({name.rpartition("-")[0] for name in new})) or "none"
        counts = (report.answers, len(report.failed), len(report.different))
        row = [step.name, *map(str, counts), f"{seconds:.1f} s", f"{report.longest_pause_s:.1f} s"]
        return [*row, f"{len(new)}: {kinds}" if new else "none"], not (report.failed or report.different)

    async def _restart(self) -> None:
        done = await asyncio.to_thread(self._head.alignedserve, "restart", "--url", self._head.url, timeout_s=600.0)
        if done.returncode:
            raise RuntimeError(done.stderr)

    async def _status(self) -> dict[str, Any] | None:
        done = await asyncio.to_thread(self._head.alignedserve, "status", "--json", "--url", self._head.url)
        return json.loads(done.stdout) if done.returncode == 0 else None

    async def _pids(self) -> dict[str, int]:
        status = await self._status()
        if status is None:
            raise RuntimeError("the cluster does not report its processes")
        return {role["id"]: role["pid"] for role in status["roles"]}

    async def _settled(self) -> None:
        """Wait until the cluster matches its configuration, and stays so for a moment."""
        deadline = time.monotonic() + SETTLED_WITHIN_S
        calm = 0
        while calm < 3:
            status = await self._status() or {}
            decode = [role for role in status.get("roles", ()) if role["role"] == "decode" and role["state"] == "ready"]
            done = status.get("state") == "ready" and status.get("restart", {}).get("done", True)
            calm = calm + 1 if done and len(decode) == self.arguments["cluster"]["decode"] else 0
            if time.monotonic() > deadline:
                raise TimeoutError(f"not settled within {SETTLED_WITHIN_S:g} s: {status}")
            await asyncio.sleep(0.2)


async def measure(options: argparse.Namespace) -> bool:
    config = yaml.safe_load(SERVE_YAML.read_text(encoding="utf-8"))
    arguments = config["applications"][0]["args"]
    arguments["kv_pool"] = {"size_gib": 0.2}
    steps = [step for step in STEPS if not options.only or any(word in step.name for word in options.only.split(","))]
    print(f"{options.streams} streams of {options.tokens} tokens, proxy: {options.proxy}\n")
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    right = True
    with RayHead(proxy=options.proxy) as head:
        head.deploy(config)
        bench = Bench(head, config, options.streams, options.tokens)
        for step in steps:
            row, all_right = await bench.run(step)
            print(f"| {' | '.join(row)} |", flush=True)
            right = right and all_right
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--proxy", choices=("haproxy", "python"), default="haproxy")
    parser.add_argument("--only", default="", help="words, separated by commas, of the steps to take")
    return 0 if asyncio.run(measure(parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())
