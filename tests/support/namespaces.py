"""Virtual machines for tests: processes with their own network, process ids and /dev/shm, connected by a switch.

Nothing has a name or a file outside. The namespaces of a machine belong to one process, which the kernel ends with the
thread that made it. The interfaces and the memory end with the last process, however the test ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_PREFIX = "10.77.0"
_NETMASK_BITS = 24
# Process 1 of its namespace. It ignores SIGCHLD, so the kernel reaps its children, and all processes end with it.
_INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('up', flush=True); signal.pause()"


@functools.cache
def why_not() -> str:
    """Why machines cannot be made here; "" if they can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (iproute2, util-linux)"
    try:
        with Switch(1):
            return ""
    except (subprocess.CalledProcessError, OSError, RuntimeError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip()
        return f"network namespaces are not allowed here (it takes root with CAP_SYS_ADMIN and CAP_NET_ADMIN): {reason}"


class Machine:
    """Namespaces of network, process ids, mounts and IPC, and a host name. `address`: the machine's address."""

    def __init__(self, name: str, address: str = "") -> None:
        self.name, self.address = name, address
        kinds = ("--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
        apart = ("setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--propagation", "private")
        self.init = subprocess.Popen(
            [*apart, sys.executable, "-c", _INIT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.init.stdout is not None
        assert self.init.stderr is not None
        if self.init.stdout.readline() != b"up\n":
            said = self.init.stderr.read().decode(errors="replace").strip()
            self.close()
            raise RuntimeError(said or f"unshare ended with {self.init.returncode}")
        self.pid = child_of(self.init.pid)
        try:
            self.run("hostname", name)
            self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
            self.ip("link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def inside(self, *command: str) -> list[str]:
        """The command, changed to run on this machine."""
        return ["nsenter", "-t", str(self.pid), "--net", "--pid", "--mount", "--ipc", "--uts", "--", *command]

    def run(self, *command: str, environment: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> str:
        """Run a command. Returns its output. Raises CalledProcessError and TimeoutExpired."""
        done = subprocess.run(
            self.inside(*command), check=False, capture_output=True, text=True, env=environment, timeout=timeout_s
        )
        if done.returncode:
            error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
            error.add_note(done.stderr)
            raise error
        return done.stdout

    def ip(self, *arguments: str) -> None:
        """Run `ip` in this machine's network namespace, but with the process ids of the host."""
        command = ["nsenter", "-t", str(self.pid), "--net", "--", "ip", *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=30.0)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process in the background; its output goes to `log`. It ends with the machine, or with `end`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.inside(*command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment)
            )

    def forward(self, port: int, socket: Path, environment: Mapping[str, str]) -> None:
        """Forward a Unix socket to a port of the machine, which tests cannot reach. Returns once the socket exists."""
        command = [sys.executable, "-m", "support.port_of_machine", str(socket), str(port)]
        self.start(command, environment, socket.with_suffix(".log"))

    def pids(self, word: str = "") -> dict[int, int]:
        """Processes whose command line has the word, without process 1: {pid on this machine: pid on the host}."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == own:
                    inner = int((entry / "status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1])
                    if inner != 1 and word.encode() in (entry / "cmdline").read_bytes():
                        found[inner] = int(entry.name)
        return found

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Signal a process by its pid inside the machine."""
        os.kill(self.pids()[pid], number)

    def shared_memory(self) -> dict[int, int]:
        """Anonymous memory files that processes here have mapped: {inode: host pid of a process that maps it}."""
        found = {}
        for pid in self.pids().values():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    if "memfd:" in line:
                        found[int(line.split()[4])] = pid
        return found

    def close(self) -> None:
        """Power off: every process here is killed."""
        self.init.kill()
        self.init.wait(10.0)
        for pipe in (self.init.stdout, self.init.stderr):
            if pipe is not None:
                pipe.close()


class Switch:
    """`with Switch(3) as switch:` three machines on one network. Each can be disconnected."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._hub: Machine | None = None
        self.machines: list[Machine] = []

    def __enter__(self) -> Self:
        try:
            self._hub = Machine("switch")
            self._hub.ip("link", "add", "br0", "type", "bridge", "forward_delay", "0")
            self._hub.ip("link", "set", "br0", "up")
            for _ in range(self._count):
                self.add()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def hub(self) -> Machine:
        assert self._hub is not None
        return self._hub

    def add(self) -> Machine:
        """Another machine, `node-0` and on."""
        number = len(self.machines)
        machine = Machine(f"node-{number}", f"{_PREFIX}.{number + 1}")
        self.machines.append(machine)
        port = _port(number)
        self.hub.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(machine.pid))
        self.hub.ip("link", "set", port, "master", "br0", "up")
        machine.ip("address", "add", f"{machine.address}/{_NETMASK_BITS}", "dev", "eth0")
        machine.ip("link", "set", "eth0", "up")
        return machine

    def cut(self, machine: Machine) -> None:
        """Pull its cable."""
        self.hub.ip("link", "set", _port(self.machines.index(machine)), "down")

    def heal(self, machine: Machine) -> None:
        self.hub.ip("link", "set", _port(self.machines.index(machine)), "up")

    @staticmethod
    def bytes_through(machine: Machine) -> tuple[int, int]:
        """The bytes (received, sent) of its network interface."""
        lines = Path(f"/proc/{machine.pid}/net/dev").read_text().splitlines()
        fields = next(line for line in lines if "eth0:" in line).partition(":")[2].split()
        return int(fields[0]), int(fields[8])

    def close(self) -> None:
        for machine in (*self.machines, *((self._hub,) if self._hub is not None else ())):
            machine.close()
        self.machines, self._hub = [], None


def _port(number: int) -> str:
    return f"port{number}"


def child_of(pid: int) -> int:
    """The child of a process that has exactly one child."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
