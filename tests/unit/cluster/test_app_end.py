"""How the supervisor's Serve replica ends: with its cluster, or leaving the cluster to a successor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve.cluster import app
from alignedserve.cluster.supervisor.role_settings import Identity
from alignedserve.config import Config, GatewayConfig

REPLICA: Any = app.SupervisorDeployment.func_or_class  # type: ignore[attr-defined]
end: Callable[[Any], Any] = REPLICA.__del__


class Replica:
    """A replica whose supervisor only records calls. It has no `__del__`, which the interpreter would call."""

    _is_replaced = REPLICA._is_replaced
    _see_guests_off = REPLICA._see_guests_off

    def __init__(self, *, due: bool = False, broken: bool = False, failed: bool = False) -> None:
        self.done: list[str] = []
        self._ended = False
        self._begun = asyncio.Event()
        self._begun.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._config = Config(gateway=GatewayConfig(drain_s=1.0))
        self._identity = Identity("no-such-cluster", "token")
        self._record = SimpleNamespace(remove=lambda: None)
        self._broken = broken
        self._supervisor = SimpleNamespace(
            core=SimpleNamespace(
                rolling=SimpleNamespace(supervisor_due=due),
                roster=SimpleNamespace(guests={}),
                failure=RuntimeError("no such model") if failed else None,
                tick=lambda now: None,
            ),
            wait_changed=asyncio.sleep,
            application="app",
            left_to="",
            announce_end=self._announce_end,
            end_all=self._end_all,
            close=self._close,
        )

    def _announce_end(self, grace_s: float) -> None:
        if self._broken:
            raise RuntimeError("gateways cannot be told")

    async def _end_all(self, grace_s: float) -> None:
        self.done.append("ended")
        if self._broken:
            raise RuntimeError("roles cannot be ended")

    async def _close(self) -> None:
        self.done.append("closed")

    async def _is_succeeded(self) -> bool:
        return False


@pytest.fixture
def deleted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Serve says about the application; an exception in the list is raised."""
    said: list[Any] = [True]

    def answer(app_name: str) -> bool:
        assert app_name == "app"
        if isinstance(said[0], Exception):
            raise said[0]
        return bool(said[0])

    monkeypatch.setattr(app, "is_deleted", answer)
    return said


@pytest.mark.usefixtures("deleted")
async def test_it_ends_its_cluster_when_the_application_is_deleted() -> None:
    replica = Replica()
    await end(replica)
    await end(replica)
    assert replica.done == ["ended", "closed"]


@pytest.mark.parametrize("due", [False, True], ids=["moved", "restarted"])
async def test_one_that_serve_moves_or_replaces_leaves_the_cluster_to_its_successor(
    deleted: list[Any], due: bool
) -> None:
    """Serve moves the replica off a drained node. A replica that gets a SIGTERM drains."""
    deleted[0] = False
    replica = Replica(due=due)
    await end(replica)
    assert replica.done == ["closed"]


@pytest.mark.usefixtures("deleted")
async def test_one_that_was_to_be_replaced_ends_the_cluster_where_the_application_is_deleted() -> None:
    replica = Replica(due=True)
    await end(replica)
    assert replica.done == ["ended", "closed"]


async def test_one_whose_cluster_cannot_start_leaves_nothing_behind(deleted: list[Any]) -> None:
    deleted[0] = False
    replica = Replica(failed=True)
    await end(replica)
    assert replica.done == ["ended", "closed"]


@pytest.mark.parametrize("due", [False, True], ids=["moved", "restarted"])
async def test_where_serve_does_not_say_the_cluster_is_a_successors(deleted: list[Any], due: bool) -> None:
    deleted[0] = RuntimeError("Serve has ended")
    replica = Replica(due=due)
    await end(replica)
    assert replica.done == ["closed"]


@pytest.mark.usefixtures("deleted")
async def test_one_that_is_deployed_again_while_gateways_leave_ends_no_role() -> None:
    replica = Replica()
    replica._supervisor.core.roster.guests = {"gateway-0": None}
    ending = asyncio.ensure_future(end(replica))
    await asyncio.sleep(0.05)
    replica._supervisor.left_to = "127.0.0.1:1"
    await ending
    assert replica.done == ["closed"]


@pytest.mark.usefixtures("deleted")
async def test_everything_is_ended_whatever_fails_before() -> None:
    replica = Replica(broken=True)
    with pytest.raises(RuntimeError, match="roles cannot be ended"):
        await end(replica)
    assert replica.done == ["ended", "closed"]


@pytest.mark.usefixtures("deleted")
async def test_one_that_is_deleted_while_it_starts_ends_what_it_has_started() -> None:
    replica = Replica()
    replica._begun.clear()
    ending = asyncio.ensure_future(end(replica))
    await asyncio.sleep(0.01)
    assert replica.done == []
    replica._begun.set()
    await ending
    assert replica.done == ["ended", "closed"]


@pytest.mark.usefixtures("deleted")
async def test_one_that_could_not_start_has_nothing_to_end() -> None:
    replica = Replica()
    replica._ended = True
    await end(replica)
    assert replica.done == []
