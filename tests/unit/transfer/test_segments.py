"""Segments: real processes, real descriptors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from alignedserve.errors import ConfigError, ResourceError, TransferError, UnavailableError
from alignedserve.transfer.segment import Segment, create_descriptor
from alignedserve.transfer.segments import SegmentClient, SegmentServer
from alignedserve.transfer.wire import LENGTH, receive_message, send_message
from support.requirements import needs

MIB = 1 << 20
spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    private = tmp_path / "run"
    private.mkdir(mode=0o700)
    return private


@pytest.fixture
def server(folder: Path) -> Iterator[SegmentServer]:
    server = SegmentServer(folder / "agent.sock", "secret")
    server.start()
    yield server
    server.close()


@pytest.fixture
def client(server: SegmentServer) -> SegmentClient:
    return SegmentClient(server.socket_path, "secret")


def serve_until_told(path: str, pipe: Connection) -> None:
    """A node agent in miniature."""
    server = SegmentServer(path, "secret")
    server.start()
    pipe.send("listening")
    pipe.recv()
    server.close()


def write_and_hang(path: str, pipe: Connection) -> None:
    segment = SegmentClient(path, "secret").create("kv_pool-0", 4 * MIB)
    segment.memory()[:5] = b"alive"
    pipe.send("written")
    time.sleep(60)


class Child:
    """A spawned process with a pipe, killed at the end."""

    def __init__(self, target: object, path: Path) -> None:
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(str(path), theirs), daemon=True)  # type: ignore[arg-type]
        self.process.start()

    def heard(self) -> object:
        assert self.pipe.poll(20), "the child said nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)


def test_memory_written_in_one_process_is_read_in_another_after_the_writer_was_killed(
    server: SegmentServer, client: SegmentClient
) -> None:
    writer = Child(write_and_hang, server.socket_path)
    assert writer.heard() == "written"
    writer.kill()
    segment = client.attach("kv_pool-0")
    assert bytes(segment.memory()[:5]) == b"alive"
    assert [info.name for info in client.segments()] == ["kv_pool-0"]
    segment.close()


def test_a_segment_outlives_its_killed_server_and_is_adopted_by_the_next(folder: Path) -> None:
    path = folder / "agent.sock"
    first = Child(serve_until_told, path)
    first.heard()
    client = SegmentClient(path, "secret")
    segment = client.create("kv_pool-0", MIB)
    segment.memory()[-4:] = b"kept"
    first.kill()
    with pytest.raises(UnavailableError):
        client.segments()

    assert path.exists()  # left behind by SIGKILL; the next server replaces it
    second = Child(serve_until_told, path)
    second.heard()
    assert client.segments() == []
    assert client.adopt_all() == []
    client.adopt(segment)  # another holder offers the same memory
    again = client.attach("kv_pool-0")
    assert bytes(again.memory()[-4:]) == b"kept"
    second.pipe.send("end")
    second.process.join(10)
    assert second.process.exitcode == 0
    assert list(folder.iterdir()) == []


def test_create_gives_the_existing_segment_and_refuses_another_size(client: SegmentClient) -> None:
    first, second = client.create("a", MIB), client.create("a", MIB)
    first.memory()[0] = 7
    assert second.memory()[0] == 7
    with pytest.raises(TransferError, match="exists with 1048576 bytes, not 2097152"):
        client.create("a", 2 * MIB)


def test_a_name_is_free_again_after_drop_while_attached_memory_stays(
    server: SegmentServer, client: SegmentClient
) -> None:
    segment = client.create("a", MIB)
    segment.memory()[0] = 7
    assert server.drop("a")
    assert not server.drop("a")
    with pytest.raises(TransferError, match="no segment is called a"):
        client.attach("a")
    assert segment.memory()[0] == 7
    fresh = client.create("a", 2 * MIB)
    assert fresh.memory()[0] == 0
    with pytest.raises(TransferError, match="different memory"):
        client.adopt(segment)
    assert client.adopt_all() == ["a"]


def test_a_restarted_server_makes_nothing_anew_that_may_still_be_handed_over(
    server: SegmentServer, client: SegmentClient
) -> None:
    segment = client.create("kv_pool-0", MIB)
    server.drop("kv_pool-0")  # as a successor, which has nothing
    server.expect(30.0)
    made: list[Segment] = []
    asking = threading.Thread(target=lambda: made.append(client.create("kv_pool-0", MIB)))
    asking.start()
    client.adopt(segment)
    asking.join(10)
    assert made[0].identity == segment.identity
    server.expect(0.0)
    assert client.create("other", MIB).identity != segment.identity


def test_a_caller_waits_for_a_segment_that_may_still_be_handed_over(
    server: SegmentServer, client: SegmentClient
) -> None:
    segment = client.create("prefill-0/batch-1", MIB)
    server.drop("prefill-0/batch-1")
    server.expect(30.0)
    found: list[Segment] = []
    asking = threading.Thread(target=lambda: found.append(client.attach("prefill-0/batch-1")))
    asking.start()
    client.adopt(segment)
    asking.join(10)
    assert found[0].identity == segment.identity
    server.expect(0.0)
    with pytest.raises(TransferError, match="no segment is called other"):
        client.attach("other")


def test_more_than_the_available_memory_is_refused_with_the_figures(folder: Path) -> None:
    server = SegmentServer(folder / "s", "secret", available_bytes=lambda: 10 * MIB)
    server.start()
    client = SegmentClient(server.socket_path, "secret")
    client.create("a", 6 * MIB)  # untouched, so the kernel still counts it as available
    with pytest.raises(ResourceError, match=r"needs 5.0 MiB .* only 4.0 MiB of .* .another 6.0 MiB is promised"):
        client.create("b", 5 * MIB)
    client.create("c", 4 * MIB)
    server.close()


def test_a_wrong_token_is_refused(server: SegmentServer) -> None:
    server.create("a", MIB)
    for call in (lambda c: c.attach("a"), lambda c: c.segments(), lambda c: c.info()):
        with pytest.raises(TransferError, match="wrong token"):
            call(SegmentClient(server.socket_path, "guess"))
    assert [info.name for info in server.segments()] == ["a"]


def test_a_process_of_another_user_is_refused(server: SegmentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnavailableError):
        SegmentClient(server.socket_path, "secret").segments()


def test_the_socket_is_private_and_a_folder_that_is_not_is_refused(server: SegmentServer, tmp_path: Path) -> None:
    assert server.socket_path.stat().st_mode & 0o777 == 0o600
    public = tmp_path / "public"
    public.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        SegmentServer(public / "s", "secret").start()
    with pytest.raises(ConfigError, match="use a shorter one"):
        SegmentServer(tmp_path / ("x" * 120), "secret").start()


def test_a_second_server_on_a_live_socket_is_refused(server: SegmentServer) -> None:
    with pytest.raises(ConfigError, match=r"already serves"):
        SegmentServer(server.socket_path, "secret").start()
    assert SegmentClient(server.socket_path, "secret").segments() == []


def test_peers_that_say_nothing_or_nonsense_do_not_keep_others_waiting(
    server: SegmentServer, client: SegmentClient
) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for peer in silent:
        peer.connect(str(server.socket_path))
    nonsense = socket.socket(socket.AF_UNIX)
    nonsense.connect(str(server.socket_path))
    nonsense.sendall(LENGTH.pack(3) + b"{]}")
    server.info = {"supervisor": "127.0.0.1:1234"}
    assert client.info() == {"supervisor": "127.0.0.1:1234"}
    reply_or_end = nonsense.recv(1)
    assert reply_or_end == b""
    for peer in [*silent, nonsense]:
        peer.close()


def test_malformed_requests_are_refused(server: SegmentServer, client: SegmentClient) -> None:
    for body, message in (
        ({"op": "create", "name": "a", "bytes": "many"}, "needs a name and a size"),
        ({"op": "create", "name": "", "bytes": 1}, "needs a name and a size"),
        ({"op": "adopt", "name": "a"}, "without a descriptor"),
        ({"op": "explode"}, "does not know"),
    ):
        with pytest.raises(TransferError, match=message):
            client._call(body)


def test_a_plain_file_is_not_adopted(server: SegmentServer, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with path.open() as file, pytest.raises(TransferError, match="not sealed"):
        server.adopt("a", file.fileno())


def test_no_process_can_shrink_a_segment(client: SegmentClient) -> None:
    segment = client.create("a", MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, 0)


def test_descriptors_do_not_pile_up(server: SegmentServer, client: SegmentClient) -> None:
    client.create("a", MIB).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        segment = client.attach("a")
        client.adopt(segment)
        segment.close()
        with pytest.raises(TransferError):
            client.attach("missing")
    deadline = time.monotonic() + 5  # the server's threads close theirs shortly after the answer
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_many_threads_create_one_segment(server: SegmentServer, client: SegmentClient) -> None:
    inodes: list[int] = []

    def create() -> None:
        segment = client.create("a", MIB)
        inodes.append(os.fstat(segment.descriptor).st_ino)
        segment.close()

    threads = [threading.Thread(target=create) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inodes) == 24
    assert len(set(inodes)) == 1


def test_closing_a_segment_keeps_views_of_it_readable() -> None:
    segment = Segment("a", create_descriptor("a", MIB))
    view = segment.memory()
    view[0] = 9
    segment.close()
    segment.close()
    assert view[0] == 9
    with pytest.raises(TransferError, match="closed"):
        segment.memory()


def ask_as_another_user(path: str, pipe: Connection) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    while pipe.recv():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            try:
                connection.connect(path)
                send_message(connection, {"op": "attach", "name": "a", "token": "secret"})
                pipe.send(str(receive_message(connection)))
            except PermissionError:
                pipe.send("no way in")
            except (EOFError, OSError):
                pipe.send("sent away")


@needs("" if os.geteuid() == 0 else "only root can become another user")
def test_another_user_does_not_get_in_even_with_the_token() -> None:
    """The modes of folder and socket keep other users out. Even without them the kernel reports the user."""
    with tempfile.TemporaryDirectory(prefix="as-test-") as folder:
        Path(folder).chmod(0o755)
        private = Path(folder) / "run"
        server = SegmentServer(private / "agent.sock", "secret")
        server.start()
        SegmentClient(server.socket_path, "secret").create("a", MIB).close()
        stranger = Child(ask_as_another_user, server.socket_path)

        def ask() -> object:
            stranger.pipe.send(True)
            return stranger.heard()

        assert [stat.S_IMODE(path.stat().st_mode) for path in (private, server.socket_path)] == [0o700, 0o600]
        assert ask() == "no way in"
        private.chmod(0o755)
        assert ask() == "no way in"
        server.socket_path.chmod(0o666)
        assert ask() == "sent away"
        stranger.kill()
        server.close()


def test_an_oversized_message_is_refused() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(LENGTH.pack(1 << 30))
    with pytest.raises(TransferError, match="over the limit"):
        receive_message(ours)
    ours.close()
    theirs.close()
