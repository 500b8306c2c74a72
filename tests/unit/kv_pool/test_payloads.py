"""Payloads beside the KV: in pages of the segment, for the next epoch and for a successor of the process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from alignedserve.errors import AccountingError, TransferError
from alignedserve.kv_pool.payloads import LEAST_PAGES, PAGE_BYTES, PayloadPages, payload_pages
from alignedserve.kv_pool.records import Holding
from alignedserve.kv_pool.stored import LastCommitted, location, pack, pooled, renewed, unpacked
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey
from support.kv_pool import CAPACITY, DECODE, PREFILL, leased, open_pool, table_memory

A, AGAIN = RequestKey("a"), RequestKey("a", 1)


def pages(count: int) -> PayloadPages:
    return PayloadPages(memoryview(bytearray(count * PAGE_BYTES)), ())


def stored(prompt: Sequence[int], output: Sequence[int], **spec: object) -> bytes:
    key = pb.RequestKey(request_id="a")
    values: dict[str, object] = {"prompt_token_ids": prompt, "output_token_ids": output, **spec}
    return pack(pb.RequestSpec(key=key, **values), "prefill-0", "", 7, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES])
def test_what_was_written_is_read_again(length: int) -> None:
    memory = pages(8)
    other = memory.write(b"o" * 700)
    data = bytes(range(256)) * (length // 256 + 1)
    payload = memory.write(data[:length])
    assert payload is not None
    assert other is not None
    assert memory.read(payload) == data[:length]
    assert memory.read(other) == b"o" * 700
    assert memory.used_pages == 1 + len(payload.page_ids) == 1 + -(-length // PAGE_BYTES)


def test_pages_that_are_free_again_are_used_before_others() -> None:
    memory = pages(4)
    first = memory.write(b"a" * 2 * PAGE_BYTES)
    assert first is not None
    memory.free(first)
    second = memory.write(b"b")
    assert second is not None
    assert set(second.page_ids) < set(first.page_ids)
    assert memory.write(b"c" * 4 * PAGE_BYTES) is None
    assert memory.write(b"c" * 3 * PAGE_BYTES) is not None
    assert memory.write(b"d") is None


def test_what_was_changed_where_it_lay_is_not_read() -> None:
    area = memoryview(bytearray(2 * PAGE_BYTES))
    memory = PayloadPages(area, ())
    payload = memory.write(b"a" * 100)
    assert payload is not None
    area[payload.page_ids[0] * PAGE_BYTES + 50] = 0
    with pytest.raises(TransferError, match="has changed"):
        memory.read(payload)


def test_a_successor_of_the_pools_process_has_what_was_stored() -> None:
    memory = table_memory()
    pool = open_pool(memory)
    pool.commit(PREFILL, A, 11, leased(pool, PREFILL, 3), payload=b"first")
    pool.commit(PREFILL, RequestKey("b"), 4, leased(pool, PREFILL, 1), payload=b"x" * 3000)
    pool.commit(DECODE, A, 12, pool.read(A)[0].block_ids, kept_blocks=3, payload=b"second")  # type: ignore[index]
    pool.release([RequestKey("b")])
    pool.check_integrity()

    successor = open_pool(memory)

    read = successor.read(A)
    assert read is not None
    assert (read[0].kv_tokens, read[1]) == (12, b"second")
    assert successor.read(AGAIN) is None
    assert successor.read(RequestKey("b")) is None
    assert successor._table.payloads.used_pages == 1
    successor.check_integrity()


def test_a_commit_that_finds_no_room_for_its_payload_changes_nothing() -> None:
    pool = open_pool(table_memory())
    blocks = leased(pool, PREFILL, 2)
    pool.commit(PREFILL, A, 4, blocks[:1], payload=b"before")
    room = payload_pages(CAPACITY) * PAGE_BYTES
    with pytest.raises(TransferError, match="no room"):
        pool.commit(PREFILL, A, 8, blocks, kept_blocks=1, payload=b"x" * room)
    read = pool.read(A)
    assert read is not None
    assert (read[0].kv_tokens, read[1]) == (4, b"before")
    pool.commit(PREFILL, A, 8, blocks, kept_blocks=1, payload=b"x" * (room - PAGE_BYTES))
    pool.check_integrity()
    assert payload_pages(CAPACITY) > LEAST_PAGES


def test_pages_of_no_request_are_found_by_a_recount() -> None:
    pool = open_pool(table_memory())
    pool._table.payloads.write(b"unowned")
    with pytest.raises(AccountingError, match="payload"):
        pool.check_integrity()


@pytest.mark.parametrize(("delivered", "kept"), [(3, True), (2, True), (4, False)])
def test_a_new_epoch_has_it_where_nothing_is_missing(delivered: int, kept: bool) -> None:
    pool = open_pool(table_memory())
    pool.commit(PREFILL, A, 8, leased(pool, PREFILL, 2), payload=stored(range(6), (1, 2, 3)))
    head = pb.RequestHead(
        key=pb.RequestKey(request_id="a", epoch=1), prompt_tokens=6, output_tokens=delivered, group_id="g", group_size=1
    )
    (adopted,), _ = pool.adopt([(AGAIN, 5 + delivered)], lambda payload: renewed(payload, head, 5))
    assert adopted.kv_tokens == min(8, 5 + delivered)
    read = pool.read(AGAIN)
    assert (read is not None) == kept
    if read is not None:
        request = pb.StoredRequest.FromString(unpacked(read[1], read[0], "kv_pool-0"))
        assert list(request.spec.output_token_ids) == [1, 2, 3][:delivered]
        assert (request.spec.key.epoch, request.spec.group_id, request.prefill_id) == (1, "g", "prefill-0")
        assert (request.kv_tokens, request.pool_tokens, request.store_id) == (5 + delivered, 5 + delivered, "kv_pool-0")
        assert request.spec.timings.stage == "pool"
    pool.check_integrity()


def test_one_without_a_token_is_not_made_over_as_something_to_decode() -> None:
    pool = open_pool(table_memory())
    pool.commit(PREFILL, A, 6, leased(pool, PREFILL, 2), payload=stored(range(6), (1,)))
    (adopted,), _ = pool.adopt([(AGAIN, 5)])
    assert (adopted.kv_tokens, adopted.payload) == (5, None)
    pool.check_integrity()


def test_tokens_that_are_not_here_are_not_made_up() -> None:
    head = pb.RequestHead(key=pb.RequestKey(request_id="a", epoch=1), prompt_tokens=6, output_tokens=4)
    with pytest.raises(TransferError, match="all of its tokens"):
        renewed(stored(range(6), (1, 2, 3)), head, 5)


def test_what_is_read_names_the_blocks_and_checksums_of_its_shard() -> None:
    holding = Holding(A, 8, (3, 1), (30, 10))
    request = pb.StoredRequest.FromString(unpacked(stored(range(6), (1, 2, 3)), holding, "kv_pool-1"))
    assert (request.pool_id, list(request.block_ids), list(request.pool_block_ids)) == ("kv_pool-1", [3, 1], [3, 1])
    assert (list(request.checksums), list(request.pool_checksums)) == ([30, 10], [30, 10])
    assert (request.evicted_ns, request.evictions) == (7, 2)
    assert list(request.spec.prompt_token_ids) == list(range(6))


def committed(name: str, tokens: int, pool_id: str = "kv_pool-0") -> pb.StoredRequest:
    request = location(pool_id, tokens, [1], [])
    request.spec.key.request_id = name
    return request


def test_only_the_very_copy_that_was_committed_last_is_taken() -> None:
    last = LastCommitted()
    last.note(committed("a", 10))
    last.note(committed("a", 12))
    assert last.take(pooled(committed("a", 12))) == committed("a", 12)
    assert last.take(pooled(committed("a", 12))) is None
    for other in (committed("b", 11), committed("b", 10, "kv_pool-1")):
        last.note(committed("b", 10))
        assert last.take(pooled(other)) is None
    epoch = pooled(committed("c", 10))
    epoch.key.epoch = 1
    last.note(committed("c", 10))
    assert last.take(epoch) is None


def test_the_oldest_committed_requests_are_dropped() -> None:
    last = LastCommitted(most_tokens=30)
    for name in "abcd":
        last.note(committed(name, 10))
    assert [last.take(pooled(committed(name, 10))) is not None for name in "abcd"] == [False, True, True, True]
    last.note(committed("e", 31))
    assert last.take(pooled(committed("e", 31))) is None
    last = LastCommitted(most_tokens=30)
    for name in "ab":
        bound = committed(name, 1)
        bound.spec.sampling.grammar.text = "x" * 20
        last.note(bound)
    assert [last.take(pooled(committed(name, 1))) is not None for name in "ab"] == [False, True]
    last = LastCommitted(most_requests=1)
    last.note(committed("a", 1))
    last.note(committed("b", 1))
    assert [last.take(pooled(committed(name, 1))) is not None for name in "ab"] == [False, True]
