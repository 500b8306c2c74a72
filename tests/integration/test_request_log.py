"""Real workers stamp every stage of a request; two gateways write one log; the simulator replays it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.simulator.traces import Load, read_trace
from support.gateway_process import GatewayProcess

STAGES = ("queue", "prefill", "pool", "prefetch", "handover", "decode")


async def test_two_gateways_write_a_log_that_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    tree = {
        "cluster": {"device": "cpu", "threads": 1},
        "kv_pool": {"size_gib": 0.1},
        "gateway": {"request_log": str(file)},
    }
    lengths = [(8 + 5 * number, 4 + number % 5) for number in range(10)]
    async with LocalCluster(from_tree(tree)) as cluster:
        await cluster.wait_ready()
        async with (
            GatewayProcess(cluster, "gateway-0") as one,
            GatewayProcess(cluster, "gateway-1") as two,
            httpx.AsyncClient(timeout=60.0) as http,
        ):

            async def ask(number: int, prompt: int, output: int) -> None:
                body = {"prompt": [100 + number] * prompt, "max_tokens": output, "ignore_eos": True}
                reply = await http.post(f"{(one, two)[number % 2].url}/v1/completions", json=body)
                assert reply.status_code == 200, reply.text

            await asyncio.gather(*(ask(number, *shape) for number, shape in enumerate(lengths)))
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert {entry["gateway_id"] for entry in entries} == {"gateway-0", "gateway-1"}
    for entry in entries:
        stamps = [entry[f"{stage}_unix_s"] for stage in STAGES]
        assert stamps == sorted(stamps), entry
        assert entry["arrival_unix_s"] <= stamps[0]
        assert entry["prefill_unix_s"] <= entry["first_token_unix_s"] <= entry["second_token_unix_s"]
        assert entry["second_token_unix_s"] >= entry["decode_unix_s"]
        assert entry["outcome"] == "length"
    workload = read_trace(str(file)).workload(Load(), 0)
    assert sorted((a.input_tokens, a.output_tokens) for a in workload.arrivals) == sorted(lengths)
