"""Attention over blocks that requests share: the groups that are found, and results against fp64 and the plain path."""

from __future__ import annotations

import math
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.engine.backends import torch_backend, torch_shared
from alignedserve.engine.backends.base import AttentionBackend
from alignedserve.engine.backends.registry import BACKENDS
from alignedserve.engine.shared_prefixes import SharedGroup, find_groups
from alignedserve.testing.attention import INTERPRETER_WARNINGS, OPTIONS, TOLERANCE, options_of, shared_case

DECODES = [(1, 70, 3), (1, 50, 3), (1, 48, 3), (1, 20, 0), (1, 40, 2), (1, 90, 5)]
"""Requests of (new tokens, cached tokens, blocks of 16 shared with the others that share as many or more)."""
MIXED = [(1, 70, 3), (20, 48, 3), (1, 50, 0), (3, 40, 2), (5, 0, 0), (7, 52, 3)]

FEW = [(1, 20, 1), (1, 30, 1), (5, 16, 1), (1, 3, 0)]  # for Triton's interpreter


def groups_of(rows: list[list[int]], least_saved: float) -> list[SharedGroup]:
    firsts = np.array([row[0] if row else -1 for row in rows], dtype=np.int64)
    return find_groups(firsts, lambda row: np.array(rows[row], dtype=np.int32), least_saved)


def saved(groups: list[SharedGroup], least_saved: float) -> float:
    return sum((len(group.members) - 1) * group.blocks - least_saved for group in groups)


@pytest.mark.parametrize(
    ("rows", "least_saved", "expected"),
    [
        ([[1, 2, 9], [1, 2, 8], [1, 2]], 0, [((0, 1, 2), 2)]),
        ([[1, 2], [3, 4], []], 0, []),
        ([[], []], 0, []),
        ([[1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5, 8], [1, 9], [1, 6]], 0, [((2, 3), 1), ((0, 1), 5)]),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 4]], 0, [((0, 1, 2), 2)]),
        ([[1, 2, 9], [1, 2, 8], [1, 2]], 4, []),
    ],
)
def test_the_groups_that_save_most(
    rows: list[list[int]], least_saved: float, expected: list[tuple[tuple[int, ...], int]]
) -> None:
    found = [(group.members, group.blocks) for group in groups_of(rows, least_saved)]
    assert sorted(found) == sorted(expected)


def best_by_force(rows: list[tuple[int, ...]], least_saved: float) -> float:
    """The most that any partition into groups saves."""
    if not rows:
        return 0.0
    first, rest = rows[0], rows[1:]
    most = best_by_force(rest, least_saved)
    for chosen in range(1, 1 << len(rest)):
        members = [row for bit, row in enumerate(rest) if chosen >> bit & 1]
        others = [row for bit, row in enumerate(rest) if not chosen >> bit & 1]
        depth = len(list(takewhile(lambda column: len(set(column)) == 1, zip(first, *members, strict=False))))
        worth = len(members) * depth - least_saved
        if worth > 0:
            most = max(most, worth + best_by_force(others, least_saved))
    return most


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6), st.sampled_from([0.0, 1.5, 4.0]))
def test_no_partition_saves_more(shapes: list[list[int]], least_saved: float) -> None:
    """Rows are paths in a tree, so that a block's id says everything before it, as in a store."""
    rows = [[int("1" + "".join(map(str, shape[: depth + 1])), 2) for depth in range(len(shape))] for shape in shapes]
    groups = groups_of(rows, least_saved)
    members = [member for group in groups for member in group.members]
    assert len(members) == len(set(members))
    for group in groups:
        assert len({tuple(rows[member][: group.blocks]) for member in group.members}) == 1
    assert saved(groups, least_saved) == best_by_force([tuple(row) for row in rows], least_saved)


def attended(backend: AttentionBackend, case: Any, options: Any, least_saved_bytes: float) -> torch.Tensor:
    backend.least_saved_bytes = least_saved_bytes
    backend.begin(case.batch)
    return backend.attend(1, case.query, case.key, case.value, options)


@pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)
@pytest.mark.parametrize(
    ("name", "option", "dtype", "spans"),
    [
        ("torch", "plain", torch.float32, DECODES),
        ("torch", "plain", torch.float32, MIXED),
        ("torch", "tiles", torch.float32, DECODES),
        ("torch", "rows", torch.float32, MIXED),
        ("torch", "window", torch.float32, MIXED),
        ("torch", "sinks", torch.bfloat16, MIXED),
        ("torch", "softcap", torch.float32, DECODES),
        ("triton", "sinks", torch.bfloat16, FEW),
        ("triton", "softcap", torch.float32, FEW),
        ("triton_no_split", "plain", torch.float32, FEW[:2]),
    ],
)
def test_shared_blocks_give_the_result_of_the_plain_path(
    name: str,
    option: str,
    dtype: torch.dtype,
    spans: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if option == "tiles":
        monkeypatch.setattr(torch_shared, "_FUSED", None)
        option = "plain"
    if option == "rows":  # a chunk's scores do not fit
        monkeypatch.setattr(torch_backend, "TILE_SCORES", 500)
        option = "plain"
    case = shared_case(spans, heads=6, kv_heads=2, head_dim=40, block_size=16, dtype=dtype)
    options = options_of(OPTIONS[option], 6, 40)
    backend = BACKENDS.get(name)(case.cache)
    shared = attended(backend, case, options, 0.0)
    plain = attended(backend, case, options, math.inf)
    torch.testing.assert_close(shared.double(), case.expected(options)[0], rtol=0.0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(shared, plain, rtol=0.0, atol=TOLERANCE[dtype])
    if option != "window":  # it hides tokens: then the plain path is taken
        assert not torch.equal(shared, plain), "the rounding of another order of sums was expected"
    else:
        assert torch.equal(shared, plain)
