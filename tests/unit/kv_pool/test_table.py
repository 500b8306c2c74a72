"""The allocation table: what a process killed at any moment leaves behind."""

from __future__ import annotations

import pytest

from alignedserve.errors import GeometryMismatchError, TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.records import (
    Dead,
    Held,
    Holding,
    Leased,
    Lost,
    Payload,
    PoolState,
    Record,
    Released,
    Returned,
    WriterKey,
    decode,
    encode,
    held_bytes,
)
from alignedserve.kv_pool.table import HEADER_BYTES, LEAST_SLACK_BYTES, SPARE_BYTES, AllocationTable, table_bytes
from alignedserve.request import RequestKey

GEOMETRY = KvGeometry("random", "float32", 2, 2, 8, 4)
WRITER = WriterKey("prefill", "prefill-0", 7)
REGION = SPARE_BYTES + 2048
RECORDS: list[Record] = [
    Leased(WRITER, (0, 1, 2, 3)),
    Held(Holding(RequestKey("r", 2), 5, (1, 0)), WRITER),
    Held(Holding(RequestKey("ü" * 100, 0), 3, (1,))),
    Held(Holding(RequestKey("checked", 1), 5, (6, 7), (0, 2**64 - 1)), WRITER),
    Returned(WRITER, (3,)),
    Lost(WRITER),
    Released("r"),
    Dead(WRITER),
]


def memory(capacity: int = 8) -> memoryview:
    return memoryview(bytearray(table_bytes(capacity)))


def open_table(area: memoryview, region: int = 0) -> AllocationTable:
    return AllocationTable(area, GEOMETRY, 8, region=region)


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_survives_its_form_in_bytes(record: Record) -> None:
    data = encode(record)
    assert decode(data) == record
    for length in range(len(data)):
        with pytest.raises(TransferError):
            decode(data[:length])


def test_the_state_is_the_sum_of_the_records() -> None:
    state = PoolState()
    for record in RECORDS[:6]:
        state.apply(record)
    assert state.holdings["r"] == Holding(RequestKey("r", 2), 5, (1, 0))
    assert state.leases == {WRITER: {2}}
    assert state.lost == {WRITER}
    again = PoolState()
    for record in state.records():
        again.apply(record)
    assert again == state
    for record in RECORDS[6:]:
        state.apply(record)
    assert (set(state.holdings), state.leases, state.lost) == ({"ü" * 100, "checked"}, {}, set())


def test_a_successor_reads_what_was_appended_and_goes_on() -> None:
    area, expected = memory(), PoolState()
    for record in RECORDS:
        table = open_table(area)  # each time a new process
        assert table.state() == expected
        assert table.append(record)
        expected.apply(record)
    assert open_table(area).state() == expected


def test_a_record_is_there_whole_or_not_at_all_wherever_its_writer_was_killed() -> None:
    area = memory()
    table = open_table(area)
    for record in RECORDS[:2]:
        table.append(record)
    before, image = table.state(), bytearray(area)
    table.append(RECORDS[2])
    after = bytes(area)
    changed = [at for at in range(0, len(after), 8) if image[at : at + 8] != after[at : at + 8]]
    visible = changed.pop(0)  # the word with length and checksum precedes the record, and is written last
    for at in [*changed, visible]:
        assert open_table(memoryview(bytearray(image))).state() == before
        image[at : at + 8] = after[at : at + 8]
    assert open_table(memoryview(image)).state() == table.state()
    assert table.state() != before


def test_a_full_region_is_rewritten_in_the_other_with_the_live_state_alone() -> None:
    area = memory()
    table, expected, rewritten = open_table(area, REGION), PoolState(), 0
    for turn in range(500):
        record = Held(Holding(RequestKey(f"r{turn % 3}", turn), 5, (turn % 8, (turn + 1) % 8)))
        if not table.append(record):
            table.rewrite(expected.records())
            assert table.append(record)
            rewritten += 1
        expected.apply(record)
    assert rewritten > 5
    assert table.state() == open_table(area, REGION).state() == expected


def test_the_journal_of_a_small_state_touches_few_pages() -> None:
    capacity = 10_000
    area = memoryview(bytearray(table_bytes(capacity)))
    table, state = AllocationTable(area, GEOMETRY, capacity), PoolState()
    for turn in range(20_000):
        record = Held(Holding(RequestKey(f"r{turn % 3}", turn), 5, (turn % 8, (turn + 1) % 8)))
        if not table.append(record):
            table.rewrite(state.records())
            assert table.append(record)
        state.apply(record)
    touched = sum(any(area[at : at + 4096]) for at in range(0, len(area), 4096)) * 4096
    assert touched <= HEADER_BYTES + 2 * (LEAST_SLACK_BYTES + 8192)
    assert AllocationTable(area, GEOMETRY, capacity).found == state


def test_a_process_killed_while_it_rewrites_leaves_the_old_region_valid() -> None:
    area = memory()
    table = open_table(area, REGION)
    for record in RECORDS[:4]:
        table.append(record)
    expected = table.state()

    def killed_midway() -> object:
        yield RECORDS[1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.rewrite(killed_midway())  # type: ignore[arg-type]
    assert open_table(area, REGION).state() == expected


def test_a_state_that_does_not_fit_is_refused_and_the_old_one_kept() -> None:
    table = open_table(memory(), REGION)
    table.append(RECORDS[0])
    expected = table.state()
    too_many = [Held(Holding(RequestKey(f"request-{i}"), 1, (0,))) for i in range(500)]
    with pytest.raises(TransferError, match="is full"):
        table.rewrite(too_many)
    assert table.state() == expected
    assert table.append(RECORDS[1])


def test_only_records_that_shrink_the_state_use_the_spare_end() -> None:
    table = open_table(memory(), REGION)
    while table.append(Leased(WRITER, (1,))):
        pass
    assert table.append(Dead(WRITER), shrinks=True)


def test_the_table_of_another_model_or_size_is_refused_naming_both() -> None:
    area = memory(16)
    open_table(area)
    other = KvGeometry("other", "float32", 2, 2, 8, 4)
    with pytest.raises(GeometryMismatchError, match=rf"{GEOMETRY.fingerprint}.*{other.fingerprint}.*other"):
        AllocationTable(area, other, 8)
    with pytest.raises(GeometryMismatchError, match=r"holds 8 blocks .* not 16"):
        AllocationTable(area, GEOMETRY, 16)
    with pytest.raises(TransferError, match="does not fit"):
        AllocationTable(area[:HEADER_BYTES], GEOMETRY, 8)


def test_a_damaged_table_is_refused() -> None:
    area = memory()
    open_table(area).append(RECORDS[1])
    area[HEADER_BYTES + 10] ^= 1
    with pytest.raises(TransferError, match="damaged at byte 4096"):
        open_table(area)


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(TransferError, match="over the limit"):
        encode(Released("x" * 2000))


def test_records_of_holdings_are_as_long_as_they_are_said_to_be() -> None:
    for holding in (
        Holding(RequestKey("r"), 4, (1,)),
        Holding(RequestKey("chatcmpl-" + "a" * 32 + "-0", 3), 4000, tuple(range(250)), tuple(range(250))),
        Holding(RequestKey("r"), 4, (1,), payload=Payload(tuple(range(60)), 1 << 16, 7)),
    ):
        record = len(encode(Held(holding)))
        assert record <= held_bytes(holding) <= record + 64
