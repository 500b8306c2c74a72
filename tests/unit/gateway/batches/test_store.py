"""The store of files and batches: owners, quotas, leases by a fake clock, and deaths between any two writes."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve.errors import AccountingError, ConfigError, InvalidRequestError, NotFoundError, StaleError
from alignedserve.gateway.batches import files as files_module
from alignedserve.gateway.batches.batches import WINDOW_S, Claim
from alignedserve.gateway.batches.database import Database, file_system
from alignedserve.gateway.batches.files import STRAY_AFTER_S, FileStore, QuotaError
from alignedserve.gateway.batches.responses import MOST_AT_ONCE, ResponseStore
from alignedserve.gateway.batches.runner import BatchRunner
from alignedserve.gateway.batches.states import BatchStatus
from alignedserve.gateway.failures import NotPossibleError
from alignedserve.gateway.metrics import GatewayMetrics
from support.batch_store import ALICE, BOB, DAY_S, ENDPOINT, KEEP_S, LEASE_S, Clock, Store, lines


def status_of(store: Store, claim: Claim) -> str:
    return str(store.batches.get(claim.id, ALICE)["status"])


# ---- the database


def test_a_store_of_an_earlier_version_is_extended(folder: Path, clock: Clock) -> None:
    old = Store(folder, clock)
    file = old.upload()
    for table in ("responses", "response_sizes"):
        old.database.rows(f"DROP TABLE {table}")
    old.database.rows("PRAGMA user_version = 1")
    old.database.close()
    new = Store(folder, clock)
    assert new.files.get(file.id, ALICE) == file
    ResponseStore(new.database, 1 << 20, KEEP_S).put(ALICE, {"id": "resp_1"}, [])
    new.database.rows("PRAGMA user_version = 99")
    new.database.close()
    with pytest.raises(ConfigError, match="newer version"):
        Store(folder, clock)


# ---- responses


def test_the_oldest_responses_give_way_to_new_ones(store: Store) -> None:
    responses = ResponseStore(store.database, 10_000, KEEP_S)
    text = "x" * 2000
    for number in range(12):
        responses.put(ALICE, {"id": f"resp_{number}", "output": [text]}, [])
    responses.put(BOB, {"id": "resp_bob", "output": []}, [])
    kept = [number for number in range(12) if _has(responses, f"resp_{number}")]
    assert kept == list(range(12 - len(kept), 12))
    assert 2 <= len(kept) * len(text) <= 10_000
    assert responses.conversation("resp_11", ALICE) == [text]
    responses.delete("resp_11", ALICE)
    responses.check_integrity()
    with pytest.raises(NotFoundError):
        responses.get("resp_bob", ALICE)


def test_responses_expire(store: Store, clock: Clock) -> None:
    responses = ResponseStore(store.database, 1 << 30, DAY_S)
    for number in range(MOST_AT_ONCE + 3):
        responses.put((ALICE, BOB)[number % 2], {"id": f"resp_{number}"}, [])
    clock.now_s += DAY_S / 2
    responses.put(ALICE, {"id": "resp_new"}, [])
    assert not responses.sweep()
    clock.now_s += DAY_S / 2
    with pytest.raises(NotFoundError):
        responses.get("resp_0", ALICE)
    assert responses.sweep()
    responses.check_integrity()
    assert not responses.sweep()
    assert [row["id"] for row in store.database.rows("SELECT id FROM responses")] == ["resp_new"]
    responses.check_integrity()


def _has(responses: ResponseStore, response_id: str) -> bool:
    try:
        responses.get(response_id, ALICE)
    except NotFoundError:
        return False
    return True


# ---- files


def test_everything_on_disk_is_closed_to_other_users(store: Store, folder: Path) -> None:
    store.upload()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    assert {mode & 0o077 for mode in modes.values()} == {0}, modes


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Database(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_network_file_system_needs_the_shared_mode(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.batches.database.file_system", lambda path: "nfs4")
    with pytest.raises(ConfigError, match=r"batches\.shared"):
        Database(folder)
    shared = Database(folder, shared=True)
    assert shared.rows("PRAGMA journal_mode")[0][0] == "truncate"
    shared.close()


def test_the_type_of_a_file_system_is_known() -> None:
    assert file_system(Path("/proc")) == "proc"


def test_a_file_is_found_by_its_owner_only_and_outlives_a_restart(store: Store, folder: Path, clock: Clock) -> None:
    file = store.upload(b"one\ntwo\n")
    again = Store(folder, clock)

    assert again.content(file.id) == b"one\ntwo\n"
    assert again.files.get(file.id, ALICE).to_json()["bytes"] == 8
    for ask in (again.files.get, again.files.delete):
        with pytest.raises(NotFoundError):
            ask(file.id, BOB)
    assert again.files.page(BOB) == ([], False)


def test_the_list_of_files_has_pages_in_both_orders(store: Store) -> None:
    ids = [store.upload().id for _ in range(5)]
    seen: list[str] = []
    more = True
    while more:
        page, more = store.files.page(ALICE, after=seen[-1] if seen else "", limit=2)
        seen += [file.id for file in page]
    assert seen == ids[::-1]
    page, more = store.files.page(ALICE, after=ids[0], limit=2, newest_first=False)
    assert ([file.id for file in page], more) == (ids[1:3], True)
    assert store.files.page(ALICE, purpose="batch_output") == ([], False)


def test_a_quota_bounds_bytes_and_number_of_an_owners_files(folder: Path, clock: Clock) -> None:
    store = Store(folder, clock, quota_bytes=3 * 4096)
    first = store.upload(b"x" * 5000)
    store.upload(b"x")
    with pytest.raises(QuotaError, match=r"batches\.quota_gib"):
        store.upload(b"x")
    store.upload(b"x" * 3 * 4096, owner=BOB)

    store.files.delete(first.id, ALICE)
    store.upload(b"x")
    assert len(list((folder / "files").iterdir())) == 3


@pytest.mark.parametrize("step", range(5))
def test_an_upload_that_dies_at_any_step_leaves_nothing_visible(
    step: int, store: Store, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps: sync of the content, rename, sync of the folder, insert, commit."""

    class Death(BaseException):
        pass

    count = 0

    def dying(call: Any) -> Any:
        def run(*given: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == step + 1:
                raise Death
            return call(*given, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "_sync", dying(files_module._sync))
        patch.setattr(Path, "rename", dying(Path.rename))
        patch.setattr(Database, "write", dying(Database.write))
        patch.setattr(FileStore, "get", dying(FileStore.get))
        with pytest.raises(Death):
            store.upload()
    assert count == step + 1
    again = Store(folder, clock)
    visible = 1 if step == 4 else 0  # the answer to the client was lost, the file is complete
    assert len(again.files.page(ALICE)[0]) == visible
    for path in (folder / "files").iterdir():
        os.utime(path, (clock.now_s - STRAY_AFTER_S - 1,) * 2)
    again.files.sweep(1000)
    assert len(list((folder / "files").iterdir())) == visible


# ---- leases


def test_one_gateway_runs_a_batch_until_its_lease_ends(store: Store, folder: Path, clock: Clock) -> None:
    other = Store(folder, clock)
    first = store.begun(3)
    assert other.batches.claim("gateway-1", LEASE_S) is None
    clock.now_s += LEASE_S - 1
    store.batches.renew(first, LEASE_S)
    clock.now_s += LEASE_S - 1
    assert other.batches.claim("gateway-1", LEASE_S) is None

    clock.now_s += 1
    second = other.batches.claim("gateway-1", LEASE_S)
    assert second is not None
    assert (second.epoch, second.total, second.status) == (first.epoch + 1, 3, "in_progress")
    for write in (
        lambda: store.batches.renew(first, LEASE_S),
        lambda: store.batches.record(first, lines(0)),
        lambda: store.batches.begin(first, 9),
        lambda: store.batches.finish(first),
        lambda: store.batches.fail(first, []),
    ):
        with pytest.raises(StaleError):
            write()
    store.batches.release(first)
    assert store.batches.claim("gateway-2", LEASE_S) is None


def test_a_released_batch_is_taken_at_once_and_goes_on_where_it_was(store: Store) -> None:
    claim = store.begun(3)
    store.batches.record(claim, lines(1))
    store.batches.release(claim)
    second = store.batches.claim("gateway-1", LEASE_S)
    assert second is not None
    assert store.batches.answered(second, 0, 2) == {1}
    assert store.batches.answered_among(second, [0, 1, 1 << 20]) == {1}
    assert store.batches.record(second, lines(0, 1, 2, text="later")) == 2
    store.batches.finish(second)
    output = store.batches.get(claim.id, ALICE)["output_file_id"]
    assert store.content(output) == b"later 0\nanswer 1\nlater 2\n"


def test_owners_take_turns(store: Store) -> None:
    for owner in (ALICE, ALICE, BOB):
        store.batches.create(owner, ENDPOINT, store.upload(owner=owner).id, {})
    claims = [store.batches.claim("gateway-0", LEASE_S) for _ in range(3)]
    assert [claim and claim.owner for claim in claims] == [ALICE, BOB, ALICE]


# ---- batches


def test_a_batch_ends_with_its_answers_and_its_errors_in_two_files(store: Store) -> None:
    claim = store.begun(4)
    assert store.batches.record(claim, lines(3, 0) + lines(1, failed=True)) == 3
    with pytest.raises(AccountingError, match=r"2 \+ 1 of 4"):
        store.batches.finish(claim)
    store.batches.record(claim, lines(2))
    assert store.batches.finish(claim) is BatchStatus.COMPLETED

    batch = store.batches.get(claim.id, ALICE)
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert store.content(batch["output_file_id"]) == b"answer 0\nanswer 2\nanswer 3\n"
    assert store.content(batch["error_file_id"]) == b"answer 1\n"
    assert store.files.get(batch["output_file_id"], ALICE).bytes == 27
    assert store.batches.claim("gateway-1", LEASE_S) is None
    with pytest.raises(InvalidRequestError, match="output of a batch"):
        store.batches.create(ALICE, ENDPOINT, batch["output_file_id"], {})
    assert {name for name, at in batch.items() if name.endswith("_at") and at is not None} == {
        "created_at",
        "expires_at",
        "in_progress_at",
        "finalizing_at",
        "completed_at",
    }


def test_an_invalid_file_fails_its_batch(store: Store) -> None:
    store.batches.create(ALICE, ENDPOINT, store.upload().id, {"job": "1"})
    claim = store.batches.claim("gateway-0", LEASE_S)
    assert claim is not None
    store.batches.fail(claim, [{"code": "empty_file", "message": "no lines", "param": None, "line": None}])
    batch = store.batches.get(claim.id, ALICE)
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "empty_file")
    assert batch["metadata"] == {"job": "1"}
    with pytest.raises(NotPossibleError, match="is failed"):
        store.batches.cancel(claim.id, ALICE)


def test_a_batch_is_cancelled_with_what_it_has(store: Store) -> None:
    claim = store.begun(2)
    store.batches.record(claim, lines(0))
    with pytest.raises(NotFoundError):
        store.batches.cancel(claim.id, BOB)
    assert store.batches.cancel(claim.id, ALICE)["status"] == "cancelling"
    assert store.batches.cancel(claim.id, ALICE)["status"] == "cancelling"
    assert store.batches.renew(claim, LEASE_S).status is BatchStatus.CANCELLING
    store.batches.record(claim, lines(1, failed=True))
    assert store.batches.finish(claim) is BatchStatus.CANCELLED
    assert store.batches.get(claim.id, ALICE)["cancelled_at"] is not None


def test_a_batch_expires_after_its_window(store: Store, clock: Clock) -> None:
    claim = store.begun(2)
    clock.now_s += WINDOW_S - 1
    assert store.batches.renew(claim, LEASE_S).status is BatchStatus.IN_PROGRESS
    clock.now_s += 1
    late = store.batches.renew(claim, LEASE_S)
    assert (late.status, late.overdue) == (BatchStatus.FINALIZING, True)
    store.batches.record(claim, lines(0, 1, failed=True))
    assert store.batches.finish(claim) is BatchStatus.EXPIRED
    assert status_of(store, claim) == "expired"


async def test_a_batch_that_cannot_be_validated_fails_after_its_window(store: Store, clock: Clock) -> None:
    """Its file may be unreadable: each try ends with an error, and another one follows when the lease has run out."""

    async def call(method: Callable[..., Any], *arguments: Any) -> Any:
        return method(*arguments)

    async def run() -> Claim:
        claim = store.batches.claim("gateway", LEASE_S)
        assert claim is not None
        nothing: Any = None
        folder = store.database.folder  # reading it fails
        limits: dict[str, Any] = {"model": "m", "most_lines": 9, "most_bytes": 99}
        await BatchRunner(claim, store.batches, call, folder, nothing, nothing, GatewayMetrics("g"), **limits).run()
        return claim

    store.batches.create(ALICE, ENDPOINT, store.upload().id, {})
    claim = await run()
    assert status_of(store, claim) == "validating"
    clock.now_s += WINDOW_S
    assert (await run()).id == claim.id
    assert status_of(store, claim) == "failed"
    (error,) = store.batches.get(claim.id, ALICE)["errors"]["data"]
    assert error["code"] == "batch_expired"


def test_a_death_between_any_two_writes_loses_nothing(
    store: Store, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs a batch to its end while every third write dies, with a new gateway after each death."""

    class DeathError(Exception):
        pass

    write, count, dead_at = Database.write, 0, 3

    def dying(database: Database, statement: str, *values: Any) -> int:
        nonlocal count, dead_at
        count += 1
        if count == dead_at:
            dead_at += 2 + count // 6
            raise DeathError
        return write(database, statement, *values)

    store.batches.create(ALICE, ENDPOINT, store.upload().id, {})
    monkeypatch.setattr(Database, "write", dying)
    deaths, total = 0, 6
    status = None
    while status is not BatchStatus.COMPLETED:
        current = Store(folder, clock)
        try:
            claim = current.batches.claim(f"gateway-{deaths}", LEASE_S)
            assert claim is not None
            if claim.status is BatchStatus.VALIDATING:
                claim = current.batches.begin(claim, total)
            for index in set(range(total)) - current.batches.answered(claim, 0, total):
                current.batches.record(claim, lines(index, text=f"epoch {claim.epoch}"))
            status = current.batches.finish(claim)
        except DeathError:
            deaths += 1
            clock.now_s += LEASE_S + 1
        current.batches.check_integrity()
        current.database.close()
    assert deaths >= 3
    (batch,), _ = store.batches.page(ALICE)
    assert len(store.content(batch["output_file_id"]).splitlines()) == total
    assert batch["request_counts"] == {"total": total, "completed": total, "failed": 0}


WRITER = """
import sys
from alignedserve.gateway.batches.batches import BatchStore, LineAnswer
from alignedserve.gateway.batches.database import Database
from alignedserve.gateway.batches.files import FileStore
database = Database(sys.argv[1])
batches = BatchStore(database, FileStore(database, 1 << 30, 1e6))
claim = batches.claim(sys.argv[2], 0.01)
if claim.total is None:
    claim = batches.begin(claim, 1 << 20)
index = max(batches.answered(claim, 0, 1 << 20), default=-1) + 1
while True:
    batches.record(claim, [LineAnswer(index + k, k == 0, f"{sys.argv[2]} {index + k}".encode()) for k in range(3)])
    index += 3
    print(index, flush=True)
"""


def test_a_killed_process_leaves_whole_transactions(folder: Path) -> None:
    store = Store(folder, time.time)
    store.batches.create(ALICE, ENDPOINT, store.upload().id, {})
    draw, told = random.Random(7), 0
    for number in range(3):
        command = [sys.executable, "-c", WRITER, str(folder), f"gateway-{number}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(draw.randrange(2, 30)):
                told = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
        store.batches.check_integrity()
        (batch,), _ = store.batches.page(ALICE)
        counts = batch["request_counts"]
        assert counts["completed"] + counts["failed"] >= told  # what was said to be written is written
        assert counts["completed"] == 2 * counts["failed"]  # no half of a transaction
    store.database.close()
