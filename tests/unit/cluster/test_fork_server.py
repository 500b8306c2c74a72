"""The fork server, the program that starts workers through it, and the keeper: forks, fallbacks, changed files."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignedserve.cluster.launch import fork_keeper
from alignedserve.cluster.launch.fork_keeper import ForkKeeper
from alignedserve.proc_stat import is_alive
from support.leftovers import none_left_behind

no_process_is_left_behind = pytest.fixture(autouse=True)(none_left_behind)

WITHIN_S = 20.0
IMPORTED = "import os\nVALUE = {}\nBY = os.getpid()\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
AGENT = """
import os, sys, time
from alignedserve.cluster.launch.fork_keeper import ForkKeeper
ForkKeeper(sys.argv[1], os.environ, ["imported"]).start()
time.sleep(60)
"""
WORKER = """
import os, sys
import imported
itself = imported.BY == os.getpid()
print(os.getppid(), os.getcwd(), os.environ["WORD"], imported.VALUE, itself, sys.argv[1:], flush=True)
print("an error", file=sys.stderr)
sys.stdout = None  # as Ray replaces it; the descriptor stays open
os.write(1, sys.stdin.readline().encode())
"""


class Node:
    """A folder with a keeper whose fork server imports `imported.py`, and workers that import it, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write(IMPORTED.format(1))
        (folder / "worker.py").write_text(WORKER)
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *sys.path))}
        self.keeper = ForkKeeper(str(folder / "socket"), self.environment, ["imported"])

    def write(self, text: str) -> None:
        (self.folder / "imported.py").write_text(text)

    def server(self) -> int:
        """The pid of the server once it listens."""
        self.keeper.start()
        pid = self.keeper.pid  # before the wait: another may have taken its place then
        assert pid is not None
        wait((self.folder / "socket").exists)
        return pid

    def begin(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*shlex.split(self.keeper.command), str(self.folder / "worker.py"), "one", "two words"],
            env={**self.environment, "WORD": "told"},
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self) -> tuple[int, int]:
        """The parent of a worker that did all it should, and the value that it has imported."""
        client = self.begin()
        out, err = client.communicate("a line\n", timeout=WITHIN_S)
        said, line = out.splitlines()
        parent, value = int(said.split()[0]), int(said.split()[3])
        itself = parent == os.getpid()
        assert said == f"{parent} {self.folder} told {value} {itself} ['one', 'two words']"
        assert (line, err, client.returncode) == ("a line", "an error\n", 0)
        return parent, value

    def runs_alone(self) -> bool:
        """Whether a worker is started without a fork server."""
        return self.run()[0] == os.getpid()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(fork_keeper, "PAUSE_S", 0.0)
    node = Node(tmp_path)
    yield node
    node.keeper.close()


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_is_a_fork_with_its_own_arguments_environment_and_streams(node: Node) -> None:
    server = node.server()
    assert [node.run() for _ in range(2)] == [(server, 1)] * 2


def test_a_client_that_comes_while_the_server_imports_waits(node: Node) -> None:
    node.write(IMPORTED.format(2) + "import time\ntime.sleep(1.0)\n")
    server = node.server()
    assert node.run() == (server, 2)


def test_without_a_server_a_worker_starts_by_itself(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node.runs_alone()
    monkeypatch.setattr(fork_keeper, "PAUSE_S", 3.0)
    server = node.server()
    os.kill(server, signal.SIGSTOP)
    assert node.runs_alone()
    wait(lambda: node.keeper.pid != server)  # the keeper has ended it
    wait(lambda: node.run()[0] == node.keeper.pid)
    killed = node.keeper.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait(lambda: node.run()[0] not in (os.getpid(), killed))


def test_a_server_that_is_stopped_within_a_line_of_its_output_is_ended(node: Node) -> None:
    """With PYTHONUNBUFFERED each piece of a line is written by itself."""
    once = "import os, signal\nif 'WORD' not in os.environ and not os.path.exists({0!r}):\n"
    stop = "    open({0!r}, 'w').close()\n    os.write(1, b'a word')\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    node.write(IMPORTED.format(6) + (once + stop).format(str(node.folder / "stopped")))
    server = node.server()
    wait(lambda: node.keeper.pid != server)
    wait(lambda: node.run() == (node.keeper.pid, 6))


def test_a_server_that_dies_while_it_imports_leaves_the_start_to_its_clients(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_keeper, "PAUSE_S", 60.0)
    node.write(IMPORTED.format(3) + "import time\nif 'WORD' not in os.environ: time.sleep(60)\n")
    server = node.server()
    client = node.begin()
    time.sleep(0.5)
    os.kill(server, signal.SIGKILL)
    out, _ = client.communicate("a line\n", timeout=WITHIN_S)
    assert out.startswith(f"{os.getpid()} ")


def test_what_threads_would_break_is_not_forked_and_not_tried_again(node: Node) -> None:
    node.write(IMPORTED.format(4) + THREAD)
    node.keeper.start()
    server = node.keeper.pid
    assert server is not None
    assert node.runs_alone()
    wait(lambda: not is_alive(server))
    assert node.runs_alone()
    assert node.keeper.pid == server


def test_a_changed_file_is_imported_again(node: Node) -> None:
    server = node.server()
    assert node.run() == (server, 1)
    node.write(IMPORTED.format(1000))  # of another size: Python compares seconds and sizes with its compiled files
    assert node.run() == (os.getpid(), 1000)
    wait(lambda: node.run() == (node.keeper.pid, 1000))


def test_workers_outlive_the_server_which_ends_with_its_keeper(node: Node) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(node.folder / "socket")], env=node.environment)
    wait((node.folder / "socket").exists)
    client = node.begin()
    assert client.stdout is not None
    server = int(client.stdout.readline().split()[0])
    assert server in children(agent.pid)
    agent.kill()
    agent.wait()
    wait(lambda: not is_alive(server))
    assert not (node.folder / "socket").exists()
    out, _ = client.communicate("still here\n", timeout=WITHIN_S)
    assert out == "still here\n"


def test_a_server_that_ends_leaves_the_socket_of_its_successor(node: Node) -> None:
    first = subprocess.Popen(
        [sys.executable, "-P", "-m", "alignedserve.cluster.launch.fork_server", node.keeper.path, "imported"],
        env=node.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    wait(Path(node.keeper.path).exists)
    inode = Path(node.keeper.path).stat().st_ino
    node.keeper.start()
    wait(lambda: Path(node.keeper.path).stat().st_ino != inode)
    assert first.stdin is not None
    first.stdin.close()
    assert first.wait(WITHIN_S) == 0
    assert node.run() == (node.keeper.pid, 1)


def test_a_server_whose_socket_was_removed_is_replaced(node: Node) -> None:
    server = node.server()
    assert node.keeper.wait_ready(WITHIN_S)
    Path(node.keeper.path).unlink()
    wait(lambda: node.keeper.pid != server)
    wait(Path(node.keeper.path).exists)
    assert node.run() == (node.keeper.pid, 1)


@pytest.mark.parametrize(
    ("path", "environment"), [("a" * 100, {}), ("socket", {fork_keeper.SUBREAPER: "true"})], ids=["path", "subreaper"]
)
def test_where_forks_cannot_be_no_server_is_started(path: str, environment: dict[str, str], tmp_path: Path) -> None:
    keeper = ForkKeeper(str(tmp_path / path), {**os.environ, **environment}, ["json"])
    keeper.start()
    assert keeper.pid is None
    assert not keeper.wait_ready(WITHIN_S)


def test_an_order_whose_client_has_gone_starts_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has started the worker itself, because it did not hear from the fork."""
    monkeypatch.setattr(fork_keeper, "LOOK_S", 60.0)  # the keeper would kill the stopped server
    server = node.server()
    assert node.run() == (server, 1)
    os.kill(server, signal.SIGSTOP)
    client = node.begin()
    assert client.stdin is not None
    client.stdin.write("alone\n")
    client.stdin.flush()
    assert client.wait(WITHIN_S) == 0
    os.kill(server, signal.SIGCONT)
    assert node.run() == (server, 1)  # after the order of the first client
    out, _ = client.communicate(timeout=WITHIN_S)
    first, line = out.splitlines()
    assert (int(first.split()[0]), line) == (os.getpid(), "alone")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
