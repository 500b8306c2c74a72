"""The page of the metrics names what a cluster exports, with its type and labels, and nothing else."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import load
from alignedserve.errors import UnavailableError
from alignedserve.gateway.metrics import GatewayMetrics
from alignedserve.request import SamplingParams
from alignedserve.scheduler.systems import served_settings
from alignedserve.testing.models import make_model
from support.driver import Driver

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operations/metrics.md"
ROW = re.compile(r"^\| `(alignedserve_\w+)` \| (\w+) \| ([^|]+) \|", re.MULTILINE)
SAMPLE = re.compile(r"^(alignedserve_\w+)(?:\{(.*)\})? \S+$", re.MULTILINE)
ON_A_GPU = re.compile(r"decode_(graph|eager|sampled)_|_page_lock")  # what a CPU has none of
VOCAB_SIZE = 400


def described() -> dict[str, tuple[str, str]]:
    """`name -> (type, labels)` of the page."""
    return {name: (kind, labels.strip()) for name, kind, labels in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def exported(folder: Path) -> str:
    """Metrics of a cluster with everything on that exports more: checksums, a cost model, offload by layer."""
    keys = {
        "model.path": str(make_model("llama", folder / "m", seed=41, vocab_size=VOCAB_SIZE)),
        "cluster.device": "cpu",
        "cluster.threads": 1,
        "kv_pool.size_gib": 0.1,
        "kv_pool.verify": True,
        "prefill.layerwise_tokens": 8,
        "scheduler.cost_model": "rtxpro6000-llama-3.1-8b",
        "supervisor.heartbeat_s": 0.2,
    }
    config = load(environ={}, flags=keys, settings_of=served_settings)

    async def run() -> str:
        async with LocalCluster(config, output_dir=folder) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token) as driver:
                await driver.wait(driver.submit(range(1, 40), SamplingParams(temperature=0.0, max_tokens=4)))
            return (await cluster.status()).metrics

    return asyncio.run(run())


def family(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_the_page_describes_every_metric_that_a_cluster_exports(tmp_path: Path) -> None:
    gateway = GatewayMetrics("gateway-0")
    gateway.on_call_failed(UnavailableError("nothing"))
    text = exported(tmp_path) + gateway.text()
    page = described()
    found = {(family(name), labels) for name, labels in SAMPLE.findall(text)}
    assert {name for name, _ in found} - set(page) == set()
    assert {name for name in set(page) - {name for name, _ in found} if not ON_A_GPU.search(name)} == set()
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, flags=re.MULTILINE))
    assert {name: kind for name, (kind, _) in page.items() if types.get(name, kind) != kind} == {}
    for name, labels in found:
        used = {label for label in re.findall(r'(\w+)="', labels) if label != "le"}
        told = set(re.findall(r"`(\w+)`", page[name][1]))
        assert used == told or page[name][1] == "the same", (
            f"{name}: the page says {told or 'no labels'}, it has {used}"
        )


def test_what_only_a_gpu_exports_is_named_in_the_code() -> None:
    sources = "".join(
        file.read_text(encoding="utf-8") for top in ("engine", "transfer") for file in (ROOT / top).rglob("*.py")
    )
    names = [name.removeprefix("alignedserve_") for name in described() if ON_A_GPU.search(name)]
    assert names
    assert [name for name in names if name not in sources] == []
