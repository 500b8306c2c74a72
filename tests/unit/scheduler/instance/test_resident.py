"""Prefixes of a cache: found while a request holds them, once they are filled, with the same tokens and salt only."""

from __future__ import annotations

import itertools
import random

import pytest

from alignedserve.errors import AccountingError
from alignedserve.scheduler.instance.resident import BlockChain, Resident, ResidentPrefixes
from support.chains import chain_of


def chain(words: str, salt: bytes = b"") -> BlockChain:
    found = chain_of(words, 2, salt)
    assert found is not None
    return found


def test_a_prefix_is_found_once_it_is_filled_until_its_last_holder_has_left() -> None:
    prefixes = ResidentPrefixes()
    first = prefixes.enter(chain("aabbcc"), [7, 8, 9])
    assert prefixes.find(chain("aabbxx")) is None
    first.filled = True
    assert prefixes.find(chain("aabbxx")) == [7, 8]
    assert prefixes.find(chain("xxbbcc")) == []
    second = prefixes.enter(chain("aabbxx"), [7, 8, 4])
    assert prefixes.find(chain("aabbcc")) == [7, 8, 9]
    assert prefixes.find(chain("aabbxx")) is None  # its own block is not filled yet
    prefixes.leave(first)
    assert prefixes.find(chain("aabbcc")) == [7, 8]
    prefixes.check_integrity([second])
    prefixes.leave(second)
    assert prefixes.find(chain("aabbcc")) == []
    prefixes.check_integrity([])


def test_only_requests_of_one_salt_share() -> None:
    prefixes = ResidentPrefixes()
    first = prefixes.enter(chain("aabb"), [7, 8], filled=True)
    assert prefixes.find(chain("aabb", b"s")) == []
    second = prefixes.enter(chain("aabb", b"s"), [1, 2], filled=True)
    assert (prefixes.find(chain("aabb")), prefixes.find(chain("aabb", b"s"))) == ([7, 8], [1, 2])
    prefixes.leave(first)
    prefixes.check_integrity([second])
    assert (prefixes.find(chain("aabb")), prefixes.find(chain("aabb", b"s"))) == ([], [1, 2])


def test_a_request_with_other_blocks_for_a_prefix_that_is_here_is_an_error() -> None:
    prefixes = ResidentPrefixes()
    prefixes.enter(chain("aabbcc"), [7, 8, 9], filled=True)
    with pytest.raises(AccountingError, match="does not share"):
        prefixes.enter(chain("aabbdd"), [7, 4, 5])


def test_what_is_found_is_what_a_plain_search_finds() -> None:
    draw = random.Random(1)
    prefixes, residents, block = ResidentPrefixes(), list[Resident](), itertools.count()
    for _ in range(3000):
        asked = chain("".join(draw.choice("ab") * 2 for _ in range(draw.randrange(1, 12))))
        ends = [(length, one) for one in residents for length in range(1, asked.blocks + 1)
                if one.chain.tokens.startswith(asked.tokens[: length * asked.block_bytes])]  # fmt: skip
        longest = max((length for length, _ in ends), default=0)
        here = [one for length, one in ends if length == longest]
        found = prefixes.find(asked)
        if found is None:
            assert not any(one.filled for one in here)
        else:
            assert all(found == one.block_ids[:longest] for one in here)
            assert len(found) == longest
            own = [next(block) for _ in range(asked.blocks - longest)]
            residents.append(prefixes.enter(asked, found + own, filled=draw.random() < 0.7))
        if len(residents) > 20 or (residents and draw.random() < 0.3):
            prefixes.leave(residents.pop(draw.randrange(len(residents))))
        for one in residents:
            one.filled |= draw.random() < 0.1
        prefixes.check_integrity(residents)
    for one in residents:
        prefixes.leave(one)
    prefixes.check_integrity([])
    assert not prefixes._roots
