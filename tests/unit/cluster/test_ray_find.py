"""What a supervisor finds about unresponsive actors, with a scripted Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from alignedserve.cluster.launch import ray_launcher
from alignedserve.cluster.launch import unresponsive_actors as ray_find
from alignedserve.cluster.launch.ray_launcher import RayLauncher
from alignedserve.config import ClusterConfig, Config, SupervisorConfig
from alignedserve.control.runtime import RoleSettings
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

NAMESPACE = "cluster"
HOME, OTHER = "aaaaaa00", "bbbbbb00"
PATIENCE_S = 1.0
FIRST_PID = 1 << 23  # no process has it: the kernel assigns no pid so large


class FakeActor:
    """`asks`: the number of asks before it answers; None: it never does."""

    def __init__(self, ray: FakeRay, name: str, node: str, pid: int, asks: int | None, state: str = "ALIVE") -> None:
        self.name, self.node, self.pid, self.state = name, node, pid, state
        self.told = ""
        self.describe = SimpleNamespace(remote=self._describe)
        self.set_supervisor = SimpleNamespace(remote=self._set_supervisor)
        self.fork_command = SimpleNamespace(remote=self._fork_command)
        self._ray = ray
        self._asks = asks

    async def _answers(self) -> None:
        if self._asks is None:
            await asyncio.Event().wait()
        elif self._asks > 0:
            self._asks -= 1
            raise ActorUnavailableError("its node is not reached", None)

    async def _describe(self) -> dict[str, Any]:
        await self._answers()
        role, node_id = self.name.rpartition("-")[0], f"host-{self.node[:6]}"
        settings = RoleSettings(role, self.name, {}, "c", "token", node_id, agent_socket=f"/{self.node}.sock")
        return {"settings": settings.to_dict(), "pid": self.pid, "view": self._ray.view.SerializeToString()}

    async def _fork_command(self) -> str:
        return ""

    async def _set_supervisor(self, address: str) -> None:
        await self._answers()
        self.told = address


class FakeRay:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, FakeActor] = {}
        self.killed: list[str] = []
        self.alive = [HOME, OTHER]
        self.view = sv.ClusterView(version=7)
        module = ray_launcher.ray
        monkeypatch.setattr(ray_launcher, "DESCRIBE_TIMEOUT_S", 0.05)
        monkeypatch.setattr(ray_launcher, "UNAVAILABLE_RETRY_S", 0.01)
        monkeypatch.setattr(
            module.util,
            "list_named_actors",
            lambda all_namespaces: [{"name": name, "namespace": NAMESPACE} for name in self.actors],
        )
        monkeypatch.setattr(module, "get_actor", self._get)
        monkeypatch.setattr(module, "kill", lambda actor: self.killed.append(actor.name))
        context = SimpleNamespace(get_node_id=lambda: HOME, runtime_env={})
        monkeypatch.setattr(module, "get_runtime_context", lambda: context)
        monkeypatch.setattr(module, "nodes", self._nodes)
        monkeypatch.setattr(ray_find, "actor_record", self._record)
        limits = SupervisorConfig(orphan_after_s=PATIENCE_S)
        self.launcher = RayLauncher(NAMESPACE, Config(cluster=ClusterConfig(device="cpu"), supervisor=limits))

    def add(self, name: str, node: str, asks: int | None = 0, state: str = "ALIVE") -> FakeActor:
        actor = self.actors[name] = FakeActor(self, name, node, FIRST_PID + len(self.actors), asks, state)
        return actor

    def told_of(self, role_id: str, actor: FakeActor) -> None:
        key = pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id)
        self.view.peers.append(sv.Peer(process=key, pid=actor.pid, node_id=f"host-{actor.node[:6]}", device="cpu"))

    async def find(self) -> dict[str, str]:
        """The node of each role that was found."""
        found = await self.launcher.find()
        return {running.settings.id: running.settings.node_id for running in found}

    def _get(self, name: str, namespace: str) -> FakeActor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def _record(self, actor: FakeActor) -> dict[str, Any]:
        return {"State": actor.state, "Address": {"NodeID": actor.node}, "Pid": actor.pid}

    def _nodes(self) -> list[dict[str, Any]]:
        said = {"NodeManagerHostname": "host", "NodeManagerAddress": "10.0.0.1", "Resources": {}}
        return [{"NodeID": node, "Alive": node in self.alive, **said} for node in (HOME, OTHER)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


async def test_roles_of_a_node_that_is_cut_off_are_found_and_not_killed(fake: FakeRay) -> None:
    fake.add("scheduler-0", HOME)
    fake.add("decode-0", OTHER, None)
    fake.add("kv_pool-1", OTHER, None)
    assert await fake.find() == {
        "scheduler-0": "host-aaaaaa",
        "decode-0": "host-bbbbbb",
        "kv_pool-1": "host-bbbbbb",
    }
    assert fake.killed == []
    await fake.launcher.kill("decode-0")
    assert fake.killed == ["decode-0"]


async def test_a_silent_role_has_what_the_others_were_started_with_and_nothing_that_is_theirs(fake: FakeRay) -> None:
    fake.add("decode-0", HOME)
    fake.add("kv_pool-1", OTHER)
    fake.add("decode-1", OTHER, None)
    (settings,) = [running.settings for running in await fake.launcher.find() if running.settings.id == "decode-1"]
    assert (settings.role, settings.cluster_id, settings.token, settings.host) == ("decode", "c", "token", "10.0.0.1")
    assert (settings.agent_socket, settings.device, settings.pinned) == (f"/{OTHER}.sock", "cpu", False)


async def test_what_was_on_a_node_that_ray_has_given_up_is_not_found(fake: FakeRay) -> None:
    fake.add("scheduler-0", HOME)
    fake.add("decode-0", OTHER, None)
    fake.alive = [HOME]
    assert await fake.find() == {"scheduler-0": "host-aaaaaa"}


async def test_one_that_was_never_placed_is_killed(fake: FakeRay) -> None:
    fake.add("scheduler-0", HOME)
    fake.add("decode-0", "", None, "PENDING_CREATION")
    assert await fake.find() == {"scheduler-0": "host-aaaaaa"}
    assert fake.killed == ["decode-0"]


async def test_a_silent_spare_that_has_taken_a_role_is_known_by_its_process(fake: FakeRay) -> None:
    fake.add("scheduler-0", HOME)
    fake.told_of("decode-0", fake.add("spare-0-12ab34cd", OTHER, None))
    assert await fake.find() == {"scheduler-0": "host-aaaaaa", "decode-0": "host-bbbbbb"}
    assert fake.killed == []


async def test_no_process_is_killed_while_there_is_no_answer_at_all(fake: FakeRay) -> None:
    fake.add("scheduler-0", HOME, 3)
    fake.add("decode-0", OTHER, 5)
    assert await fake.find() == {"scheduler-0": "host-aaaaaa", "decode-0": "host-bbbbbb"}
    assert fake.killed == []


async def test_an_unknown_actor_is_asked_again_while_its_node_is_silent_and_killed_in_the_end(
    fake: FakeRay,
) -> None:
    fake.add("scheduler-0", HOME)
    fake.add("spare-0-12ab34cd", OTHER, 4)
    fake.add("spare-1-12ab34cd", OTHER, None)
    begun = asyncio.get_running_loop().time()
    assert "spare-0-12ab34cd" in await fake.find()
    assert fake.killed == ["spare-1-12ab34cd"]
    assert asyncio.get_running_loop().time() - begun < PATIENCE_S  # by then a process of its node has answered
    fake.killed.clear()
    del fake.actors["spare-0-12ab34cd"]
    await fake.find()
    assert fake.killed == ["spare-1-12ab34cd"]
    assert asyncio.get_running_loop().time() - begun > PATIENCE_S


async def test_a_process_that_was_cut_off_is_told_of_the_new_supervisor_when_it_is_back(fake: FakeRay) -> None:
    scheduler, decode = fake.add("scheduler-0", HOME), fake.add("decode-0", OTHER)
    await fake.find()
    decode._asks = 6
    await fake.launcher.announce("10.0.0.1:5")
    assert (scheduler.told, decode.told) == ("10.0.0.1:5", "")
    async with asyncio.timeout(5.0):
        while not decode.told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert decode.told == "10.0.0.1:5"
    await fake.launcher.close()
