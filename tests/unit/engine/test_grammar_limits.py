"""Limits of grammars: size, time, and threads; and that one bad grammar affects no other request."""

from __future__ import annotations

import asyncio
import time

import pytest

from alignedserve.errors import ConfigError, GrammarError
from alignedserve.grammar import compiled
from alignedserve.grammar.compiled import Grammars, grammar_library
from alignedserve.metrics import Page
from alignedserve.request import GrammarKind, GrammarSpec, SamplingParams
from support.grammars import EOS, LIBRARIES, VOCAB_SIZE, Anything, SlowLibrary, tiny_tokenizer

ENDS = (EOS,)


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


async def test_what_takes_too_long_is_refused_and_others_go_on() -> None:
    library = SlowLibrary()
    grammars = Grammars(library, limit_s=0.2)
    slow = [asyncio.create_task(grammars.ready(spec(f"slow{n}"), ENDS)) for n in range(compiled.THREADS)]
    await asyncio.sleep(0.05)
    others = [asyncio.create_task(grammars.ready(spec(f"quick{n}"), ENDS)) for n in range(3)]
    for task in slow:
        with pytest.raises(GrammarError, match=r"takes longer than engine.grammar_compile_s \(0.2\)"):
            await task
    assert all(isinstance(found, Anything) for found in await asyncio.gather(*others))
    began_s = time.perf_counter()
    with pytest.raises(GrammarError, match="takes longer"):  # it is known, though its thread goes on
        await grammars.ready(spec("slow0"), ENDS)
    assert time.perf_counter() - began_s < 0.15
    library.go.set()
    await asyncio.sleep(0.1)
    with pytest.raises(GrammarError, match="takes longer"):
        grammars.known(spec("slow0"), ENDS)
    assert grammars.meter.refused >= compiled.THREADS


async def test_time_in_the_queue_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_slowly(spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Anything:
        time.sleep(0.3)
        return Anything()

    library = SlowLibrary()
    monkeypatch.setattr(library, "compile", compile_slowly)
    grammars = Grammars(library, limit_s=0.8)
    three_rounds = [spec(str(number)) for number in range(3 * compiled.THREADS)]  # the last ends after 0.9 s
    found = await asyncio.gather(*(grammars.ready(one, ENDS) for one in three_rounds))
    assert all(isinstance(one, Anything) for one in found)


async def test_time_to_prepare_the_tokenizer_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SlowLibrary()
    prepared: list[tuple[int, ...]] = []

    def prepare(eos_token_ids: tuple[int, ...]) -> None:
        time.sleep(0.2)
        prepared.append(eos_token_ids)

    monkeypatch.setattr(library, "prepare", prepare)
    assert isinstance(await Grammars(library, limit_s=0.1).ready(spec("quick"), ENDS), Anything)
    assert prepared == [ENDS]


def test_libraries_prepare_what_they_compile_with() -> None:
    for name in LIBRARIES:
        library = grammar_library(name, tiny_tokenizer(), VOCAB_SIZE)
        library.prepare(ENDS)
        with pytest.raises(GrammarError, match="needs a model with an end token"):
            library.prepare(())


async def test_requests_that_share_a_grammar_compile_it_once() -> None:
    library = SlowLibrary()
    grammars = Grammars(library, limit_s=5)
    asyncio.get_running_loop().call_later(0.05, library.go.set)
    found = await asyncio.gather(*(grammars.ready(spec("slow"), ENDS) for _ in range(8)))
    assert len(set(map(id, found))) == 1
    assert library.compiled.count("slow") == 1
    sampling = SamplingParams(grammar=spec("slow"), eos_token_ids=ENDS)
    assert grammars.row(sampling) is not None
    assert grammars.meter.hits == 1


async def test_a_client_that_leaves_does_not_end_it_for_others() -> None:
    library = SlowLibrary()
    grammars = Grammars(library, limit_s=5)
    leaves, stays = (asyncio.create_task(grammars.ready(spec("slow"), ENDS)) for _ in range(2))
    await asyncio.sleep(0.02)
    leaves.cancel()
    library.go.set()
    assert isinstance(await stays, Anything)


@pytest.mark.parametrize("text", ["bad", "panic"])
async def test_a_library_s_own_error_is_a_refusal_that_is_kept(text: str) -> None:
    library = SlowLibrary()
    grammars = Grammars(library)
    for _ in range(3):
        with pytest.raises(GrammarError, match="regex: a message of the library"):
            await grammars.ready(spec(text), ENDS)
    assert library.compiled.count(text) == 1
    assert isinstance(await grammars.ready(spec("quick"), ENDS), Anything)


def test_what_is_too_large_is_refused_before_it_is_compiled() -> None:
    library = SlowLibrary()
    grammars = Grammars(library, most_characters=2048)
    with pytest.raises(GrammarError, match=r"2049 characters are more than engine.grammar_max_kib \(2\) allows"):
        grammars.compile(spec("x" * 2049), ENDS)
    assert library.compiled == [""]


def test_the_texts_of_kept_grammars_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_CHARACTERS", 100)
    grammars = Grammars(SlowLibrary())
    for sign in "abc":
        grammars.compile(spec(sign * 40), ENDS)
    assert grammars.known(spec("a" * 40), ENDS) is None
    assert grammars.known(spec("c" * 40), ENDS) is not None
    grammars.compile(spec("d" * 101), ENDS)
    assert grammars.known(spec("c" * 40), ENDS) is None
    assert grammars.known(spec("d" * 101), ENDS) is not None, "the last one is kept"


def test_what_is_counted() -> None:
    grammars = Grammars(SlowLibrary())
    grammars.compile(spec("a"), ENDS)
    grammars.compile(spec("a"), ENDS)
    with pytest.raises(GrammarError):
        grammars.compile(spec("bad"), ENDS)
    page = Page(instance="x")
    grammars.meter.show_metrics(page)
    text = page.text()
    assert 'alignedserve_grammar_compile_seconds_count{instance="x"} 2.0' in text
    assert 'alignedserve_grammar_cache_hits_total{instance="x"} 1.0' in text
    assert 'alignedserve_grammar_refused_total{instance="x"} 1.0' in text


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"alignedserve\[xgrammar\]"):
        grammar_library("xgrammar", tiny_tokenizer(), VOCAB_SIZE)
