"""The Ray actors that run roles. Ray only places and starts them; roles communicate over gRPC.

Each role has its own class, so that `ps` and Ray's tools show its name. The actors are detached, because they outlive a
supervisor that is replaced. Ray never restarts them (`max_restarts` 0): a successor may start only once its predecessor
is known to be dead, and only the supervisor knows that.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray

from alignedserve.cluster.launch.environment import role_environment
from alignedserve.cluster.launch.fork_keeper import ForkKeeper, fork_environment
from alignedserve.cluster.launch.gpus import device_with_neighbours, places_of
from alignedserve.cluster.launch.rank_hosts import host
from alignedserve.cluster.launch.role_main import Seat
from alignedserve.cluster.runtime_dir import leave_socket_folder, prepare_socket_folder
from alignedserve.config_sources import from_tree
from alignedserve.control.runtime import RoleServer, RoleSettings, new_role
from alignedserve.errors import AlignedServeError, UnavailableError

_M_ARENA_MAX = -8
_ERROR_POLL_S = 0.25
LEAVE_LATE_S = 5.0
FORKS_WITHIN_S = 60.0  # for a fork server to import everything


class RoleActor:
    """Runs one role on its own event loop in a thread. The process ends when the role does."""

    def __init__(self, settings: dict[str, Any], namespace: str = "") -> None:
        """`namespace` is the Ray namespace of all roles of the cluster."""
        self._settings = RoleSettings(**settings)  # with the GPU that Ray assigned; a spare keeps its own
        self._namespace = namespace
        _require_node(self._settings)
        environment = role_environment(self._settings)
        os.environ.update(environment)  # before anything heavy is imported
        if arenas := environment.get("MALLOC_ARENA_MAX"):
            # The process already runs, so the variable alone has no effect.
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, int(arenas))
        on_gpu = self._settings.device.startswith("cuda") and not self._settings.pinned
        if on_gpu and (assigned := ray.get_gpu_ids()):
            self._settings = _on_gpus(self._settings, assigned)
        self._seat: Seat | None = None  # None until the event loop runs
        self._error: AlignedServeError | None = None  # why the role has failed; for `wait_ended`
        self._loop = asyncio.new_event_loop()  # the role's, in a thread of its own
        threading.Thread(target=self._run, name="role", daemon=True).start()

    async def describe(self) -> dict[str, Any]:
        """The settings, the pid and the last view of this process, for a new supervisor."""
        seat = self._seat
        view = seat.role.host.view if seat is not None and seat.role.host is not None else None
        return {
            "settings": (seat.settings if seat is not None else self._settings).to_dict(),
            "pid": os.getpid(),
            "view": view.SerializeToString() if view is not None else b"",
        }

    async def set_supervisor(self, address: str, leave: bool = False) -> None:
        """Set the supervisor's new address. With `leave`, connect to it at once."""
        role = self._seat.role if self._seat is not None else None
        if role is not None:
            self._loop.call_soon_threadsafe(role.leave_for if leave else role.set_supervisor, address)

    async def assume(self, settings: dict[str, Any]) -> None:
        """Let this spare take a role. Raises UnavailableError if it already has a role."""
        if self._seat is None:
            raise UnavailableError(f"{self._settings.id} has not come up")
        taken = asyncio.run_coroutine_threadsafe(self._assume(self._seat, RoleSettings(**settings)), self._loop)
        await asyncio.wrap_future(taken)

    async def wait_ended(self) -> None:
        """Never returns. Ray raises an error in the caller when the process has ended.

        Raises the role's error shortly before the process ends.
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
            # Threads of the engine or of Ray must not delay the end of the process.
            os._exit(status)

    def _new_role(self, settings: RoleSettings) -> RoleServer:
        return new_role(settings)

    async def _host(self) -> None:
        self._seat = Seat(self._settings, self._new_role)
        await self._seat.run()

    async def _assume(self, seat: Seat, settings: RoleSettings) -> None:
        seat.assume(settings)


def _leave_nothing(namespace: str) -> None:
    """Release the cluster's room in Ray, because no supervisor will. The wait is limited, because Ray may be dead."""
    from alignedserve.cluster.launch.ray_groups import LEAVE_S, leave_nothing

    name = ray.get_runtime_context().get_actor_name() or ""
    leaving = threading.Thread(target=leave_nothing, args=(namespace, name), name="leave", daemon=True)
    leaving.start()
    leaving.join(LEAVE_S + LEAVE_LATE_S)


def _on_gpus(settings: RoleSettings, assigned: Sequence[int | str]) -> RoleSettings:
    """The settings with the GPUs that Ray has assigned."""
    tensor = from_tree(settings.config).degrees(settings.role).tensor
    return replace(settings, device=device_with_neighbours(places_of(assigned), tensor))


def _require_node(settings: RoleSettings) -> None:
    """Raises UnavailableError if Ray has moved the actor's bundle to another node than that of the settings."""
    here = ray.get_runtime_context().get_node_id()
    if not here.startswith(settings.node_id.rpartition("-")[2]):
        raise UnavailableError(f"{settings.id} belongs on node {settings.node_id}, but started on {here[:6]}")


class PrefillWorker(RoleActor):
    """A prefill instance."""


class DecodeWorker(RoleActor):
    """A decode instance."""


class KvPool(RoleActor):
    """A shard of the pool."""


class Scheduler(RoleActor):
    """The global scheduler."""


class NodeAgent(RoleActor):
    """A node agent, and the keeper of its node's fork server."""

    def __init__(self, settings: dict[str, Any], namespace: str = "") -> None:
        self._forks: ForkKeeper | None = None  # None until the fork server is asked for
        self._making = threading.Lock()  # of `_forks`
        super().__init__(settings, namespace)

    async def fork_command(self) -> str:
        """Start the fork server, and wait until it is ready. Returns what runs Python by way of it, as Ray's
        `py_executable`; "" if there is none."""
        return await asyncio.to_thread(self._fork_command)

    def _fork_command(self) -> str:
        with self._making:
            if self._forks is None:
                prepare_socket_folder(self._settings.agent_socket)
                self._forks = ForkKeeper(f"{self._settings.agent_socket}.forks", fork_environment(self._settings))
        self._forks.start()
        return self._forks.command if self._forks.wait_ready(FORKS_WITHIN_S) else ""

    async def _host(self) -> None:
        try:
            await super()._host()
        finally:
            if self._forks is not None:
                self._forks.close()
                leave_socket_folder(self._settings.agent_socket)


class Spare(RoleActor):
    """A spare, which may have taken another role."""


ACTORS: dict[str, type[RoleActor]] = {
    "prefill": PrefillWorker,
    "decode": DecodeWorker,
    "kv_pool": KvPool,
    "scheduler": Scheduler,
    "node_agent": NodeAgent,
    "spare": Spare,
}


class RankHostActor:
    """What an instance has on a further node (`rank_hosts.py`), on an event loop in a thread."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = RoleSettings(**settings)
        _require_node(self._settings)
        os.environ.update(role_environment(self._settings))  # before anything heavy is imported
        if self._settings.device.startswith("cuda") and (assigned := ray.get_gpu_ids()):
            self._settings = _on_gpus(self._settings, assigned)
        self._address: Future[str] = Future()
        threading.Thread(target=self._run, name="rank-host", daemon=True).start()

    async def address(self) -> str:
        """Once it serves. Raises the error for which it cannot."""
        return await asyncio.wrap_future(self._address)

    def _run(self) -> None:
        try:
            asyncio.run(host(self._settings, self._address.set_result))
        except BaseException as error:
            traceback.print_exc()
            if not self._address.done():
                self._address.set_exception(AlignedServeError(f"{type(error).__name__}: {error}"))
                time.sleep(2 * _ERROR_POLL_S)
        finally:
            os._exit(0)  # threads of the engine or of Ray must not delay the end of the process
