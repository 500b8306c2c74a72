"""What has expired or was deleted goes, a part at a time, and a long list of batches costs little."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.errors import NotFoundError
from alignedserve.gateway.batches import batches as batches_module
from alignedserve.gateway.batches import files as files_module
from alignedserve.gateway.failures import NotPossibleError
from support.batch_store import ALICE, DAY_S, ENDPOINT, KEEP_S, LEASE_S, Clock, Store, lines


def test_files_and_batches_are_deleted_after_their_time(store: Store, clock: Clock, folder: Path) -> None:
    short = store.upload(expires_in_s=3600)
    claim = store.begun(2)
    store.batches.record(claim, lines(0, 1))
    store.batches.finish(claim)
    output = store.batches.get(claim.id, ALICE)["output_file_id"]

    clock.now_s += 3601
    with pytest.raises(NotFoundError):
        store.files.get(short.id, ALICE)
    store.files.sweep(1000)
    assert store.content(output) == b"answer 0\nanswer 1\n"

    clock.now_s += KEEP_S + 2 * DAY_S
    assert store.files.sweep(1)  # one row at a time
    while store.files.sweep(1):
        pass
    store.batches.sweep(KEEP_S)
    assert store.database.rows("SELECT * FROM lines") == []
    assert store.database.rows("SELECT * FROM files") == []
    assert store.database.rows("SELECT * FROM batches") == []
    assert list((folder / "files").iterdir()) == []


def test_many_files_are_deleted_a_few_at_a_time(
    store: Store, clock: Clock, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two sweeps the store's thread renews leases."""
    monkeypatch.setattr(files_module, "SWEPT_FILES", 2)
    for _ in range(5):
        store.upload()
    clock.now_s += KEEP_S + 1
    left = []
    while store.files.sweep(1000):
        left.append(len(list((folder / "files").iterdir())))
    assert left == [3, 1]
    assert not list((folder / "files").iterdir())


def test_deleted_answers_give_their_room_back_to_the_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "_FREED_PAGES", 20)
    claim = store.begun(50)
    store.batches.record(claim, lines(*range(50), text="x" * 10_000))
    store.batches.finish(claim)
    store.files.delete(store.batches.get(claim.id, ALICE)["output_file_id"], ALICE)
    assert not store.files.sweep(1000)
    before = store.database.rows("PRAGMA page_count")[0][0]
    assert store.batches.sweep(KEEP_S), "one sweep is not enough"
    while store.batches.sweep(KEEP_S):
        pass
    assert store.database.rows("PRAGMA page_count")[0][0] < before - 50


def test_an_input_file_stays_while_a_batch_reads_it(store: Store, clock: Clock) -> None:
    claim = store.begun(1)
    with pytest.raises(NotPossibleError, match="cancel it first"):
        store.files.delete(claim.input_id, ALICE)
    clock.now_s += KEEP_S + 1
    store.files.sweep(1000)
    assert store.files.path_of(claim.input_id).exists()


def test_a_backlog_of_batches_is_claimed_in_linear_time(store: Store) -> None:
    def steps() -> int:
        found = 0

        def step() -> int:
            nonlocal found
            found += 1
            return 0

        store.database._connection.set_progress_handler(step, 100)
        assert store.batches.claim("gateway-0", LEASE_S) is not None
        store.database._connection.set_progress_handler(None, 0)
        return found

    def add(count: int) -> None:
        with store.database.transaction():
            for _ in range(count):
                store.database.write(
                    """INSERT INTO batches (id, owner, endpoint, input_id, metadata, status, expires_s, keep_s,
                    created_s) SELECT hex(randomblob(8)), owner, endpoint, input_id, metadata, 'validating', expires_s,
                    keep_s, created_s FROM batches LIMIT 1"""
                )

    store.batches.create(ALICE, ENDPOINT, store.upload().id, {})
    add(300)
    some = steps()
    add(900)
    assert steps() < 6 * some  # four times as many
