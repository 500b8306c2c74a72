"""The contract of a grammar library: what is compiled, and a position in it.

A request carries only its `GrammarSpec`. The process that chooses its next token compiles the spec and replays the
tokens of the answer so far. So no message contains the state, and the death of a process does not lose it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from alignedserve.errors import GrammarError
from alignedserve.request import GrammarSpec
from alignedserve.text import Tokenizer

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


def require_pieces(tokenizer: Tokenizer) -> None:
    """Raises GrammarError for a tokenizer whose tokens have no text of their own: a mask could not be exact."""
    if tokenizer.piece_rules is None:
        raise GrammarError("this model's tokenizer has no text for single tokens: it has no structured output")


class GrammarLibrary(ABC):
    """Compiles grammars for one tokenizer, and fills masks."""

    def prepare(self, eos_token_ids: tuple[int, ...]) -> None:  # noqa: B027
        """Make what `compile` needs once for these end tokens. It takes up to seconds. Raises GrammarError."""

    @abstractmethod
    def compile(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar:
        """The grammar, at whose end only `eos_token_ids` are allowed. Takes up to seconds, in which other threads run.

        Raises GrammarError, which says where, if the spec is wrong, too large, or uses what the library cannot express.
        """

    @abstractmethod
    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        """Write the tokens that each matcher allows next into its row of `bits`. Other threads run meanwhile.

        Raises GrammarError for all if one of them cannot go on; the others can be filled again.
        """
