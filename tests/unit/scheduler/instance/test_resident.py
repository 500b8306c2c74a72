"""Prefixes of a cache: found while a request holds them, once they are filled, with the same tokens and salt only."""

from __future__ import annotations

from alignedserve.kv_pool.prefix_chain import digest
from alignedserve.scheduler.instance.resident import BlockChain, ResidentPrefixes
from support.chains import chain_of


def chain(words: str, salt: bytes = b"", *, collides: bool = False) -> BlockChain:
    found = chain_of(words, 2, salt, (lambda data: b"." * 16) if collides else digest)
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


def test_equal_digests_of_other_tokens_or_another_salt_are_a_miss() -> None:
    prefixes = ResidentPrefixes()
    first = prefixes.enter(chain("aa", collides=True), [7], filled=True)
    assert prefixes.find(chain("bb", collides=True)) == []
    assert prefixes.find(chain("aa", b"s", collides=True)) == []
    assert prefixes.find(chain("aa", collides=True)) == [7]
    other = prefixes.enter(chain("bb", collides=True), [8], filled=True)
    prefixes.leave(first)
    assert prefixes.find(chain("bb", collides=True)) == []  # it was never entered
    prefixes.leave(other)
    prefixes.check_integrity([])
