"""Answers' states under grammars, and the masks of a batch of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from operator import is_
from typing import TYPE_CHECKING

import numpy as np

from alignedserve.errors import GrammarError
from alignedserve.grammar.base import Bits, Grammar
from alignedserve.request import SamplingParams

if TYPE_CHECKING:
    from alignedserve.grammar.compiled import Grammars


class RowGrammar:
    """The matcher of one answer, which follows its tokens. Keep the object while the request decodes."""

    __slots__ = ("_accepted", "_ends", "_eos", "_ignore_eos", "_min_tokens", "ended", "grammars", "matcher")

    def __init__(self, grammars: Grammars, grammar: Grammar, sampling: SamplingParams) -> None:
        self.grammars = grammars
        self.matcher = grammar.matcher()
        self.ended = False  # its last token is an end token: nothing follows
        self._accepted = 0
        self._min_tokens, self._ignore_eos = sampling.min_tokens, sampling.ignore_eos
        self._eos = np.array(sampling.eos_token_ids, dtype=np.int64)
        self._ends = np.unique(np.array((*sampling.eos_token_ids, *sampling.stop_token_ids), dtype=np.int64))

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Accept the tokens that were added since the last call. Raises GrammarError if one is not allowed."""
        if not self.ended and (new := output_token_ids[self._accepted :]):
            self.matcher.accept(new)
            self._accepted = len(output_token_ids)
            self.ended = bool((self._eos == new[-1]).any())

    def finish_mask(self, bits: Bits) -> None:
        """Keep the answer going in its own row `[words]` until `min_tokens`, and with `ignore_eos` always.

        Only a whole answer may then end.
        """
        early = self._accepted < self._min_tokens
        if early or self._ignore_eos:
            self.forbid_ends(bits, stops=early)

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


class BegunMasks:
    """Masks that another thread fills. Until `finish` returns, no other thread may use their matchers."""

    def __init__(self, rows: Sequence[RowGrammar], outputs: Sequence[Sequence[int]], masks: Future[Bits]) -> None:
        self.rows, self.lengths, self._masks = list(rows), [len(output) for output in outputs], masks

    def finish(self) -> None:
        wait([self._masks])

    def found(self, rows: Sequence[RowGrammar], outputs: Sequence[Sequence[int]]) -> Bits | None:
        """The filled masks; None if they are of other rows, or outputs. Raises GrammarError."""
        same = len(rows) == len(self.rows) and all(map(is_, rows, self.rows))
        return self._masks.result() if same and self.lengths == [len(output) for output in outputs] else None


def begin_masks(rows: Sequence[RowGrammar], outputs: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Fill the masks on another thread, for the `fill_rows` of the same rows and outputs that follows."""
    if rows:
        grammars = rows[0].grammars
        _finish(grammars)
        grammars.begun = BegunMasks(rows, outputs, grammars.fill_later(partial(_filled, rows, outputs, vocab_size)))


def fill_rows(rows: Sequence[RowGrammar], outputs: Sequence[Sequence[int]], vocab_size: int) -> Bits:
    """The masks of rows of one `Grammars` after their `outputs`, `[rows, ceil(vocab_size / 32)]`.

    Everything is allowed in the row of an answer that has ended. Raises GrammarError if one row cannot go on.
    """
    begun = _finish(rows[0].grammars) if rows else None
    found = begun.found(rows, outputs) if begun is not None else None
    return _filled(rows, outputs, vocab_size) if found is None else found


def _finish(grammars: Grammars) -> BegunMasks | None:
    begun, grammars.begun = grammars.begun, None
    if begun is not None:
        begun.finish()
    return begun


def _filled(rows: Sequence[RowGrammar], outputs: Sequence[Sequence[int]], vocab_size: int) -> Bits:
    began_s = time.perf_counter()
    bits = np.full((len(rows), -(-vocab_size // 32)), -1, dtype=np.int32)
    for row, output in zip(rows, outputs, strict=True):
        row.update(output)
    if not any(row.ended for row in rows):
        _fill(rows, bits)
    elif going := [index for index, row in enumerate(rows) if not row.ended]:
        part = bits[going]
        _fill([rows[index] for index in going], part)
        bits[going] = part
    if rows:
        rows[0].grammars.meter.mask_seconds.observe(time.perf_counter() - began_s)
    return bits


def fill_each(
    rows: Sequence[RowGrammar], outputs: Sequence[Sequence[int]], vocab_size: int
) -> tuple[Bits, dict[int, GrammarError]]:
    """As `fill_rows`, but a row that cannot go on has an error, by its index, and everything allowed."""
    try:
        return fill_rows(rows, outputs, vocab_size), {}
    except GrammarError:
        bits = np.full((len(rows), -(-vocab_size // 32)), -1, dtype=np.int32)
    errors: dict[int, GrammarError] = {}
    for index, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        try:
            bits[index] = fill_rows([row], [output], vocab_size)[0]
        except GrammarError as error:
            errors[index] = error
    return bits, errors


def _fill(rows: Sequence[RowGrammar], bits: Bits) -> None:
    if not rows:
        return
    rows[0].grammars.library.fill([row.matcher for row in rows], bits)
    if not bits.any(axis=1).all():
        raise GrammarError("the grammar allows no token here: it cannot be continued in this vocabulary")
    for row, own in zip(rows, bits, strict=True):
        row.finish_mask(own)
