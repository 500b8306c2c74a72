"""Fences processes: by the node agent, which waits for their end, by this process on its own node, or the launcher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from alignedserve.cluster.launch.launcher import Launcher
from alignedserve.cluster.launch.processes import end_process
from alignedserve.cluster.supervisor.managed_process import Slot
from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.control.rpc import open_channel
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import node_agent_pb2 as na
from alignedserve.proto import node_agent_pb2_grpc as na_grpc
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

AGENT_TIMEOUT_S = 10.0
AGENT_PATIENCE_S = 1.0
END_TIMEOUT_S = 2.0
RETRY_S = 1.0


class Fencer:
    """Fences processes. Messages cannot protect memory: only a process that is known to be dead cannot write any more.

    `here` is the node of this process, where it can end processes without the node agent.
    """

    def __init__(self, roster: Callable[[], Roster], launcher: Launcher, token: str) -> None:
        self.here = ""  # set once by the supervisor at its start
        self._roster = roster  # names the node agents
        self._launcher = launcher
        self._token = token  # for calls of node agents

    async def end(self, role_id: str, hello: sv.RoleHello | None, still_wanted: Callable[[], bool]) -> bool:
        """Try to end the process until it is dead or `still_wanted` returns False.

        True if its end was observed; False if the launcher (`watch`) reported it first.
        """
        while still_wanted():
            if hello is not None and await self._end(hello):
                return True
            if still_wanted():  # the launcher identifies processes by id, which a successor may have by now
                await self._launcher.kill(role_id)
            await asyncio.sleep(RETRY_S)
        return False

    async def kill(self, slot: Slot) -> None:
        """Try once to end the process. The launcher reports its end."""
        hello = slot.member.hello if slot.member else None
        if hello is None or not await self._end(hello):
            await self._launcher.kill(slot.planned.id)

    async def _end(self, hello: sv.RoleHello) -> bool:
        """True if the process is known to be dead. A node agent that does not answer at once may hang itself."""
        through_agent = asyncio.create_task(self._through_agent(hello))
        try:
            done, _ = await asyncio.wait([through_agent], timeout=AGENT_PATIENCE_S)
            if done and through_agent.result():
                return True
            if self.here and hello.node_id == self.here:
                return await end_process(hello, END_TIMEOUT_S)
            return await through_agent
        finally:
            through_agent.cancel()

    async def _through_agent(self, hello: sv.RoleHello) -> bool:
        """Whether the node agent ended the process. False without a node agent."""
        agent = self._agent(hello)
        if agent is None:
            return False
        channel = open_channel(agent.address, self._token)
        try:
            request = na.EndProcessRequest(process=hello.process, pid=hello.pid)
            await na_grpc.NodeAgentStub(channel).EndProcess(request, timeout=AGENT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.warning("the node agent could not end %s: %s", hello.process.id, error.details())
            return False
        finally:
            await channel.close()
        return True

    async def free_memory_bytes(self, timeout_s: float = AGENT_TIMEOUT_S) -> dict[str, int]:
        """Free host memory in bytes, by node, from the node agents. Nodes whose agent does not answer are left out."""
        agents = self._agents()
        said = await asyncio.gather(*(self._ask_memory(agent, timeout_s) for agent in agents))
        return {agent.node_id: free for agent, free in zip(agents, said, strict=True) if free is not None}

    async def _ask_memory(self, agent: sv.RoleHello, timeout_s: float) -> int | None:
        channel = open_channel(agent.address, self._token)
        try:
            said = await na_grpc.NodeAgentStub(channel).Describe(pb.Empty(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            logger.warning("%s did not report its free memory: %s", agent.process.id, error.details())
            return None
        finally:
            await channel.close()
        return int(said.memory_available_bytes)

    def _agent(self, hello: sv.RoleHello) -> sv.RoleHello | None:
        """The node agent of the process's node, unless it is the process itself."""
        for agent in self._agents():
            if agent.node_id == hello.node_id and agent.process.id != hello.process.id:
                return agent
        return None

    def _agents(self) -> list[sv.RoleHello]:
        slots = [slot for slot in self._roster().slots.values() if slot.planned.role == "node_agent" and slot.ready]
        return [slot.member.hello for slot in slots if slot.member is not None]
