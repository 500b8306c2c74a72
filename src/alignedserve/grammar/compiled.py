"""Compiled grammars by spec: compiled once for all requests that share one, on threads of their own, within limits."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from threading import Lock, Thread, stack_size

from alignedserve.config import EngineConfig
from alignedserve.errors import ConfigError, GrammarError
from alignedserve.grammar.base import Bits, Grammar, GrammarLibrary
from alignedserve.grammar.rows import BegunMasks, RowGrammar
from alignedserve.metrics import Histogram, Page
from alignedserve.request import GrammarSpec, SamplingParams
from alignedserve.text import Tokenizer

MOST_GRAMMARS = 256
MOST_CHARACTERS = 1 << 24  # of the kept grammars' specs, all together; llguidance takes some 50 bytes for each
THREADS = 2  # that compile, beside those that have exceeded the time limit
MOST_OVERDUE = 4  # threads that have: no library can be interrupted
_POLL_S = 0.05
_STACK_A_CHARACTER = 512  # bytes: libraries recurse by rules and references, and an overflow ends the process
_LEAST_STACK = 16 << 20
_stack_size = Lock()  # Python's setting is the process's
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_Key = tuple[str, bytes, str | None, tuple[int, ...]]


class GrammarMeter:
    """`mask_seconds`: of the masks of one batch."""

    def __init__(self) -> None:
        self.compile_seconds = Histogram(_SECONDS)
        self.mask_seconds = Histogram(_SECONDS)
        self.hits = 0
        self.refused = 0

    def show_metrics(self, page: Page) -> None:
        page.histogram("grammar_compile_seconds", "time to compile a grammar", self.compile_seconds)
        page.counter("grammar_cache_hits_total", "grammars that were already compiled when needed", self.hits)
        page.counter("grammar_refused_total", "grammars refused: wrong, unsupported, too large or slow", self.refused)
        page.histogram("grammar_mask_seconds", "time for the masks of one batch", self.mask_seconds)


class _Job:
    def __init__(self, key: _Key, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> None:
        self.key, self.spec, self.eos_token_ids = key, spec, eos_token_ids
        self.future: Future[Grammar] = Future()
        self.future.set_running_or_notify_cancel()  # it is for several: none can cancel it
        self.began_s: float | None = None
        self.overdue = False


class Grammars:
    """Keeps the last used grammars, and the errors of refused ones, of one library and tokenizer. For all threads.

    `limit_s`: see `ready`. `most_characters`: of one spec.
    """

    def __init__(
        self,
        library: GrammarLibrary,
        *,
        most: int = MOST_GRAMMARS,
        most_characters: int = 1 << 20,
        limit_s: float = 3.0,
    ) -> None:
        self.library = library
        self.meter = GrammarMeter()
        self._most, self._most_characters, self._limit_s = most, most_characters, limit_s
        self._compiled: OrderedDict[_Key, tuple[Grammar | GrammarError, int]] = OrderedDict()
        self._characters = 0
        self._jobs: dict[_Key, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._running = self._overdue = 0
        self._lock = Lock()  # of the fields above, never held while something is compiled
        self.begun: BegunMasks | None = None  # of the thread that computes
        self._filler: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, vocab_size: int, engine: EngineConfig | None = None) -> Grammars | None:
        """None without a tokenizer: a grammar is about text. Raises ConfigError if the library is not installed."""
        if tokenizer is None:
            return None
        engine = engine or EngineConfig()
        limits = {"most_characters": int(engine.grammar_max_kib * 1024), "limit_s": engine.grammar_compile_s}
        return cls(grammar_library(engine.grammar, tokenizer, vocab_size), **limits)  # type: ignore[arg-type]

    def known(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar | None:
        """The grammar if it is compiled. Raises GrammarError if it was refused."""
        return self._known(_key(spec, eos_token_ids))

    def compile(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar:
        """The grammar, compiled unless it is known. Raises GrammarError."""
        return self.begin(spec, eos_token_ids).result()

    def begin(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Future[Grammar]:
        """Compile on another thread, unless one does already. The future may have a GrammarError."""
        return self._begin(spec, eos_token_ids).future

    async def ready(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar:
        """As `compile`. A grammar that is compiled for longer than `limit_s` is refused, now and later."""
        job = self._begin(spec, eos_token_ids)
        waiting = asyncio.ensure_future(asyncio.wrap_future(job.future))
        try:
            while not waiting.done():
                began_s = job.began_s
                left_s = _POLL_S if began_s is None else began_s + self._limit_s - time.monotonic()
                if left_s <= 0:
                    raise self._too_slow(job)
                await asyncio.wait({waiting}, timeout=left_s)
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.add_done_callback(_ignore)  # it goes on for others

    async def prepare(self, requests: Iterable[SamplingParams]) -> None:
        """Compile what these requests need, on other threads. Errors are raised again when a grammar is used."""
        pairs = {(sampling.grammar, sampling.eos_token_ids) for sampling in requests}
        waits = [self.begin(grammar, ends) for grammar, ends in pairs if grammar is not None]
        await asyncio.gather(*map(asyncio.wrap_future, waits), return_exceptions=True)

    def row(self, sampling: SamplingParams) -> RowGrammar | None:
        """The state of an answer at its beginning; None without a grammar. Compiles if needed. Raises GrammarError."""
        if sampling.grammar is None:
            return None
        return RowGrammar(self, self.compile(sampling.grammar, sampling.eos_token_ids), sampling)

    def fill_later(self, fill: Callable[[], Bits]) -> Future[Bits]:
        """Call it on a thread of its own."""
        if self._filler is None:
            self._filler = ThreadPoolExecutor(1, thread_name_prefix="masks")
        return self._filler.submit(fill)

    # ---- the threads that compile

    def _begin(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> _Job:
        key = _key(spec, eos_token_ids)
        job = _Job(key, spec, eos_token_ids)
        try:
            found = self._known(key)
            if found is None and len(spec.text) > self._most_characters:
                most = f"engine.grammar_max_kib ({self._most_characters / 1024:g})"
                raise GrammarError(f"{spec.kind}: {len(spec.text)} characters are more than {most} allows")
        except GrammarError as error:
            self.meter.refused += 1
            job.future.set_exception(error)
            return job
        if found is not None:
            self.meter.hits += 1
            job.future.set_result(found)
            return job
        with self._lock:
            if (running := self._jobs.get(key)) is not None:
                return running
            self._jobs[key] = job
            self._waiting.append(job)
            self._start_waiting()
        return job

    def _start_waiting(self) -> None:
        """Holding the lock."""
        while self._waiting and self._running < THREADS:
            self._running += 1
            job = self._waiting.popleft()
            thread = Thread(target=self._run, args=(job,), name="grammar", daemon=True)
            try:
                _start(thread, max(_LEAST_STACK, _STACK_A_CHARACTER * len(job.spec.text)))
            except RuntimeError as error:  # no memory for its stack
                self._running -= 1
                del self._jobs[job.key]
                job.future.set_exception(GrammarError(f"{job.spec.kind}: no thread to compile it: {error}"))

    def _run(self, job: _Job) -> None:
        began_s = time.monotonic()
        found: Grammar | GrammarError
        try:
            self.library.prepare(job.eos_token_ids)  # not the grammar's own time
            began_s = job.began_s = time.monotonic()
            found = self.library.compile(job.spec, job.eos_token_ids)
        except GrammarError as error:
            found = error
        except BaseException as error:  # the library's own; a panic of Rust is no Exception
            found = GrammarError(f"{job.spec.kind}: {' '.join(str(error).split())[:300]}")
        with self._lock:
            self.meter.compile_seconds.observe(time.monotonic() - began_s)
            if job.overdue:
                self._overdue -= 1
            else:
                self._running -= 1
            self._jobs.pop(job.key, None)
            self._keep(job.key, found, len(job.spec.text))
            self._start_waiting()
        if isinstance(found, GrammarError):
            self.meter.refused += 1
            job.future.set_exception(found)
        else:
            job.future.set_result(found)

    def _keep(self, key: _Key, found: Grammar | GrammarError, characters: int) -> None:
        """Holding the lock. What was refused stays refused."""
        if key in self._compiled:
            return
        self._compiled[key] = found, characters
        self._characters += characters
        while len(self._compiled) > self._most or (len(self._compiled) > 1 and self._characters > MOST_CHARACTERS):
            self._characters -= self._compiled.popitem(last=False)[1][1]

    def _known(self, key: _Key) -> Grammar | None:
        with self._lock:
            found = self._compiled.get(key)
            if found is None:
                return None
            self._compiled.move_to_end(key)
        if isinstance(found[0], GrammarError):
            raise GrammarError(found[0].message)
        return found[0]

    def _too_slow(self, job: _Job) -> GrammarError:
        """Refuse it. Its thread goes on, since no library can be interrupted; another takes its place."""
        limit = f"engine.grammar_compile_s ({self._limit_s:g})"
        error = GrammarError(f"{job.spec.kind}: compiling it takes longer than {limit} allows; make it smaller")
        with self._lock:
            self._keep(job.key, error, len(job.spec.text))
            if not job.overdue and self._overdue < MOST_OVERDUE and job.key in self._jobs:
                job.overdue = True
                self._overdue += 1
                self._running -= 1
                self._start_waiting()
        self.meter.refused += 1
        return error


def grammar_library(name: str, tokenizer: Tokenizer, vocab_size: int) -> GrammarLibrary:
    """The library of `engine.grammar`, imported only now. Raises ConfigError if it is not installed."""
    if name == "xgrammar":
        if find_spec("xgrammar") is None:
            raise ConfigError(
                "engine.grammar is xgrammar, which is not installed: pip install 'alignedserve[xgrammar]'"
            )
        from alignedserve.grammar.xgrammar_library import XgrammarLibrary

        return XgrammarLibrary(tokenizer, vocab_size, fill_threads())
    from alignedserve.grammar.llguidance_library import LlguidanceLibrary

    return LlguidanceLibrary(tokenizer, vocab_size, fill_threads())


def fill_threads() -> int:
    """Threads that fill one batch's masks: a quarter of the cores, at most 8; the others have their own work."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 4))


def _start(thread: Thread, stack_bytes: int) -> None:
    """Start a thread with a stack of this size, of which memory is used only as it is reached."""
    with _stack_size:
        before = stack_size(-(-stack_bytes // 4096) * 4096)
        try:
            thread.start()
        finally:
            stack_size(before)


def _key(spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> _Key:
    return spec.kind, hashlib.blake2b(spec.text.encode(errors="surrogatepass")).digest(), spec.whitespace, eos_token_ids


def _ignore(waiting: asyncio.Future[Grammar]) -> None:
    """Retrieve the error of a compilation whose requests have ended, so that asyncio does not log it."""
    if not waiting.cancelled():
        waiting.exception()
