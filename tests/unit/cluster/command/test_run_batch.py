"""`alignedserve run-batch` with a running server: answers, errors, and going on after it ended in the middle."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.cli import run_batch as run_batch_module
from alignedserve.cluster.cli.main import _given as given
from alignedserve.cluster.cli.main import main, parse
from alignedserve.cluster.cli.run_batch import LostError, Server
from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.config_sources import load, value_of
from alignedserve.errors import UnavailableError
from alignedserve.gateway.batches import service as service_module
from alignedserve.proc_stat import is_alive
from support.fake_cluster import FakeCluster
from support.gateway import running_gateway

LINES = 5


@pytest.fixture
async def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(service_module, "POLL_S", 0.05)
    monkeypatch.setattr(run_batch_module, "POLL_S", 0.05)
    keys = {"folder": str(tmp_path / "store")}
    async with FakeCluster() as cluster, running_gateway(cluster, batches=keys) as gateway:
        yield gateway.url


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(row(number, max_tokens=2) for number in range(LINES)))
    return path


def row(number: int, **options: Any) -> str:
    body = {"prompt": [5, 6], **options}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def append(source: Path, line: str) -> None:
    with source.open("a") as file:
        file.write(line)


def command(source: Path, url: str) -> list[str]:
    return ["run-batch", "-i", str(source), "-o", str(source.with_name("out.jsonl")), "--url", url]


def answers(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


async def kept(url: str, kind: str) -> list[Any]:
    """What the server keeps."""
    found: list[Any] = (await asyncio.to_thread(Server(url, "").ask, "GET", f"/v1/{kind}"))["data"]
    return found


async def test_the_answers_come_in_the_order_of_the_lines_and_nothing_is_left(
    url: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, command(source, url)) == 0
    assert answers(source.with_name("out.jsonl")) == [str(number) for number in range(LINES)]
    assert f"{LINES} of {LINES} lines answered" in capsys.readouterr().out
    assert {path.name for path in source.parent.iterdir()} == {"in.jsonl", "out.jsonl", "store"}
    assert await kept(url, "files") == []


async def test_where_no_terminal_is_the_progress_is_lines(
    url: str, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_batch_module, "LINE_EVERY_S", 0.0)
    assert await asyncio.to_thread(main, command(source, url)) == 0
    assert f"completed: {LINES} of {LINES} lines, 0 failed\n" in capsys.readouterr().err


async def test_lines_that_fail_are_in_a_file_of_their_own(url: str, source: Path) -> None:
    append(source, row(LINES, temperature=99))
    assert await asyncio.to_thread(main, command(source, url)) == 1
    assert answers(source.with_name("out.errors.jsonl")) == [str(LINES)]
    assert len(answers(source.with_name("out.jsonl"))) == LINES


async def test_files_of_an_earlier_run_do_not_stay(url: str, source: Path) -> None:
    errors = source.with_name("out.errors.jsonl")
    errors.write_text("old")
    assert await asyncio.to_thread(main, command(source, url)) == 0
    assert not errors.exists()


def test_no_file_is_both_input_and_output(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["-o", str(source)], ["-o", str(source.with_name("x")), "--errors", str(source)], ["-o", "/dev/null"]):
        assert main(["run-batch", "-i", str(source), *more]) == 2
    assert "three different files" in capsys.readouterr().err
    assert len(source.read_text().splitlines()) == LINES


async def test_an_invalid_file_is_named_and_may_be_mended(
    url: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(source, row(0))
    assert await asyncio.to_thread(main, command(source, url)) == 2
    assert f"line {LINES + 1}: the custom_id '0' is used by an earlier line" in capsys.readouterr().err
    os.truncate(source, 0)
    append(source, row(0))
    assert await asyncio.to_thread(main, command(source, url)) == 0


@pytest.mark.parametrize("method", ["upload", "find", "download"])
async def test_the_same_command_goes_on_with_the_batch_it_made(
    method: str, url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        real = getattr(Server, method)

        def then_ends(server: Server, *given: Any) -> Any:
            real(server, *given)
            raise UnavailableError("the connection broke")

        patch.setattr(Server, method, then_ends)
        assert await asyncio.to_thread(main, command(source, url)) == 1
    assert await asyncio.to_thread(main, command(source, url)) == 0
    assert answers(source.with_name("out.jsonl")) == [str(number) for number in range(LINES)]
    assert len(await kept(url, "batches")) == 1


async def test_a_batch_whose_answer_was_lost_is_not_made_twice(
    url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Server._once

    def once(server: Server, method: str, path: str, **options: Any) -> Any:
        found = real(server, method, path, **options)
        if method == "POST":
            raise LostError("HTTP 502")
        return found

    monkeypatch.setattr(Server, "_once", once)
    assert await asyncio.to_thread(main, command(source, url)) == 0
    assert len(await kept(url, "batches")) == 1


async def test_a_run_that_ends_once_all_is_written_needs_no_server_to_go_on(
    url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    output = source.with_name("out.jsonl")
    for ending in (lambda: None, output.unlink):  # without its output it begins anew
        with monkeypatch.context() as patch:
            patch.setattr(run_batch_module.shutil, "rmtree", interrupted)
            assert await asyncio.to_thread(main, command(source, url)) == 130
        ending()
        where = "http://127.0.0.1:9" if output.exists() else url
        assert await asyncio.to_thread(main, command(source, where)) == 0
        assert answers(output) == [str(number) for number in range(LINES)]
        assert not source.with_name("out.jsonl.run-batch").exists()


async def test_a_full_disk_is_an_error_of_one_line_and_the_same_command_goes_on(
    url: str, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = os.fsync
    for name, told in (("run.tmp", "run.json"), ("out.jsonl.part", "out.jsonl.part")):

        def fsync(descriptor: int, name: str = name) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(name):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            assert await asyncio.to_thread(main, command(source, url)) == 1
        assert f"{told} cannot be written: No space left" in capsys.readouterr().err
    assert await asyncio.to_thread(main, command(source, url)) == 0
    assert len(await kept(url, "batches")) == 1


def test_a_killed_command_leaves_no_server(tmp_path: Path) -> None:
    """The same command starts another one, which would find no memory."""
    program = f"""
import sys, time, pathlib
from alignedserve.cluster.cli.serve_process import ServeProcess
class Sleep(ServeProcess):
    command = ("sleep", "60")
server = Sleep(ends_with_this=True, log=pathlib.Path({str(tmp_path / "log")!r}))
server.start()
print(server.process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        assert is_alive(pid)
        killed.kill()
    until_s = time.monotonic() + 10.0
    while is_alive(pid):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_folder_that_is_missing_is_said_before_anything_is_computed(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(source, "http://127.0.0.1:9"), "--errors", str(source.with_name("none") / "e.jsonl")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "fault"), [("hello\n", "is not JSON (Expecting"), ("{}\n", "has no url")])
async def test_a_first_line_that_is_no_request_says_why(
    url: str, source: Path, capsys: pytest.CaptureFixture[str], line: str, fault: str
) -> None:
    await asyncio.to_thread(source.write_text, line)
    assert await asyncio.to_thread(main, command(source, url)) == 2
    assert f"the first line {fault}" in capsys.readouterr().err
    assert not list(source.parent.glob("*.run-batch"))  # so the corrected file is another run


async def test_a_changed_input_does_not_go_on(
    url: str, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_batch_module, "PATIENCE_S", 0.2)
    assert await asyncio.to_thread(main, command(source, "http://127.0.0.1:9")) == 1
    assert capsys.readouterr().err.count("trying again for 0.2 s") == 1
    append(source, row(LINES))
    assert await asyncio.to_thread(main, command(source, url)) == 2
    assert "has changed" in capsys.readouterr().err


def test_the_options_of_a_server_to_start_are_passed_on() -> None:
    flags = ["--model", "m", "--no-prefetch", "--decode", "2", "--set", "kv_pool.size_gib=0.5"]
    passed = given(parse(["run-batch", "-i", "a", "-o", "b", *flags]))
    pairs = (passed[number + 1].partition("=") for number in range(0, len(passed), 2))
    config = load(environ={}, flags={key: value_of(key, text, "--set") for key, _, text in pairs})
    assert (config.model.path, config.cluster.prefetch, config.cluster.decode) == ("m", False, 2)
    assert config.kv_pool.size_gib == 0.5


def test_a_server_that_does_not_start_is_an_error_of_one_line(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(server: ServeProcess) -> None:
        raise RuntimeError("the port is in use")

    monkeypatch.setattr(ServeProcess, "__enter__", fail)
    words = ["run-batch", "-i", str(source), "-o", str(source.with_name("out.jsonl"))]
    assert main(words) == 1
    assert "the port is in use" in capsys.readouterr().err
    assert main([*words, "--set", "decode.unknown=1"]) == 2
    assert "decode.unknown" in capsys.readouterr().err
