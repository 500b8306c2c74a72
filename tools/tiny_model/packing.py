"""Packs token sequences into rows of equal length, in batches of several row lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_model.chat import END_OF_TEXT, chat_samples
from tools.tiny_model.corpus import Document

SAME_CONVERSATION_SHARE = 0.25


@dataclass(frozen=True)
class RowShape:
    """A batch shape and the share of batches with it."""

    rows: int
    row_tokens: int
    share: float


ROW_SHAPES = (
    RowShape(rows=16, row_tokens=256, share=0.55),
    RowShape(rows=8, row_tokens=512, share=0.35),
    RowShape(rows=2, row_tokens=2048, share=0.08),
    RowShape(rows=1, row_tokens=8192, share=0.02),
)


@dataclass
class TokenSource:
    """Endless stream of shuffled samples: every document as plain text and in chat form."""

    tokenizer: Tokenizer
    documents: Sequence[Document]
    rng: random.Random
    _plain: list[list[int]] = field(init=False)
    _separator: int = field(init=False)

    def __post_init__(self) -> None:
        texts = [document.as_plain_text() for document in self.documents]
        self._plain = self._encode(texts)
        self._separator = self._encode([END_OF_TEXT])[0][0]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]

    def one_pass(self) -> list[list[int]]:
        """Samples of one pass over the documents, shuffled, each with its separator."""
        chats = self._encode(list(chat_samples(self.documents, self.rng)))
        samples = [[*ids, self._separator] for ids in self._plain]
        for ids in chats:
            follows_on = self.rng.random() < SAME_CONVERSATION_SHARE
            samples.append(ids if follows_on else [*ids, self._separator])
        self.rng.shuffle(samples)
        return samples

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.one_pass()


def pack_rows(samples: Iterator[list[int]], row_tokens: int, rows: int) -> Tensor:
    """Fill `[rows, row_tokens]` ids. A row begins with a sample's first token, or inside a
    sample that is longer than a row; the part of a short sample beyond the row is dropped."""
    packed: list[list[int]] = []
    row: list[int] = []
    while len(packed) < rows:
        sample = next(samples)
        row.extend(sample)
        while len(row) >= row_tokens and len(packed) < rows:
            packed.append(row[:row_tokens])
            rest = row[row_tokens:]
            row = rest if len(sample) > row_tokens else []
    return torch.tensor(packed)


def training_batches(source: TokenSource) -> Iterator[Tensor]:
    """Endless batches of ids `[rows, row_tokens]`, their shapes drawn by share."""
    samples = iter(source)
    shares = [shape.share for shape in ROW_SHAPES]
    while True:
        shape = source.rng.choices(ROW_SHAPES, shares)[0]
        yield pack_rows(samples, shape.row_tokens, shape.rows)


def evaluation_rows(source: TokenSource, row_tokens: int) -> Tensor:
    """One pass of `source` as ids `[rows, row_tokens]`, without the last, incomplete row."""
    ids = [token for sample in source.one_pass() for token in sample]
    rows = len(ids) // row_tokens
    return torch.tensor(ids[: rows * row_tokens]).view(rows, row_tokens)
