"""A store with a fake clock, whose books are checked at the end of each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.batch_store import Clock, Store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path, clock: Clock) -> Iterator[Store]:
    opened = Store(folder, clock)
    yield opened
    opened.batches.check_integrity()
    opened.database.close()
