"""Several nodes: placement, traffic between nodes, exact tokens, recovery, and throughput compared with one node.

The nodes are network namespaces on one machine, connected by veth pairs (needs root). Copies between them use the
machine's TCP, and all nodes share its cores. With GPUs and a real network the figures differ.

    python benchmarks/nodes.py --rounds 3 --json nodes.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rigs  # noqa: F401
from mixed_load import MixedLoad

from alignedserve.client import AsyncClient
from alignedserve.cluster.cli.live_command import busy_channels
from alignedserve.cluster.cli.status_command import table
from alignedserve.model import resolve_model
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import random_prompts
from support.greedy_streams import Expected, stream
from support.namespaces import why_not
from support.ray_nodes import RayNodes, ServedNodes

DECODE_NODE = 1
LENGTHS, NEW_TOKENS = (60, 33, 140, 17, 100, 64), 300
SHORT_CUT_S = 3.0
LOAD = MixedLoad(requests=48, short_share=0.7, short=(16, 96), long=(300, 900), answer=(48, 96), seed=7)
BACK_S = 120.0


def tree(model: str, **cluster: Any) -> dict[str, Any]:
    resources = {"prefill_resources": "prefill_node=1", "decode_resources": "decode_node=1"}
    return {
        "model": {"path": model},
        "cluster": {"device": "cpu", "threads": 1, **resources, **cluster},
        "kv_pool": {"size_gib": 0.2},
    }


def placement(served: ServedNodes) -> list[list[str]]:
    rows = [
        [role["node"], role["id"].partition("-")[0] if role["role"] == "gateway" else role["id"], role["address"]]
        for role in served.status()["roles"]
    ]
    return sorted(rows)


def channels(served: ServedNodes) -> list[list[str]]:
    return [
        [f"{c['source']} -> {c['destination']}", c["channel"], str(c["copies"]), f"{c['bytes'] / 2**20:.2f}"]
        for c in busy_channels(served.metrics())
        if c["copies"]
    ]


class Trouble:
    """Cause one event after another, each in the middle of streams whose tokens are known."""

    def __init__(self, nodes: RayNodes, served: ServedNodes, expected: Expected) -> None:
        self._nodes, self._served, self._expected = nodes, served, expected
        self.rows: list[dict[str, Any]] = []

    def run(self, what: str, blow: Callable[[], object], until: str) -> None:
        """The longest pause of a stream, and the time from the blow until all roles were ready, both in seconds."""
        print(f"  {what} ...", flush=True)
        streamed = asyncio.run(stream(self._served.grpc_address, self._expected, blow, timeout_s=BACK_S))
        self._served.wait_ready(BACK_S)
        ready_s = time.monotonic() - streamed.blown_s
        exact = streamed.tokens == [list(answer) for answer in self._expected.answers]
        self.rows.append(
            {"what": what, "exact": exact, "silent_s": streamed.silent_s, "ready_s": ready_s, "until": until}
        )

    def shard_process(self) -> None:
        pid = next(role["pid"] for role in self._served.status()["roles"] if role["id"] == "kv_pool-0")
        self.run("shard process kv_pool-0 killed", lambda: self._nodes.head.kill(pid), "its successor")

    def short_cut(self) -> None:
        machine = self._nodes.machines[DECODE_NODE]

        def blow() -> None:
            self._nodes.switch.cut(machine)
            time.sleep(SHORT_CUT_S)
            self._nodes.switch.heal(machine)

        self.run(f"decode node cut off for {SHORT_CUT_S:g} s", blow, "the same processes")

    def long_cut(self) -> None:
        machine = self._nodes.machines[DECODE_NODE]

        def blow() -> None:
            self._nodes.switch.cut(machine)
            self._nodes.wait(lambda: machine.name not in self._nodes.alive(), "Ray still counts the machine")
            self._nodes.switch.heal(machine)
            self._nodes.wait(lambda: not machine.pids("raylet"), "a raylet that Ray declared dead still runs")
            self._nodes.start_ray(DECODE_NODE)

        self.run("decode node cut off until Ray gave it up, healed, `ray start` again", blow, "new processes there")

    def killed(self) -> None:
        self._nodes.join({"decode_node": 1})
        self.run("decode node killed, another one idle", lambda: self._nodes.kill(DECODE_NODE), "the other node")


async def _throughput(address: str) -> float:
    """Output tokens per second of the mixed load, with all requests at once."""
    drawn = LOAD.draw()
    async with AsyncClient(address, timeout_s=600.0) as client:

        async def one(prompt: list[int], answer: int) -> int:
            done = await client.generate(prompt_token_ids=prompt, max_tokens=answer, temperature=0, ignore_eos=True)
            return len(done.choices[0].token_ids)

        begun = time.perf_counter()
        counts = await asyncio.gather(*(one(prompt, answer) for prompt, answer in drawn))
    return sum(counts) / (time.perf_counter() - begun)


def recovery(report: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="as-model-") as folder:
        model = make_model("llama", Path(folder) / "model", seed=51)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        expected = Expected.of(model, random_prompts(LENGTHS, vocab_size, seed=52), NEW_TOKENS)
        with (
            RayNodes([{"prefill_node": 1}, {"decode_node": 1}]) as nodes,
            ServedNodes(nodes, tree(str(model))) as served,
        ):
            stored = sum(nodes.object_store_bytes().values())  # stored by Serve for the deployment
            streamed = asyncio.run(stream(served.grpc_address, expected))
            report["placement"] = placement(served)
            report["channels"] = channels(served)
            report["exact"] = streamed.tokens == [list(answer) for answer in expected.answers]
            report["object_store_bytes"] = sum(nodes.object_store_bytes().values()) - stored
            trouble = Trouble(nodes, served, expected)
            for step in (trouble.shard_process, trouble.short_cut, trouble.long_cut, trouble.killed):
                step()
            report["trouble"] = trouble.rows
            served.check_integrity()


def side_by_side(report: dict[str, Any], rounds: int) -> None:
    """Both clusters are up and take turns. The idle one slows the other a little, equally in both cases."""
    model = str(resolve_model("tiny"))
    with (
        RayNodes([{"prefill_node": 1, "decode_node": 1}]) as one,
        RayNodes([{"prefill_node": 1}, {"decode_node": 1}]) as two,
        ServedNodes(one, tree(model)) as on_one,
        ServedNodes(two, tree(model)) as on_two,
    ):
        rates: dict[str, list[float]] = {"one node": [], "two nodes": []}
        for number in range(rounds + 1):  # the first round warms both up
            for name, served in (("one node", on_one), ("two nodes", on_two)):
                rate = asyncio.run(_throughput(served.grpc_address))
                if number:
                    rates[name].append(rate)
        report["tokens_per_s"] = rates
        report["channels_of_two"] = channels(on_two)


def show(report: dict[str, Any]) -> None:
    if "placement" in report:
        print("\n".join(["placement", *table(("node", "role", "address"), report["placement"]), ""]))
        print("\n".join(["channels", *table(("from -> to", "channel", "copies", "MiB"), report["channels"]), ""]))
        exact = "yes" if report["exact"] else "NO"
        print(f"tokens exact: {exact}; into Ray's object store meanwhile: {report['object_store_bytes']} bytes\n")
        rows = [
            [r["what"], "yes" if r["exact"] else "NO", f"{r['silent_s']:.1f}", f"{r['ready_s']:.1f}", r["until"]]
            for r in report["trouble"]
        ]
        header = ("what", "tokens exact", "longest pause of a stream, s", "s until all roles were ready", "on")
        print("\n".join([*table(header, rows), ""]))
    if "tokens_per_s" in report:
        rates = report["tokens_per_s"]
        rows = [[name, *(f"{rate:.0f}" for rate in found)] for name, found in rates.items()]
        ratios = [two / one for one, two in zip(rates["one node"], rates["two nodes"], strict=True)]
        print("\n".join(table(("tokens/s", *(f"round {n + 1}" for n in range(len(ratios)))), rows)))
        print(f"two nodes over one, median of the rounds: {statistics.median(ratios):.2f}\n")
        print("\n".join(table(("from -> to", "channel", "copies", "MiB"), report["channels_of_two"])))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of the load on one node and on two")
    parser.add_argument("--only", choices=("recovery", "throughput"), help="one half")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args(argv)
    if reason := why_not():
        print(reason)
        return 1
    report: dict[str, Any] = {}
    if options.only != "throughput":
        recovery(report)
    if options.only != "recovery":
        side_by_side(report, options.rounds)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
