"""A log that cannot be written: nothing ends, and the process reports it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve import logs
from alignedserve.config import LogConfig


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("alignedserve")
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


def test_lines_that_a_full_disk_does_not_take_are_counted_and_printed_nowhere(
    logger: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "decode-0.log").symlink_to("/dev/full")
    logs.setup(LogConfig(dir=str(tmp_path)), "decode", "decode-0")
    assert logs.alarm() == ""

    for _ in range(3):
        logger.warning("the pool is too small")

    assert logs.alarm() == "its log cannot be written (No space left on device; 3 lines lost or late)"
    assert capfd.readouterr().err == ""


def test_a_log_that_can_be_written_again_is_no_alarm(
    logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.setup(LogConfig(dir=str(tmp_path)), "decode", "decode-0")
    stream = logger.handlers[0].stream  # type: ignore[attr-defined]
    with monkeypatch.context() as full, contextlib.suppress(OSError), Path("/dev/full").open("w") as stuck:
        full.setattr(logger.handlers[0], "stream", stuck)
        logger.warning("lost")
        assert "1 lines lost" in logs.alarm()
    assert logger.handlers[0].stream is stream  # type: ignore[attr-defined]

    logger.warning("written")

    assert logs.alarm() == ""
    assert (tmp_path / "decode-0.log").read_text().endswith("written\n")


def test_a_folder_that_cannot_be_written_leaves_the_log_on_stderr(
    logger: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    logs.setup(LogConfig(dir=str(tmp_path / "file" / "folder")), "decode", "decode-0")
    logger.warning("the pool is too small")

    assert "its log cannot be written (Not a directory" in logs.alarm()
    assert "the pool is too small" in capsys.readouterr().err
