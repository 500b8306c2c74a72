"""Several gateways on one store, in any order of calls, deaths and late writes: no line ever has two answers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from alignedserve.errors import AccountingError, StaleError
from alignedserve.gateway.batches.batches import WINDOW_S, BatchStore, Claim, LineAnswer
from alignedserve.gateway.batches.database import Database
from alignedserve.gateway.batches.files import FileStore
from alignedserve.gateway.batches.states import BatchStatus
from alignedserve.gateway.failures import NotPossibleError
from support.machines import machine_settings

OWNER, LEASE_S, LINES = b"owner", 15.0, 4


class StoreMachine(RuleBasedStateMachine):
    """A claim that was taken over stays in the bundle: its gateway may wake up and write."""

    claims = Bundle("claims")

    @initialize()
    def start(self) -> None:
        self.now_s = 1_800_000_000.0
        self.folder = Path(tempfile.mkdtemp()) / "store"
        self.gateways = [self.open() for _ in range(2)]
        self.current: dict[int, int] = {}  # batch -> epoch of its last lease
        self.until_s: dict[int, float] = {}
        self.answers: dict[int, dict[int, bytes]] = {}
        self.ended: dict[int, str] = {}

    def open(self) -> BatchStore:
        database = Database(self.folder, clock=lambda: self.now_s)
        return BatchStore(database, FileStore(database, 1 << 30, 1e9))

    @rule()
    def create(self) -> None:
        store = self.gateways[0]
        file_id, draft = store._files.draft()
        draft.write_bytes(b"{}\n")
        store._files.add(file_id, OWNER, "in")
        store.create(OWNER, "/v1/completions", file_id, {})

    @rule(target=claims, gateway=st.integers(0, 1))
    def claim(self, gateway: int) -> Claim | None:
        claim = self.gateways[gateway].claim(f"gateway-{gateway}", LEASE_S)
        if claim is not None:
            assert self.until_s.get(claim.number, 0.0) <= self.now_s, "a lease was taken over before its end"
            assert claim.number not in self.ended
            self.current[claim.number] = claim.epoch
            self.until_s[claim.number] = self.now_s + LEASE_S
            self.answers.setdefault(claim.number, {})
        return claim

    def holds(self, claim: Claim) -> bool:
        return self.current[claim.number] == claim.epoch

    @rule(claim=claims, gateway=st.integers(0, 1))
    def renew(self, claim: Claim | None, gateway: int) -> None:
        if claim is None:
            return
        try:
            self.gateways[gateway].renew(claim, LEASE_S)
        except StaleError:
            assert not self.holds(claim)
        else:
            assert self.holds(claim)
            self.until_s[claim.number] = self.now_s + LEASE_S

    @rule(claim=claims)
    def validate(self, claim: Claim | None) -> None:
        if claim is None or claim.status is not BatchStatus.VALIDATING:
            return
        try:
            now = self.gateways[0].begin(claim, LINES)
        except StaleError:
            assert not self.holds(claim)
        else:
            assert now.status is not BatchStatus.VALIDATING

    @rule(claim=claims, indices=st.sets(st.integers(0, LINES - 1), min_size=1), failed=st.booleans())
    def record(self, claim: Claim | None, indices: set[int], failed: bool) -> None:
        if claim is None:
            return
        rows = [LineAnswer(index, failed, f"{claim.epoch} {index}".encode()) for index in sorted(indices)]
        try:
            self.gateways[1].record(claim, rows)
        except StaleError:
            assert not self.holds(claim) or claim.number in self.ended
        except AccountingError:
            assert self.gateways[0].get(claim.id, OWNER)["status"] == "validating"
        else:
            assert self.holds(claim)
            for row in rows:
                self.answers[claim.number].setdefault(row.index, row.row)

    @rule(claim=claims)
    def finish(self, claim: Claim | None) -> None:
        if claim is None or claim.number in self.ended:
            return
        try:
            self.ended[claim.number] = self.gateways[0].finish(claim)
        except StaleError:
            assert not self.holds(claim)
        except AccountingError:
            assert len(self.answers[claim.number]) < LINES
        else:
            self.until_s[claim.number] = float("inf")

    @rule(claim=claims)
    def release(self, claim: Claim | None) -> None:
        if claim is not None:
            self.gateways[0].release(claim)
            if self.holds(claim) and claim.number not in self.ended:
                self.until_s[claim.number] = 0.0

    @rule(claim=claims)
    def cancel(self, claim: Claim | None) -> None:
        if claim is not None:
            try:
                self.gateways[0].cancel(claim.id, OWNER)
            except NotPossibleError:
                assert self.gateways[0].get(claim.id, OWNER)["status"] in ("finalizing", "completed", "expired")

    @rule(seconds=st.sampled_from([1.0, LEASE_S, WINDOW_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(gateway=st.integers(0, 1))
    def restart(self, gateway: int) -> None:
        self.gateways[gateway]._db.close()
        self.gateways[gateway] = self.open()

    @invariant()
    def answers_are_the_first_ones(self) -> None:
        for number, expected in getattr(self, "answers", {}).items():
            rows = self.gateways[0]._db.rows(
                "SELECT key, row FROM lines WHERE key >= ? AND key < ?", number << 32, (number + 1) << 32
            )
            assert {row["key"] - (number << 32): row["row"] for row in rows} == expected

    def teardown(self) -> None:
        self.gateways[1].check_integrity()
        for number, status in self.ended.items():
            if status in ("completed", "expired"):
                assert len(self.answers[number]) == LINES
        for gateway in self.gateways:
            gateway._db.close()
        shutil.rmtree(self.folder.parent)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = machine_settings(8, 30)
