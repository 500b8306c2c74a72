"""Watches the processes of this node: whether they have ended, are stopped, or use the processor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

from alignedserve.cluster.launch.processes import ProcessHandle, Sight, look_at, open_process
from alignedserve.cluster.supervisor.managed_process import ManagedProcess
from alignedserve.proto import common_pb2 as pb

Key = tuple[str, int]


class Watchdog:
    """Holds each process by its pidfd. `on_dead` is called on the loop as soon as a process has completely ended."""

    def __init__(self, on_dead: Callable[[pb.ProcessKey], None]) -> None:
        self._on_dead = on_dead
        self._held: dict[Key, ProcessHandle] = {}

    def follow(self, node_id: str, members: Iterable[ManagedProcess]) -> None:
        """Watch those of `members` that run on this node, `node_id`, from now on."""
        here = {
            _key(member.key): member
            for member in members
            if member.hello.node_id == node_id and member.hello.pid != os.getpid()
        }
        for key in [key for key in self._held if key not in here]:
            self._let_go(key)
        for key, member in here.items():
            if key not in self._held:
                self._take(key, member)

    def look(self) -> dict[Key, Sight]:
        """The state of each process, by id and incarnation."""
        sights = {key: look_at(handle.pid) for key, handle in self._held.items()}
        return {key: sight for key, sight in sights.items() if sight is not None}

    def close(self) -> None:
        for key in list(self._held):
            self._let_go(key)

    def _take(self, key: Key, member: ManagedProcess) -> None:
        process = member.key
        handle = open_process(member.hello)
        if handle is None:
            # It has ended already, or is not visible to this process. Other events will report its end.
            return
        self._held[key] = handle
        asyncio.get_running_loop().add_reader(handle.descriptor, self._ended, key, process)

    def _ended(self, key: Key, process: pb.ProcessKey) -> None:
        self._let_go(key)
        self._on_dead(process)

    def _let_go(self, key: Key) -> None:
        handle = self._held.pop(key)
        asyncio.get_running_loop().remove_reader(handle.descriptor)
        handle.close()


def _key(process: pb.ProcessKey) -> Key:
    return process.id, process.incarnation
