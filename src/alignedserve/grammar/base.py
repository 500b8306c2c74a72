"""The contract of a grammar library, and an answer's state under a grammar.

A request carries only its `GrammarSpec`. The process that chooses its next token compiles the spec and replays the
tokens of the answer so far. So no message contains the state, and the death of a process does not lose it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from alignedserve.errors import GrammarError
from alignedserve.request import GrammarSpec, SamplingParams

Bits = npt.NDArray[np.int32]
"""One bit a token of the vocabulary, `[rows, ceil(vocabulary / 32)]`; bit i % 32 of word i / 32 allows token i."""


class Matcher(ABC):
    """One answer's position in a grammar. Used by one thread at a time."""

    @abstractmethod
    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens. Raises GrammarError if the grammar does not allow one of them."""


class Grammar(ABC):
    """A compiled grammar. Any thread may ask for matchers."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """A matcher at the beginning."""


class GrammarLibrary(ABC):
    """Compiles grammars for one tokenizer, and fills masks."""

    @abstractmethod
    def compile(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar:
        """The grammar, at whose end only `eos_token_ids` are allowed. Takes up to seconds; keeps no lock meanwhile.

        Raises GrammarError, which says where, if the spec is wrong, too large, or uses what the library cannot express.
        """

    @abstractmethod
    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        """Write the tokens that each matcher allows next into its row of `bits`. Raises GrammarError."""


class RowGrammar:
    """The matcher of one answer, which follows its tokens. Keep the object while the request decodes."""

    __slots__ = ("_accepted", "_ends", "_eos", "library", "matcher")

    def __init__(self, library: GrammarLibrary, grammar: Grammar, sampling: SamplingParams) -> None:
        self.library = library
        self.matcher = grammar.matcher()
        self._accepted = 0
        self._eos = np.array(sampling.eos_token_ids, dtype=np.int64)
        self._ends = np.unique(np.array((*sampling.eos_token_ids, *sampling.stop_token_ids), dtype=np.int64))

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Accept the tokens that were added since the last call. Raises GrammarError if one is not allowed."""
        if new := output_token_ids[self._accepted :]:
            self.matcher.accept(new)
            self._accepted = len(output_token_ids)

    def forbid_ends(self, bits: Bits, *, stops: bool = True) -> None:
        """Clear the end tokens in its own row `[words]`, unless the grammar allows nothing else.

        `stops`: those of `stop_token_ids`, too.
        """
        ends = self._ends if stops else self._eos
        ends = ends[(ends >= 0) & (ends < 32 * len(bits))]
        before = bits[ends // 32].copy()
        np.bitwise_and.at(bits, ends // 32, ~(np.uint32(1) << (ends % 32).astype(np.uint32)).astype(np.int32))
        if not bits.any():
            bits[ends // 32] = before


def fill_rows(rows: Sequence[RowGrammar], vocab_size: int) -> Bits:
    """The masks of rows of one library, at least one, that have accepted their tokens: `[rows, ceil(vocab_size / 32)]`.

    Raises GrammarError.
    """
    bits = np.zeros((len(rows), -(-vocab_size // 32)), dtype=np.int32)
    rows[0].library.fill([row.matcher for row in rows], bits)
    if not bits.any(axis=1).all():
        raise GrammarError("the grammar allows no token here: it cannot be continued in this vocabulary")
    return bits
