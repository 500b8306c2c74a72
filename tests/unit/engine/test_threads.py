"""A small pass gets one thread and a large one gets all. The process's setting is unchanged afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from alignedserve.engine.batch import ForwardItem, PackedBatch, build_batch
from alignedserve.engine.threads import PassThreads

BLOCK_SIZE = 16
NUM_BLOCKS = 1024


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def batch(*lengths: tuple[int, int]) -> PackedBatch:
    """One item for each (new tokens, cached tokens)."""
    items = []
    for count, start in lengths:
        items.append(ForwardItem([1] * count, start, list(range(-(-(start + count) // BLOCK_SIZE)))))
    return build_batch(items, BLOCK_SIZE, NUM_BLOCKS, torch.device("cpu"))


def test_a_short_prompt_of_a_small_model_gets_one_thread_and_a_long_one_all() -> None:
    threads = PassThreads(4_000_000, 6, 128)
    assert [threads.choose(batch((count, 0))) for count in (1, 128, 1024)] == [1, 1, 2]


def test_decode_rows_count_with_the_weights_and_the_context_that_they_read() -> None:
    small, middle = PassThreads(4_000_000, 6, 128), PassThreads(134_000_000, 12, 768)
    assert small.choose(batch(*[(1, 40)] * 32)) == 1
    assert small.choose(batch(*[(1, 8000)] * 32)) == 2
    assert middle.choose(batch((1, 40))) == 1
    assert middle.choose(batch(*[(1, 40)] * 32)) == 2


def test_a_large_model_always_gets_all_and_a_single_thread_stays_one() -> None:
    assert PassThreads(7_000_000_000, 32, 1024).choose(batch((1, 0))) == 2
    torch.set_num_threads(1)
    assert PassThreads(7_000_000_000, 32, 1024).choose(batch((1024, 0))) == 1


def test_the_setting_holds_for_the_pass_and_is_put_back_even_where_it_fails() -> None:
    threads = PassThreads(4_000_000, 6, 128)
    with threads.held(batch((1, 0))):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(RuntimeError), threads.held(batch((1, 0))):
        raise RuntimeError("a pass that fails")
    assert torch.get_num_threads() == 2
