"""No placement group outlives its application, whichever process is killed at whatever time. Roles only join."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from alignedserve.proc_stat import is_alive
from support.ray_head import RayHead

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(240)]

ORPHAN_S = 3.0
WITHIN_S = 60.0
_GROUPS = """
import sys, time, ray
from alignedserve.proc_stat import is_alive
from alignedserve.cluster.launch.ray_groups import groups
ray.init(address="auto", log_to_driver=False)
while (found := groups()) and time.monotonic() < float(sys.argv[1]):
    time.sleep(0.1)
print(*[group.entry["name"] for group in found], sep="\\n")
"""
_RESTART_AND_DELETE = """
import asyncio, ray
from ray import serve
from alignedserve.control.rpc import open_channel
from alignedserve.proto import common_pb2 as pb, supervisor_pb2 as sv, supervisor_pb2_grpc as sv_grpc
ray.init(address="auto", log_to_driver=False)
info = serve.get_deployment_handle("Supervisor", "due").join_info.remote().result()

async def restart():
    channel = open_channel(info["supervisor_address"], info["token"])
    stub = sv_grpc.SupervisorStub(channel)
    reply = await stub.RestartRoles(sv.RestartRequest(roles=["supervisor"]))
    assert not reply.refused.code, reply
    while "supervisor" not in (await stub.GetStatus(pb.Empty())).restart.doing:
        await asyncio.sleep(0.05)
    await channel.close()

asyncio.run(restart())
serve.delete("due")
"""


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with RayHead(proxy="python") as running:
        yield running


def deploy(head: RayHead, name: str, orphan_after_s: float, **environment: str) -> dict[str, int]:
    """The pids of its roles, once all are ready. `environment` is theirs."""
    application = {
        "name": name,
        "route_prefix": f"/{name}",
        "import_path": "support.fake_application:build",
        "runtime_env": {"env_vars": environment},
        "args": {
            "cluster": {"device": "cpu", "decode": 2},
            "supervisor": {"orphan_after_s": orphan_after_s},
            "gateway": {"drain_s": 3.0},
        },
    }
    head.apply({"applications": [application]})
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(f"{head.url}/{name}/health", timeout=30.0) as answer:
                return {role["id"]: role["pid"] for role in json.loads(answer.read())["roles"]}
        except urllib.error.URLError:
            assert time.monotonic() < deadline, head.applications()
            time.sleep(0.1)


def delete(head: RayHead) -> None:
    """Returns when the application is on its way out."""
    head.apply({"applications": []})
    eventually(lambda: {entry["status"] for entry in head.applications().values()} <= {"DELETING"})


def our_groups(head: RayHead, within_s: float = 0.0) -> list[str]:
    """Those that there still are, when so many seconds have passed at the latest."""
    done = head.command("python", "-c", _GROUPS, str(time.monotonic() + within_s))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.1)


def test_an_application_that_is_deleted_leaves_no_group(head: RayHead) -> None:
    deploy(head, "plain", orphan_after_s=60.0)
    (group,) = our_groups(head)
    assert group.startswith("alignedserve-plain/")
    delete(head)
    eventually(lambda: not head.applications())
    assert our_groups(head) == []


def test_nor_one_that_is_deleted_while_its_supervisor_is_to_be_replaced(head: RayHead) -> None:
    pids = deploy(head, "due", orphan_after_s=60.0)
    done = head.command("python", "-c", _RESTART_AND_DELETE)
    assert done.returncode == 0, done.stderr
    assert our_groups(head) == []
    assert [name for name, pid in pids.items() if is_alive(pid)] == []


def test_nor_one_whose_supervisor_is_killed_when_it_is_deleted(head: RayHead) -> None:
    pids = deploy(head, "killed", orphan_after_s=ORPHAN_S)
    os.kill(pids["supervisor-0"], signal.SIGKILL)
    delete(head)
    eventually(lambda: not head.applications())
    assert our_groups(head, WITHIN_S) == []
    eventually(lambda: not any(map(is_alive, pids.values())))


def test_nor_one_whose_supervisor_is_killed_while_it_ends_the_cluster(head: RayHead) -> None:
    pids = deploy(head, "ending", orphan_after_s=ORPHAN_S, FAKE_PREFILL="end=3600")  # it is waited for
    delete(head)
    eventually(lambda: not is_alive(pids["decode-0"]))
    os.kill(pids["supervisor-0"], signal.SIGKILL)
    assert is_alive(pids["prefill-0"])
    assert our_groups(head, WITHIN_S) == []
    eventually(lambda: not any(map(is_alive, pids.values())))
