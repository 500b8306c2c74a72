"""Which leading blocks of a request another one already has in the same cache, so that both hold them.

Prefixes are found by their tokens, in a radix tree of whole blocks. So a block's content is known by what it was
computed from, never by a block id of another store, which may have been used again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from alignedserve.errors import AccountingError


@dataclass(frozen=True, slots=True)
class BlockChain:
    """The full blocks of a request's tokens, from the first on.

    `tokens`: their token ids, in `blocks` equal parts. `salt`: only requests of the same salt share blocks.
    """

    blocks: int
    tokens: bytes
    salt: bytes

    @classmethod
    def of(cls, token_ids: Sequence[int], salt: bytes, block_size: int) -> BlockChain | None:
        """None if there is no full block. Raises OverflowError if a token id does not fit in 32 bits."""
        blocks = len(token_ids) // block_size
        return cls(blocks, array("I", token_ids[: blocks * block_size]).tobytes(), salt) if blocks else None

    @property
    def block_bytes(self) -> int:
        return len(self.tokens) // self.blocks


@dataclass(eq=False, slots=True)
class Resident:
    """A request of the cache: `block_ids` hold, or will hold, the KV of its chain. `filled`: they do now."""

    chain: BlockChain
    block_ids: list[int]
    filled: bool
    end: _Node | None = None  # where its chain ends in the tree; None: none of it is there


@dataclass(eq=False, slots=True)
class _Node:
    """Blocks that follow one another, up to where requests part or end."""

    tokens: bytes
    block_ids: list[int]
    source: Resident | None  # that had the last of the blocks allocated; it may have left. None: a root
    parent: _Node | None
    holders: int = 0  # requests whose chains go through it or end with it
    children: dict[bytes, _Node] = field(default_factory=dict)  # by the tokens of their first blocks


class ResidentPrefixes:
    """The prefixes of one cache. A block can be found as long as a request that entered with it has not left.

    Each operation compares the tokens of one chain, and steps where requests part from it.
    """

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node] = {}  # by salt

    def find(self, chain: BlockChain) -> list[int] | None:
        """The blocks of the longest prefix of `chain` that is here; None if some of them are being filled."""
        block_ids: list[int] = []
        for node, blocks in self._path(chain, as_far_as_filled=True):
            if not blocks:
                return None
            block_ids += node.block_ids[:blocks]
        return block_ids

    def enter(self, chain: BlockChain, block_ids: list[int], *, filled: bool = False) -> Resident:
        """A request holds `block_ids` for its chain: first those that `find` returned, then its own."""
        resident = Resident(chain, block_ids[: chain.blocks], filled)
        size, done = chain.block_bytes, 0
        at = self._roots.setdefault(chain.salt, _Node(b"", [], None, None))
        for node, blocks in self._path(chain):
            if node.block_ids[:blocks] != resident.block_ids[done : done + blocks]:
                raise AccountingError("a request does not share the blocks of its beginning that are in the cache")
            done += blocks
            at = node if blocks == len(node.block_ids) else self._part(node, blocks, size)
        if done < chain.blocks:
            own = _Node(chain.tokens[done * size :], resident.block_ids[done:], resident, at)
            at.children[own.tokens[:size]] = own
            at = own
        resident.end = at
        for node in _up(at):
            node.holders += 1
        return resident

    def leave(self, resident: Resident) -> None:
        """The request no longer holds its blocks."""
        assert resident.end is not None
        size = resident.chain.block_bytes
        for node in list(_up(resident.end)):
            node.holders -= 1
            parent = node.parent
            if parent is None:
                if not node.holders:
                    del self._roots[resident.chain.salt]
            elif not node.holders:
                del parent.children[node.tokens[:size]]
            elif len(node.children) == 1:
                self._join(node, size)
        resident.end = None

    def _path(self, chain: BlockChain, *, as_far_as_filled: bool = False) -> Iterator[tuple[_Node, int]]:
        """The nodes that `chain` goes through, each with how many of its blocks, at least 1, are of the chain.

        `as_far_as_filled`: the last is the first that is being filled, with 0. Many requests may wait for it, and
        comparing takes longer. Nothing that it continues is being filled.
        """
        tokens, size, at = chain.tokens, chain.block_bytes, 0
        node = self._roots.get(chain.salt)
        while node is not None and (node := node.children.get(tokens[at : at + size])) is not None:
            if as_far_as_filled and node.source is not None and not node.source.filled:
                yield node, 0
                return
            if tokens.startswith(node.tokens, at):
                yield node, len(node.block_ids)
                at += len(node.tokens)
            else:
                yield node, _equal_blocks(tokens, at, node.tokens, size)
                return

    def _part(self, node: _Node, blocks: int, size: int) -> _Node:
        """Make the first `blocks` blocks a node of their own, and return it. `node` keeps the others."""
        assert node.parent is not None
        end = blocks * size
        first = _Node(node.tokens[:end], node.block_ids[:blocks], node.source, node.parent, node.holders)
        node.parent.children[first.tokens[:size]] = first
        node.tokens, node.block_ids, node.parent = node.tokens[end:], node.block_ids[blocks:], first
        first.children[node.tokens[:size]] = node
        return first

    def _join(self, node: _Node, size: int) -> None:
        """Make a node one with the only one that follows it, if the same requests hold both, and both are filled."""
        (child,) = node.children.values()
        assert node.parent is not None
        assert child.source is not None
        if child.holders == node.holders and (child.source is node.source or child.source.filled):
            child.tokens, child.block_ids = node.tokens + child.tokens, node.block_ids + child.block_ids
            child.parent = node.parent
            node.parent.children[child.tokens[:size]] = child

    def check_integrity(self, residents: list[Resident]) -> None:
        """Raises AccountingError if the tree is not that of `residents`."""
        counted: Counter[_Node] = Counter()
        for resident in residents:
            assert resident.end is not None
            path = list(_up(resident.end))[::-1]
            counted.update(path)
            tokens = b"".join(node.tokens for node in path)
            block_ids = [block for node in path for block in node.block_ids]
            if (tokens, block_ids) != (resident.chain.tokens, resident.block_ids):
                raise AccountingError("the prefixes that can be shared are not those of the requests that hold them")
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            wrong = [child for child in node.children.values() if child.parent is not node]
            if wrong or counted.pop(node, 0) != node.holders:
                raise AccountingError("the prefixes that can be shared do not match the requests that hold them")
        if counted:
            raise AccountingError("requests hold prefixes that cannot be found")


def _up(node: _Node | None) -> Iterator[_Node]:
    """A node and what it continues, the root last."""
    while node is not None:
        yield node
        node = node.parent


def _equal_blocks(tokens: bytes, at: int, other: bytes, size: int) -> int:
    """How many blocks of `size` bytes are equal from `at` on; at least 1, and not all of `other`."""
    low, high = 1, len(other) // size - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens.startswith(other[: middle * size], at) else (low, middle - 1)
    return low
