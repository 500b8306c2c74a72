"""Clients of other projects, as published, against `alignedserve serve` with the model that ships.

Each runs its checks (`tests/clients`) in a process and an environment of its own. All share a server.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.model import resolve_model
from support.client_environments import checks_of, run_checks

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

CLIENTS = ("langchain", "litellm", "instructor", "pydantic_ai", "agents", "lm_eval", "guidellm", "aiperf")
CHECKS_S = 600.0


@pytest.fixture(scope="module")
def request_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def server(request_log: Path) -> Iterator[ServeProcess]:
    with ServeProcess("--request-log", str(request_log)) as running:
        yield running
        running.check_integrity()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_of_another_project_is_served(server: ServeProcess, request_log: Path, client: str) -> None:
    places = {
        "MODEL_FOLDER": str(resolve_model("tiny")),
        "FURTHER_PACKAGES": sysconfig.get_paths()["purelib"],
        "REQUEST_LOG": str(request_log),
        "OUR_COMMAND": str(Path(sys.executable).with_name("alignedserve")),
    }
    done = run_checks(client, server.url, timeout_s=CHECKS_S, **places)
    assert [check.name for check in done] == checks_of(client)
    failed = [check for check in done if check.failed]
    assert not failed, "\n\n".join(f"{check.name}:\n{check.failed}" for check in failed)
