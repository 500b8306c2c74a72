"""Instances of several ranks as `alignedserve serve` starts them: forked, behind its front, with a spare."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from alignedserve.cluster.cli.serve_process import ServeProcess
from support.leftovers import none_left_behind
from support.serving import wait_ready
from support.started import ranks_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
no_process_is_left_behind = pytest.fixture(autouse=True)(none_left_behind)

DEGREES = ("--prefill-tp", "2", "--decode-pp", "2", "--spares", "1")
TOKENS = 150


@pytest.fixture
def server() -> Iterator[ServeProcess]:
    with ServeProcess(*DEGREES, environment={"ALIGNEDSERVE_KV_POOL__SIZE_GIB": "0.2"}) as running:
        yield running
        running.check_integrity()


def rank_of(pid: int) -> int:
    """The pid of the other rank of an instance, which is a fork, too."""
    (other,) = ranks_of(pid)
    assert b"launch.fork_server" in Path(f"/proc/{other}/cmdline").read_bytes()
    return other


def test_ranks_answer_and_are_replaced_by_a_spare_with_its_own(server: ServeProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def pieces() -> Iterator[str]:
        asked = {"model": "tiny", "prompt": "Return a list of", "max_tokens": TOKENS, "temperature": 0}
        for chunk in client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}):
            yield chunk.choices[0].text if chunk.choices else ""

    expected = "".join(pieces())
    pids = {role["id"]: role["pid"] for role in server.roles()}
    spare = wait_ready(server, "spare-0", timeout_s=60.0)  # it joins after the cluster is ready
    for role_id in ("decode-0", "prefill-0"):
        other, stream = rank_of(pids[role_id]), pieces()
        begun = "".join(next(stream) for _ in range(5))
        os.kill(other, signal.SIGKILL)
        assert begun + "".join(stream) == expected
        again = wait_ready(server, role_id, pids[role_id], timeout_s=60.0)
        assert role_id == "prefill-0" or again == spare
        rank_of(again)
        assert "".join(pieces()) == expected
