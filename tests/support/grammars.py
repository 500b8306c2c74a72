"""Answers under a grammar from random logits, without a model, and what a library allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Event

import numpy as np

from alignedserve.errors import GrammarError
from alignedserve.grammar.base import Bits, Grammar, GrammarLibrary, Matcher
from alignedserve.grammar.compiled import Grammars, grammar_library
from alignedserve.request import GrammarSpec, SamplingParams
from alignedserve.text import Tokenizer

TINY = Path(__file__).parents[2] / "src/alignedserve/models/tiny"
VOCAB_SIZE, EOS = 2048, 0
LIBRARIES = ("llguidance", "xgrammar")
PATIENCE = 30  # tokens after which an answer leans towards its end, more with each token


@cache
def tiny_tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(TINY)
    assert found is not None
    return found


@cache
def tiny_grammars(library: str) -> Grammars:
    """The shipped model's, with that library."""
    return Grammars(grammar_library(library, tiny_tokenizer(), VOCAB_SIZE), limit_s=60.0)


@cache
def _closers() -> np.ndarray:
    """How much each token helps to end an answer: it is short, and closes something. `[vocabulary]`."""
    tokenizer, found = tiny_tokenizer(), np.zeros(VOCAB_SIZE)
    for token in range(VOCAB_SIZE):
        piece = tokenizer.piece(token)
        found[token] = sum(piece.count(sign) for sign in b'"}])>') - 2 * sum(piece.count(sign) for sign in b"{[(,")
        found[token] -= len(piece) / 4
    found[EOS] = 6.0
    return found


def allows(grammars: Grammars, spec: GrammarSpec, text: str) -> bool:
    """Whether the text is a whole answer. Raises GrammarError if the spec is refused."""
    matcher = grammars.compile(spec, (EOS,)).matcher()
    try:
        matcher.accept(tiny_tokenizer().encode(text, special_tokens=False))
    except GrammarError:
        return False
    bits = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)
    grammars.library.fill([matcher], bits)
    return bool(bits[0, 0] & (1 << EOS))


def write(grammars: Grammars, spec: GrammarSpec, seed: int, *, temperature: float = 1.0, most: int = 160) -> str | None:
    """An answer from random logits; None if it is not finished after `most` tokens. Raises GrammarError."""
    sampling = SamplingParams(grammar=spec, eos_token_ids=(EOS,))
    row = grammars.row(sampling)
    assert row is not None
    random = np.random.default_rng(seed)
    output: list[int] = []
    bits = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)
    for _ in range(most):
        row.update(output)
        grammars.library.fill([row.matcher], bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if not len(allowed):
            raise GrammarError("a dead end")
        logits = 2 * random.standard_normal(len(allowed))
        if len(output) > PATIENCE or random.random() < 0.05:
            logits += _closers()[allowed] * (1 + len(output) / PATIENCE)
        noise = random.gumbel(size=len(allowed)) * temperature if temperature else 0.0
        token = int(allowed[np.argmax(logits + noise)])
        if token == EOS:
            return tiny_tokenizer().decode(output)
        output.append(token)
    return None


def share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


class Anything(Matcher, Grammar):
    def matcher(self) -> Matcher:
        return self

    def accept(self, token_ids: Sequence[int]) -> None: ...


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


class SlowLibrary(GrammarLibrary):
    """Compiles "slow…" once `go` is set, fails for "bad…", and else compiles at once."""

    def __init__(self) -> None:
        self.go, self.compiled = Event(), [""]

    def compile(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar:
        self.compiled.append(spec.text)
        if spec.text.startswith("slow"):
            self.go.wait(30)
        if spec.text.startswith("bad"):
            raise RuntimeError("a message\n  of the library")
        if spec.text.startswith("panic"):
            raise Panic("a message\n  of the library")
        return Anything()

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        bits[:] = -1
