"""Compiled grammars by spec, so that a schema that many requests share is compiled once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from alignedserve.grammar.base import Grammar, GrammarLibrary, RowGrammar
from alignedserve.request import GrammarSpec, SamplingParams
from alignedserve.text import Tokenizer

MOST_GRAMMARS = 256
THREADS = 2  # that compile
_Key = tuple[GrammarSpec, tuple[int, ...]]


class Grammars:
    """The least recently used are dropped. Threads may compile different specs at the same time."""

    def __init__(self, library: GrammarLibrary, most: int = MOST_GRAMMARS) -> None:
        self._library = library
        self._most = most
        self._compiled: OrderedDict[_Key, Grammar] = OrderedDict()
        self._lock = Lock()  # of the dict only: compiling takes long
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, vocab_size: int) -> Grammars | None:
        """None without a tokenizer: a grammar is about text."""
        if tokenizer is None:
            return None
        from alignedserve.grammar.llguidance_library import LlguidanceLibrary

        return cls(LlguidanceLibrary(tokenizer, vocab_size))

    def compile(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar:
        """The grammar, compiled unless it is known. Raises GrammarError."""
        key = spec, eos_token_ids
        found = self.known(spec, eos_token_ids)
        if found is not None:
            return found
        found = self._library.compile(spec, eos_token_ids)
        with self._lock:
            self._compiled[key] = found
            while len(self._compiled) > self._most:
                self._compiled.popitem(last=False)
        return found

    def begin(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Future[Grammar]:
        """Compile on another thread, before a compute thread needs the grammar."""
        return self._pool.submit(self.compile, spec, eos_token_ids)

    async def prepare(self, requests: Iterable[SamplingParams]) -> None:
        """Compile what these requests need, on other threads. Errors are raised again when a grammar is used."""
        pairs = {(sampling.grammar, sampling.eos_token_ids) for sampling in requests}
        waits = [self.begin(grammar, ends) for grammar, ends in pairs if grammar and not self.known(grammar, ends)]
        await asyncio.gather(*map(asyncio.wrap_future, waits), return_exceptions=True)

    def known(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar | None:
        """The grammar if it is compiled."""
        key = spec, eos_token_ids
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
        return found

    def row(self, sampling: SamplingParams) -> RowGrammar | None:
        """The state of an answer at its beginning; None without a grammar. Compiles if needed. Raises GrammarError."""
        if sampling.grammar is None:
            return None
        grammar = self.compile(sampling.grammar, sampling.eos_token_ids)
        return RowGrammar(self._library, grammar, sampling)
