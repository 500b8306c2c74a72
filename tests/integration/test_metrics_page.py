"""The page of the metrics has what a cluster exports, with type, labels and help, and nothing else."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import load
from alignedserve.control.samples import merge
from alignedserve.errors import UnavailableError
from alignedserve.gateway.metrics import GatewayMetrics
from alignedserve.grammar.compiled import GrammarMeter
from alignedserve.metrics import PREFIX, Page
from alignedserve.ranks.now import RankNow, show_ranks
from alignedserve.request import SamplingParams
from alignedserve.scheduler.systems import served_settings
from alignedserve.testing.models import make_model
from support.driver import Driver
from support.metrics_page import Metric, described

ROOT = Path(__file__).parents[2]
ON_A_GPU = re.compile(r"decode_(graph|eager|sampled)_|_page_lock")  # what a CPU has none of
VOCAB_SIZE = 400


def exported(folder: Path) -> tuple[str, dict[str, str]]:
    """Metrics of a cluster with everything on that exports more: checksums, prefix cache, cost model, layerwise.

    And the own pages of its processes, by their ids.
    """
    keys = {
        "model.path": str(make_model("llama", folder / "m", seed=41, vocab_size=VOCAB_SIZE)),
        "cluster.device": "cpu",
        "cluster.threads": 1,
        "cluster.role_metrics": True,
        "kv_pool.size_gib": 0.1,
        "kv_pool.verify": True,
        "kv_pool.prefix_cache": True,
        "kv_pool.disk_path": str(folder / "kv"),
        "kv_pool.disk_gib": 0.05,
        "prefill.layerwise_tokens": 8,
        "scheduler.cost_model": "rtxpro6000-llama-3.1-8b",
        "supervisor.heartbeat_s": 0.2,
    }
    config = load(environ={}, flags=keys, settings_of=served_settings)

    async def run() -> tuple[str, dict[str, str]]:
        async with LocalCluster(config, output_dir=folder) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token) as driver:
                await driver.wait(driver.submit(range(1, 40), SamplingParams(temperature=0.0, max_tokens=4)))
            own = {}
            for peer in cluster.view().peers:
                host = peer.address.rpartition(":")[0]
                async with httpx.AsyncClient(base_url=f"http://{host}:{peer.metrics_port}") as http:
                    own[peer.process.id] = (await http.get("/metrics")).text
                    assert (await http.get("/")).status_code == 404
            return (await cluster.status()).metrics, own

    return asyncio.run(run())


def test_the_page_describes_every_metric_that_a_cluster_exports(tmp_path: Path) -> None:
    gateway = GatewayMetrics("gateway-0")
    gateway.on_call_failed(UnavailableError("nothing"))
    grammars = Page(instance="decode-0")  # of processes of a model with a tokenizer
    GrammarMeter().show_metrics(grammars)
    ranks = Page(instance="decode-0")  # of an instance of several
    show_ranks(ranks, [RankNow(0, 1), RankNow(1, 2)])
    page, found = described(), {}
    whole, own = exported(tmp_path)
    assert own.keys() >= {"scheduler-0", "kv_pool-0", "prefill-0", "decode-0", "node_agent-0"}
    for name, text in own.items():
        assert not text or f'instance="{name}"' in text
        assert {line for line in text.splitlines() if line.startswith("# HELP")} <= set(whole.splitlines()), name
    assert "alignedserve_decode_iterations_total" in own["decode-0"]
    for family in text_string_to_metric_families(merge([whole, gateway.text(), grammars.text(), ranks.text()])):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert len(labels) == 1, name
        found[name] = Metric(family.type, labels.pop(), family.documentation)
    assert found == {name: metric for name, metric in page.items() if not ON_A_GPU.search(name)}


def test_what_only_a_gpu_exports_is_named_in_the_code() -> None:
    sources = "".join(
        file.read_text(encoding="utf-8") for top in ("engine", "transfer") for file in (ROOT / top).rglob("*.py")
    )
    of_gpu = {name.removeprefix(PREFIX): metric for name, metric in described().items() if ON_A_GPU.search(name)}
    assert of_gpu
    assert [name for name, metric in of_gpu.items() if name not in sources or metric.meaning not in sources] == []
