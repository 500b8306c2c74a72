"""`alignedserve serve --policy`, Ray and all: the class that forms batches is the one that was asked for."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.control.samples import value

pytestmark = pytest.mark.cluster

OWN = """
from pathlib import Path
from alignedserve.scheduler.policies.fcfs import FcfsPolicy


class Told(FcfsPolicy):
    def form(self, limits, seed, now_s):
        batch = super().form(limits, seed, now_s)
        with Path({file!r}).open("a") as lines:
            lines.write("".join(f"{{entry.tokens}} " for entry in batch))
        return batch
"""


def decides(server: ServeProcess, policy: str) -> bool:
    """As the scheduler's next heartbeat says."""
    deadline_s = time.monotonic() + 10.0
    while not value(metrics := httpx.get(f"{server.url}/metrics", timeout=30).text, "alignedserve_scheduler_policy"):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return value(metrics, "alignedserve_scheduler_policy", policy=policy) == 1


def complete(server: ServeProcess, prompts: list[list[int]]) -> None:
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 8, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * len(prompts)
    server.check_integrity()


@pytest.mark.slow
def test_a_policy_by_name() -> None:
    with ServeProcess("--model", "tiny", "--policy", "fcfs") as server:
        complete(server, [[5] * 20, [6] * 200])
        assert decides(server, "alignedserve.scheduler.policies.fcfs:FcfsPolicy")


@pytest.mark.slow
def test_a_class_in_the_folder_of_the_command(tmp_path: Path) -> None:
    formed = tmp_path / "formed.txt"
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "policies.py").write_text(OWN.format(file=str(formed)))
    with ServeProcess("--model", "tiny", "--policy", "my_package.policies:Told", folder=tmp_path) as server:
        complete(server, [[5] * 20, [6] * 200])
        assert decides(server, "my_package.policies:Told")
        lengths = {int(tokens) for tokens in formed.read_text().split()}
        assert lengths & {20, 200}  # one may have joined late, without being in a batch that was formed
        assert lengths <= {1, 20, 200}  # 1: a probe of one token, which a request for /health may cause
