"""What `alignedserve serve` passes to processes that run in other folders, and signals at any moment."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.cli import serve_command
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.model import resolve_model


def test_relative_paths_are_absolute_for_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    class Session:
        owned = False

        def __init__(self, config: Config) -> None:
            seen.append(config)

    class Command:
        def __init__(self, config: Config, session: Any) -> None:
            seen.append(config)

        def run(self, folder: str) -> int:
            return 0

    shutil.copytree(resolve_model("tiny"), tmp_path / "my-model")
    keys = tmp_path / "keys"
    keys.write_text("secret-key-of-forty-characters-0123456789\n")
    keys.chmod(0o600)
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_command, "RaySession", Session)
    monkeypatch.setattr(serve_command, "_ServeCommand", Command)
    config = from_tree(
        {
            "model": {"path": "./my-model", "chat_template": "chat.jinja"},
            "gateway": {"api_key_file": "keys"},
            "log": {"dir": "logs"},
            "kv_pool": {"prefix_cache": True, "disk_path": "kv", "disk_gib": 1.0},
        }
    )
    assert serve_command.serve(config) == 0
    for got in seen:
        assert got.model.path == str(tmp_path / "my-model")
        assert got.kv_pool.disk_path == str(tmp_path / "kv")
        assert got.model.chat_template == str(tmp_path / "chat.jinja")
        assert got.gateway.api_key_file == str(keys)
        assert got.log.dir == str(tmp_path / "logs")
    assert len(seen) == 2


@pytest.fixture
def handlers() -> Iterator[None]:
    """Signals have their handlers again afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("times", [1, serve_command.KILL_SIGNALS])
def test_a_signal_takes_effect_whatever_the_main_thread_holds(
    times: int, handlers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = serve_command._ServeCommand(Config(), None)  # type: ignore[arg-type]
    command._handle_signals()
    obeying = threading.Thread(target=command._obey_signals, daemon=True)
    obeying.start()
    with command._console._lock:  # in the middle of a line
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
    assert (command._stopping if times == 1 else command._drained).wait(10)
    assert command._at_once == (times == serve_command.KILL_SIGNALS)
    assert "ending" in capsys.readouterr().out


@pytest.mark.parametrize("signals", [1, 2])
def test_a_second_signal_is_not_kept_waiting_by_a_supervisor_that_did_not_answer(
    signals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Session:
        owned = False
        logs_dir = ""

        def drain(self, grace_s: float) -> None:
            return None

        def stop(self) -> None:
            stopping.set()
            stopped.wait(20)

        def close(self) -> None:
            pass

    stopping, stopped, exits = threading.Event(), threading.Event(), []
    monkeypatch.setattr(serve_command, "SILENCE_S", 0.2)
    monkeypatch.setattr(serve_command, "CLEAN_END_S", 0.3)
    monkeypatch.setattr(serve_command.os, "_exit", exits.append)
    command = serve_command._ServeCommand(from_tree({"gateway": {"drain_s": 60.0}}), Session())  # type: ignore[arg-type]
    command._served, command._signals = True, 1
    command._stopping.set()
    command._asking.start()
    ending = threading.Thread(target=command._end, daemon=True)
    ending.start()
    assert stopping.wait(10)
    command._signals = signals

    ending.join(1.0 if signals == 1 else 10.0)

    assert ending.is_alive() == (signals == 1)
    assert exits == ([] if signals == 1 else [1])
    stopped.set()  # Serve has deleted the application
    ending.join(10)
    assert not ending.is_alive()
