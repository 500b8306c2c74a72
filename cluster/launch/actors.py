"""The Ray actors that roles live in. Ray places and starts them; what they do goes over gRPC.

A class a role, so that `ps` and Ray's own tools show them by their names. They are detached, since they outlive a
supervisor that is replaced, and never restarted by Ray (`max_restarts` 0): a successor may only start once its
predecessor is known to be dead, and only the supervisor knows that.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
import traceback
from typing import Any

import ray

from alignedserve.cluster.launch.environment import role_environment
from alignedserve.cluster.launch.role_main import Seat
from alignedserve.control.runtime import RoleServer, RoleSettings, new_role
from alignedserve.errors import AlignedServeError, UnavailableError

_M_ARENA_MAX = -8
_ERROR_POLL_S = 0.25
LEAVE_LATE_S = 5.0


class RoleActor:
    """Runs one role on an event loop of its own, in a thread; the process ends when the role does."""

    def __init__(self, settings: dict[str, Any], namespace: str = "") -> None:
        """`namespace` is the one in Ray that all roles of the cluster have their names in."""
        self._settings = RoleSettings(**settings)
        self._namespace = namespace
        _require_node(self._settings)
        environment = role_environment(self._settings)
        os.environ.update(environment)  # before anything heavy is imported
        if arenas := environment.get("MALLOC_ARENA_MAX"):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, int(arenas))  # the process runs already: the variable is too late
        on_gpu = self._settings.device.startswith("cuda") and not self._settings.pinned
        if on_gpu and (assigned := ray.get_gpu_ids()):
            self._settings = RoleSettings(**{**settings, "device": f"cuda:{assigned[0]}"})
        self._seat: Seat | None = None
        self._error: AlignedServeError | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="role", daemon=True).start()

    async def describe(self) -> dict[str, Any]:
        """Who this is, and what it was told last, for a supervisor that is new."""
        seat = self._seat
        view = seat.role.host.view if seat is not None and seat.role.host is not None else None
        return {
            "settings": (seat.settings if seat is not None else self._settings).to_dict(),
            "pid": os.getpid(),
            "view": view.SerializeToString() if view is not None else b"",
        }

    async def set_supervisor(self, address: str, leave: bool = False) -> None:
        """The supervisor is somewhere else now; `leave`: go there at once."""
        role = self._seat.role if self._seat is not None else None
        if role is not None:
            self._loop.call_soon_threadsafe(role.leave_for if leave else role.set_supervisor, address)

    async def assume(self, settings: dict[str, Any]) -> None:
        """A spare takes this role. Returns once it has; raises UnavailableError where it has another."""
        if self._seat is None:
            raise UnavailableError(f"{self._settings.id} has not come up")
        taken = asyncio.run_coroutine_threadsafe(self._assume(self._seat, RoleSettings(**settings)), self._loop)
        await asyncio.wrap_future(taken)

    async def wait_ended(self) -> None:
        """Never returns: that the process has ended, Ray tells the caller by an error.

        Raises what the role ended with, shortly before the process ends.
        """
        while self._error is None:  # noqa: ASYNC110  (it is set in another thread)
            await asyncio.sleep(_ERROR_POLL_S)
        raise self._error

    def _run(self) -> None:
        status = 1
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._host())
            status = 0
        except BaseException as error:
            traceback.print_exc()
            self._error = AlignedServeError(f"{type(error).__name__}: {error}")
            time.sleep(2 * _ERROR_POLL_S)
        finally:
            if self._seat is not None and self._seat.role.orphaned:
                _leave_nothing(self._namespace)
            # Threads of the engine or of Ray must not hold up the end of a process whose role is over.
            os._exit(status)

    def _new_role(self, settings: RoleSettings) -> RoleServer:
        return new_role(settings)

    async def _host(self) -> None:
        self._seat = Seat(self._settings, self._new_role)
        await self._seat.run()

    async def _assume(self, seat: Seat, settings: RoleSettings) -> None:
        seat.assume(settings)


def _leave_nothing(namespace: str) -> None:
    """Nobody else gives back the room that the cluster has in Ray. Ray may be what has died: it is not waited for."""
    from alignedserve.cluster.launch.ray_groups import LEAVE_S, leave_nothing

    name = ray.get_runtime_context().get_actor_name() or ""
    leaving = threading.Thread(target=leave_nothing, args=(namespace, name), name="leave", daemon=True)
    leaving.start()
    leaving.join(LEAVE_S + LEAVE_LATE_S)


def _require_node(settings: RoleSettings) -> None:
    """Raises UnavailableError where Ray has moved the actor's bundle since: the settings are another node's."""
    here = ray.get_runtime_context().get_node_id()
    if not here.startswith(settings.node_id.rpartition("-")[2]):
        raise UnavailableError(f"{settings.id} was meant for node {settings.node_id}, and came up on {here[:6]}")


class PrefillWorker(RoleActor):
    """A prefill instance."""


class DecodeWorker(RoleActor):
    """A decode instance."""


class KvPool(RoleActor):
    """The KV pool."""


class Scheduler(RoleActor):
    """The global scheduler."""


class NodeAgent(RoleActor):
    """A node's agent."""


class Spare(RoleActor):
    """A process that waits for a role, or has taken one."""


ACTORS: dict[str, type[RoleActor]] = {
    "prefill": PrefillWorker,
    "decode": DecodeWorker,
    "kv_pool": KvPool,
    "scheduler": Scheduler,
    "node_agent": NodeAgent,
    "spare": Spare,
}
