"""Which GPUs tensor parallel ranks get, on made-up machines: pairs, quads, NVSwitch, PCIe only."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import combinations

import pytest

from alignedserve.ranks.neighbours import NVLINK, apart, neighbours_together

SAME_SWITCH, SAME_SOCKET, OTHER_SOCKET = 10, 40, 50


def machine(*joined: Collection[int], sockets: int = 4) -> Callable[[str, str], int]:
    """`joined`: GPUs that NVLink connects with each other. A socket has `sockets` GPUs in a row."""
    links = {frozenset(pair) for group in joined for pair in combinations(group, 2)}

    def distance(first: str, second: str) -> int:
        if frozenset((int(first), int(second))) in links:
            return NVLINK
        return SAME_SOCKET if int(first) // sockets == int(second) // sockets else OTHER_SOCKET

    return distance


def ordered(gpus: str, size: int, distance: Callable[[str, str], int]) -> list[str]:
    """Groups, each as a word."""
    found = neighbours_together(list(gpus), size, distance)
    assert sorted(found) == sorted(gpus)
    return ["".join(found[at : at + size]) for at in range(0, len(found), size)]


def test_pairs_with_bridges_stay_together() -> None:
    bridged = machine((0, 2), (1, 3), (4, 7), (5, 6))
    assert ordered("0123", 2, bridged) == ["02", "13"]
    assert ordered("01234567", 2, bridged) == ["02", "13", "47", "56"]
    assert ordered("2301", 2, bridged) == ["20", "31"]  # rank 0 keeps the first


def test_groups_of_four_take_pairs_of_one_socket() -> None:
    bridged = machine((0, 5), (1, 4), (2, 7), (3, 6), sockets=2)  # 0 1 | 2 3 | 4 5 | 6 7
    assert ordered("01234567", 4, bridged) == ["0145", "2367"]


def test_quads_stay_together() -> None:
    quads = machine((0, 2, 4, 6), (1, 3, 5, 7))
    assert ordered("01234567", 4, quads) == ["0246", "1357"]
    assert ordered("01234567", 2, quads) == ["02", "13", "46", "57"]
    assert ordered("0123", 2, quads) == ["02", "13"]


def test_the_order_stays_where_all_links_are_equal_or_nothing_is_to_choose() -> None:
    switched, pcie = machine(range(16)), machine()
    assert ordered("0123456789", 2, switched) == ["01", "23", "45", "67", "89"]
    assert ordered("3120", 2, pcie) == ["31", "20"]
    assert ordered("01234567", 4, pcie) == ["0123", "4567"]
    assert neighbours_together(["2", "0", "1"], 2, machine((0, 2))) == ["2", "0", "1"]  # no whole groups
    assert neighbours_together(["1", "0"], 2, pcie) == ["1", "0"]
    assert neighbours_together(["1", "0"], 1, pcie) == ["1", "0"]


def test_a_chain_is_cut_where_it_costs_least() -> None:
    """The best pair of all, 0 and 1, would leave two GPUs without a link."""
    assert ordered("0123", 2, machine((2, 0), (0, 1), (1, 3))) == ["02", "13"]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_large_nodes_are_searched_within_bounds(size: int) -> None:
    asked = 0
    plain = machine(*((number, number + 8) for number in range(8)), sockets=8)

    def distance(first: str, second: str) -> int:
        nonlocal asked
        asked += 1
        return plain(first, second)

    gpus = [str(number) for number in range(16)]
    found = neighbours_together(gpus, size, distance)
    assert sorted(found, key=int) == gpus
    assert found[:2] == ["0", "8"] or size > 2
    assert asked < 5_000_000


def test_pairs_that_nvlink_does_not_connect_are_found() -> None:
    bridged = machine((0, 1), (2, 3))
    assert apart(["0", "1", "2", "3"], 2, bridged) == []
    assert apart(["0", "2", "1", "3"], 2, bridged) == [("0", "2"), ("1", "3")]
    assert apart(["0", "1"], 1, bridged) == []
