"""Fencing ends one process, and never another process that has its id later."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from alignedserve.cluster.supervisor import fencer
from alignedserve.cluster.supervisor.actions import Action, Fence
from alignedserve.cluster.supervisor.plan import Shape
from alignedserve.cluster.supervisor.role_settings import Identity
from alignedserve.cluster.supervisor.supervisor import Supervisor
from alignedserve.errors import ConfigError
from support.node_cell import Cell, launched

LONG_AFTER_S = 0.1  # some tries


class Launcher:
    """Knows actors by the ids of their roles."""

    def __init__(self) -> None:
        self.actors: dict[str, str] = {}
        self.killed: list[str] = []

    async def kill(self, role_id: str) -> None:
        if role_id in self.actors:
            self.killed.append(self.actors[role_id])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencer, "RETRY_S", 0.01)


def lead(cell: Cell, launcher: Any) -> Supervisor:
    supervisor = Supervisor(cell.config, launcher, Identity("cluster", "token"))
    supervisor.core = cell.core
    return supervisor


def fence_of(role_id: str, actions: list[Action]) -> Fence:
    (fence,) = (action for action in actions if isinstance(action, Fence) and action.role_id == role_id)
    return fence


@pytest.mark.parametrize("ray_says_so", [True, False])
async def test_one_that_drained_on_a_lost_node_is_not_its_successor(ray_says_so: bool) -> None:
    """No process on the node can report that it has ended. Ray does, or declares the node dead."""
    cell, launcher = Cell(), Launcher()
    cell.start()
    supervisor = lead(cell, launcher)
    launcher.actors["decode-0"] = "old"

    def no_room(shape: Shape) -> None:
        raise ConfigError("no room for one more")

    cell.core.rolling.begin(["decode"], 10**9, cell.now, no_room, 0)
    cell.core.tick(cell.now)
    assert cell.core.scaling.draining == ["decode-0"]
    for role_id in ("decode-0", "node_agent-1", "kv_pool-1"):
        cell.core.broke(cell.hello(role_id).process, cell.now)
    cell.now += 0.6
    fence = fence_of("decode-0", cell.core.tick(cell.now))
    ending = asyncio.create_task(supervisor._end_process(fence))
    await asyncio.sleep(LONG_AFTER_S)
    assert set(launcher.killed) == {"old"}

    if ray_says_so:
        cell.core.ended("decode-0", fence.generation, "the actor died", cell.now)
    cell.nodes, cell.where["decode-0"] = cell.nodes[:1], "home"
    assert launched(cell.locate() + cell.core.tick(cell.now + 1.0)) == {"decode-0": "home"}
    launcher.actors["decode-0"] = "new"
    cell.now += 2.0
    cell.bring_up("decode-0")
    await asyncio.sleep(LONG_AFTER_S)
    assert "new" not in launcher.killed
    assert ending.done()


async def test_one_that_was_to_go_before_it_was_there_is_not_the_next_of_its_id() -> None:
    cell, launcher = Cell(where={"prefill-0": "home", "decode-0": "home", "decode-1": "home"}), Launcher()
    cell.nodes = cell.nodes[:1]
    cell.core.settle(cell.placement(), 0.0)
    cell.start()
    supervisor = lead(cell, launcher)

    def resize(decode: int) -> list[Action]:
        cell.shape = Shape(1, decode)
        cell.core.scaling.change(cell.shape, cell.now)
        return cell.locate() + cell.core.tick(cell.now)

    assert launched(resize(2)) == {"decode-1": "home"}
    launcher.actors["decode-1"] = "first"
    fence = fence_of("decode-1", resize(1))
    ending = asyncio.create_task(supervisor._end_process(fence))
    await asyncio.sleep(LONG_AFTER_S)
    cell.core.ended("decode-1", fence.generation, "the actor died", cell.now)
    assert launched(resize(2)) == {"decode-1": "home"}
    launcher.actors["decode-1"] = "second"
    await asyncio.sleep(LONG_AFTER_S)
    assert set(launcher.killed) == {"first"}
    assert ending.done()


async def test_one_that_ends_while_its_agent_is_asked_is_not_killed_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher()
    launcher.actors["decode-0"] = "new"
    wanted = True

    async def ask(hello: object) -> bool:
        nonlocal wanted
        wanted = False  # the process ends and its successor starts while the node agent does not answer
        return False

    ending = fencer.Fencer(lambda: Cell().core.roster, launcher, "token")  # type: ignore[arg-type]
    monkeypatch.setattr(ending, "_end", ask)
    cell = Cell()
    cell.start()
    assert not await ending.end("decode-0", cell.hello("decode-0"), lambda: wanted)
    assert launcher.killed == []
