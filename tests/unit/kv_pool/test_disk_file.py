"""The file of a disk tier: whose it is, who may use it, and what refuses a start."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from alignedserve.config import Config, KvPoolConfig
from alignedserve.errors import ConfigError
from alignedserve.kv_pool.disk import file as disk_file
from alignedserve.kv_pool.disk import tier
from alignedserve.kv_pool.disk.breaker import FIRST_PAUSE_S, MOST_FAULTS, Breaker
from alignedserve.kv_pool.disk.layout import PAGE_BYTES
from support.disk_cases import (
    A,
    Make,
    cache,
    forget,
    metric,
    opened,
    promote,
    tiers,
)
from support.disk_tier import FaultyCalls


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with tiers(tmp_path / "kv") as new:
        yield new


def test_two_processes_never_have_one_file_and_an_unused_one_is_taken_over(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disk_file, "LOCK_WITHIN_S", 0.0)
    rig = opened(make())
    cache(rig, A)
    rig.demote()
    with pytest.raises(ConfigError, match="in use by another process"):
        make().start()
    other = opened(make(shard_id="kv_pool-1"))
    assert other.tier.count().cached == 0
    assert len(list((tmp_path / "kv").iterdir())) == 2
    rig.kill()
    third = opened(make(shard_id="kv_pool-2"))  # after a restart the same node has another shard
    assert promote(third, A) == 5
    names = {path.name for path in (tmp_path / "kv").iterdir()}
    assert names == {"default.kv_pool-1.kv", "default.kv_pool-2.kv"}


def test_a_file_that_is_taken_over_while_its_shard_opens_it_is_made_anew(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(make()).kill()
    (own,) = (tmp_path / "kv").iterdir()
    lock, taken = disk_file._lock, list[Path]()

    def lock_too_late(fd: int, within_s: float) -> bool:
        if not taken:
            taken.append(own.rename(own.with_name(own.name.replace("kv_pool-0", "kv_pool-7"))))
            return False
        return lock(fd, within_s)

    monkeypatch.setattr(disk_file, "_lock", lock_too_late)
    opened(make())
    assert own.exists()
    assert taken[0].exists()


def test_other_users_cannot_read_the_file(make: Make, tmp_path: Path) -> None:
    opened(make())
    (path,) = (tmp_path / "kv").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_others_may_read_is_closed_to_them_and_one_of_another_user_is_not_used(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    for name in ("default.kv_pool-0.kv", "default.kv_pool-9.kv"):
        (folder / name).touch()
        (folder / name).chmod(0o666)
    os.mkfifo(folder / "default.kv_pool-8.kv")
    opened(make())
    opened(make(shard_id="kv_pool-1"))  # takes over that of kv_pool-9
    assert {path.name for path in folder.iterdir()} == {f"default.kv_pool-{number}.kv" for number in (0, 1, 8)}
    assert [stat.S_IMODE((folder / f"default.kv_pool-{number}.kv").stat().st_mode) for number in (0, 1)] == [0o600] * 2
    (folder / "default.kv_pool-2.kv").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"kv_pool-2\.kv cannot be opened: it is not a file of the user"):
        make(shard_id="kv_pool-2").start()


def test_what_cannot_be_used_is_refused_at_a_start_and_tried_again_in_a_running_cluster(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = make()
    small.calls.total = 1000
    with pytest.raises(ConfigError, match="has room for 1000 bytes"):
        small.start()
    (tmp_path / "kv" / "default.kv_pool-0.kv").unlink()
    (tmp_path / "kv").rmdir()
    (tmp_path / "kv").write_text("not a folder")
    with pytest.raises(ConfigError, match="cannot be written to"):
        make().start()
    later = make()
    later.start(required=False)
    assert metric(later, "disk_tier_on", doing="read") == 0
    assert "the disk tier is off" in caplog.text
    (tmp_path / "kv").unlink()
    with pytest.raises(ConfigError, match="set it higher"):
        make(slots=1).start()


def test_a_broken_disk_or_one_that_others_have_filled_keeps_no_cluster_from_starting(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as soon:
        soon.setattr(tier, "AGAIN_S", 0.0)
        filled = make()
        filled.calls.free = 1000
        filled.start()
        assert metric(filled, "disk_tier_on", doing="write") == 0
        assert "has room for 1000 bytes" in caplog.text
        filled.calls.free = 1 << 50
        filled.spin()
        assert metric(filled, "disk_tier_on", doing="write") == 1
        filled.kill()
    caplog.clear()
    rig = opened(make())
    cache(rig, A)
    rig.demote()
    rig.kill()
    full = make()
    full.calls.free = 0
    full.start()
    assert full.tier.count().cached == 5
    full.kill()
    broken = make()
    broken.calls.read_faults = ["eio"]
    broken.start()
    assert metric(broken, "disk_tier_on", doing="read") == 0
    assert "the disk tier is off" in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"disk_gib": 1.0}, "needs kv_pool.disk_path"),
        ({"disk_gib": 1.0, "disk_path": "/x", "prefix_cache": False}, "needs kv_pool.prefix_cache"),
        ({"disk_path": "/x"}, "needs kv_pool.disk_gib"),
    ],
)
def test_a_configuration_that_is_incomplete_is_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(kv_pool=KvPoolConfig(**keys))  # type: ignore[arg-type]


def test_a_file_system_without_o_direct_is_read_and_written_through_the_page_cache(make: Make) -> None:
    class Buffered(FaultyCalls):
        forgotten = 0

        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().read(fd, buffers, offset)

        def forget(self, fd: int, offset: int, size: int) -> None:
            self.forgotten += size
            super().forget(fd, offset, size)

    rig = make()
    rig.calls = rig.tier._calls = calls = Buffered()
    rig.start()
    assert not rig.opened.file.direct
    cache(rig, A)
    rig.demote()
    forget(rig)
    assert promote(rig, A) == 5
    assert calls.forgotten >= 10 * PAGE_BYTES


def test_a_breaker_pauses_longer_each_time_until_something_succeeds() -> None:
    now = 0.0
    breaker = Breaker("it", lambda: now)
    for _ in range(MOST_FAULTS):
        assert not breaker.open
        breaker.failed("x")
    assert breaker.open
    now = FIRST_PAUSE_S + 1
    assert not breaker.open
    breaker.failed("x")
    now += FIRST_PAUSE_S + 1
    assert breaker.open
    breaker.succeeded()
    assert not breaker.open
    breaker.hung("x")
    assert breaker.open
