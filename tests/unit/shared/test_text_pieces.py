"""Long texts in pieces: exactly the tokens of the whole text, for every family; length bounds before tokenizing."""

from __future__ import annotations

import random
from functools import cache
from itertools import chain, islice, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from alignedserve.errors import InvalidRequestError
from alignedserve.model import resolve_model
from alignedserve.testing.tokenizers import FAMILIES, FRAGMENTS, family
from alignedserve.text import Prompt, PromptEncoder, Tokenizer, dividing, division
from alignedserve.text.spellings import Spellings

SMALL = 320  # characters of a piece in these tests


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "PIECE", SMALL)


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == "tiny":
        shipped = Tokenizer.from_folder(resolve_model("tiny"))
        assert shipped is not None
        return shipped
    return Tokenizer(Backend.from_str(family(name)), {})


@cache
def encoder(name: str) -> PromptEncoder:
    least, division.LEAST_OVERLAP = division.LEAST_OVERLAP, 40
    made = PromptEncoder(tokenizer(name))
    division.LEAST_OVERLAP = least
    return made


def in_pieces(made: PromptEncoder, prompt: Prompt) -> list[list[int]]:
    return list(made.pieces(prompt))


@st.composite
def hard_texts(draw: st.DrawFn) -> str:
    """A few fragments repeated, so that runs are long and cuts are rare."""
    chosen = draw(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=12))
    size = draw(st.integers(10, 250))
    source = random.Random(draw(st.integers(0, 1 << 20)))
    return "".join(source.choice(chosen) * source.choice((1, 1, 1, 4)) for _ in range(size)) + draw(
        st.text(max_size=40)
    )


@pytest.mark.parametrize("name", ["tiny", *FAMILIES])
@given(text=hard_texts(), special=st.booleans())
@settings(max_examples=40, deadline=None)
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str, special: bool) -> None:
    made = encoder(name)
    prompt = made.special_in(text) if special else Prompt(text)
    whole = made.encode(prompt)
    assert list(chain(*in_pieces(made, prompt))) == whole
    assert list(chain(*made.pieces(prompt, around=False))) == made.encode(prompt, around=False)
    assert made.least_tokens(text) <= len(whole)


@pytest.mark.parametrize("name", [name for name in ("tiny", *FAMILIES) if name != "unigram"])
@given(text=hard_texts())
@settings(max_examples=20, deadline=None)
def test_the_tokens_are_those_that_the_tokenizer_gives(name: str, text: str) -> None:
    """With special tokens as before; without them as `tokenizers` splits their text. (Unigram produces some itself.)"""
    made, source = encoder(name), Backend.from_str(tokenizer(name).backend.to_str())
    assert made.encode(made.special_in(text)) == source.encode(text).ids
    source.encode_special_tokens = True
    assert made.encode(Prompt(text)) == source.encode(text).ids


INDIVISIBLE = ("unknown", "nfc-made", "nfd-normalized", "nfkc-normalized")


@pytest.mark.parametrize("name", ["tiny", *FAMILIES])
def test_ordinary_text_comes_in_many_pieces(name: str) -> None:
    made = encoder(name)
    text = "Return the list of values, or raise a KeyError. " * 100
    assert made.divisible == (name not in INDIVISIBLE)
    assert len(in_pieces(made, Prompt(text))) > 10 or not made.divisible


ONE_WORD = ("llama2", "mistral", "gemma")
BY_LETTERS = ("tiny", "gpt2", "neox", "starcoder", "llama3", "qwen", "qwen35", "nfc-normalized", "lower")
AFTER_PUNCTUATION = ("llama3", "qwen", "qwen35")  # their line ends belong to it
RUNS = ("a", "=", " ", "\n", "\t", "ab", "漢", "漢字仮名", "AbC", "12")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["tiny", *FAMILIES])
def test_one_long_word_is_divided_exactly_or_refused(name: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "MOST_UNBROKEN", 1000)
    made = encoder(name)
    for text in (run * 2000, f"It begins: {run * 2000} and ends."):
        if not divided(made, text):
            assert name not in ONE_WORD
            assert run == "12" or name not in BY_LETTERS or (run == "\n" and name in AFTER_PUNCTUATION)


def divided(made: PromptEncoder, text: str) -> bool:
    """Whether the text was divided, which must be exact; otherwise it must be refused as indivisible."""
    try:
        pieces = in_pieces(made, Prompt(text))
    except InvalidRequestError as error:
        if "has a part that cannot be divided and is longer than 1000 characters" not in error.message:
            raise
        return False
    assert list(chain(*pieces)) == made.encode(Prompt(text))
    return True


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nfkc-normalized", "＜tool_call＞"),
        ("nfc-made", "<\u212a\u037ex>"),
        ("nfc-made", "\u1fefa`"),
        ("nfd-normalized", "x_ý"),
        ("nfd-normalized", "a≯"),
    ],
)
def test_a_token_that_only_the_normalized_text_spells_is_not_cut(name: str, text: str) -> None:
    made = encoder(name)
    whole = made.encode(Prompt(text * 900), around=False)
    assert tokenizer(name).backend.encode(text, add_special_tokens=False).ids[0] == whole[0]
    assert list(chain(*made.pieces(Prompt(text * 900), around=False))) == whole


@pytest.mark.parametrize("between", ["", "a", " ", "\n\n", "<mask>", "\u0301"])
@pytest.mark.parametrize("name", ["tiny", *FAMILIES])
def test_a_special_token_ends_a_piece_for_every_tokenizer(name: str, between: str) -> None:
    made = encoder(name)
    special = "<|end|>" if name == "tiny" else "<|im_end|>"
    prompt = made.special_in(f"{special}{between}" * 400)
    pieces = in_pieces(made, prompt)
    assert list(chain(*pieces)) == made.encode(prompt)
    assert len(pieces) > 20


@pytest.mark.parametrize("name", ["tiny", "gpt2", "llama3", "qwen", "qwen35", "o200k"])
def test_where_a_run_ends_may_depend_on_what_is_before_it(name: str) -> None:
    """Punctuation takes the line ends after it, up to the first other character.
    Between line ends, all blanks are one word."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = tokenizer(name).backend.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["a\n \nb//=x\n\t\n/\ny/=/==b"] * 90, trainer)
    least, division.LEAST_OVERLAP = division.LEAST_OVERLAP, 40
    made = PromptEncoder(Tokenizer(backend, {}))
    division.LEAST_OVERLAP = least
    befores = ("!", "a", "!\n", "a\n", "!\n/", "\t", "\n \t")
    for run, before, after in product("\n\t/= ax", befores, (" \n x", "/\n x", "=x", "\nx", "", "x", "'s", "\ta\n")):
        prompt = Prompt(f"{before}{run * 801}{after}")
        assert list(chain(*in_pieces(made, prompt))) == made.encode(prompt), (run, before, after)


def test_what_swallows_white_space_is_divided_where_there_is_none() -> None:
    made = encoder("lstrip")
    for text in ("x" + " " * 4000 + "<mask> hello" * 300, "x" * 4000 + " hello <mask>" * 300):
        assert list(chain(*in_pieces(made, Prompt(text)))) == made.encode(Prompt(text))


def test_a_part_that_cannot_be_divided_is_announced_and_is_refused_by_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dividing, "LONG", 1000)
    monkeypatch.setattr(dividing, "MOST_UNBROKEN", 2000)
    made = encoder("qwen")
    prompt = Prompt("words " * 100 + "1" * 5000 + " words" * 100)
    pieces = list(made.pieces(prompt, around=False, unbroken=6000))
    assert list(chain(*pieces)) == made.encode(prompt, around=False)
    assert [len(after) > 1000 for before, after in pairwise(pieces) if not before] == [True]
    with pytest.raises(InvalidRequestError, match="longer than 2000 characters, the maximum that is tokenised at once"):
        list(made.pieces(prompt))


def test_a_piece_costs_no_more_than_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that stops after two pieces has tokenised only these."""
    made = PromptEncoder(tokenizer("qwen"))
    tokenised: list[int] = []
    encoding = made._encoding
    monkeypatch.setattr(made, "_encoding", lambda text: (tokenised.append(len(text)), encoding(text))[1])
    assert len(list(islice(made.pieces(Prompt("some words " * 10_000), around=False), 2))) == 2
    assert sum(tokenised) <= 2 * SMALL


PROVEN = ("tiny", "gpt2", "gpt2-prefix", "starcoder", "llama3", "o200k", "unknown", "llama2", "mistral", "gemma")


@pytest.mark.parametrize("name", ["tiny", *FAMILIES])
def test_a_bound_is_given_where_it_is_proven(name: str) -> None:
    proven = name in PROVEN  # no bound where a normalizer, or a model other than BPE, may drop something
    assert (encoder(name).least_tokens("a" * 100_000) > 1000) == proven


@given(text=st.text() | hard_texts())
@settings(max_examples=100, deadline=None)
def test_the_shipped_bound_holds(text: str) -> None:
    made = encoder("tiny")
    least = made.least_tokens(text)
    assert least <= len(made.encode(Prompt(text)))
    assert least <= len(made.encode(made.special_in(text)))
    assert least >= len(text.encode()) // 33


def changed(token: AddedToken) -> PromptEncoder:
    backend = Backend.from_str(family("llama3"))
    backend.add_tokens([token])
    return PromptEncoder(Tokenizer(backend, {}))


def test_no_bound_is_given_where_tokens_swallow_white_space() -> None:
    assert changed(AddedToken("<y>")).least_tokens("a" * 100_000) > 1000
    assert changed(AddedToken("<y>", rstrip=True)).least_tokens("a" * 100_000) == 0
    assert changed(AddedToken("<y>", lstrip=True, special=True)).least_tokens("a" * 100_000) == 0
    assert changed(AddedToken("y" * 5000, normalized=False)).least_tokens("a" * 100_000) == 20


def test_a_text_is_not_cut_where_tokens_depend_on_what_is_beside_them() -> None:
    assert changed(AddedToken("<y>", normalized=False)).divisible
    assert changed(AddedToken("<｜y｜>", normalized=True)).divisible, "nothing normalizes it"
    assert not changed(AddedToken("<y>", normalized=False, rstrip=True)).divisible
    assert not changed(AddedToken("<y>", normalized=False, single_word=True)).divisible


def test_no_cut_goes_through_an_added_token() -> None:
    token = "of the kind that. goes on 1 2 3"
    made = changed(AddedToken(token, normalized=False))
    text = f"{token} x. {token}" * 100
    assert list(chain(*in_pieces(made, Prompt(text)))) == made.encode(Prompt(text))


@given(st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=6), st.text("ab<|", max_size=40))
@settings(max_examples=300, deadline=None)
def test_spellings_are_found_leftmost_and_longest(texts: list[str], text: str) -> None:
    expected, at = [], 0
    while at < len(text):
        longest = max((len(one) for one in texts if text.startswith(one, at)), default=0)
        expected += [(at, at + longest)] if longest else []
        at += longest or 1
    found = Spellings(texts)
    assert list(found.find(text)) == expected
    for at in range(len(text) + 1):
        over = any(
            text.startswith(one, begin) and begin < at < begin + len(one) for one in texts for begin in range(at)
        )
        assert found.spans(text, at) or not over


def test_spellings_are_found_across_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.text.spellings._WINDOW", 7)
    text = "ab<x>" * 20
    assert list(Spellings(["<x>", "<x>ab"]).find(text)) == [
        (n * 5 + 2, n * 5 + (7 if n < 19 else 5)) for n in range(20)
    ]


def test_a_vocabulary_with_holes_keeps_its_ids() -> None:
    """New tokens get ids from the vocabulary's size upwards, which may be in use."""
    words = {"<unk>": 0, "a": 1, "b": 2, "c": 9, " ": 10}
    backend = Backend(models.BPE(words, [], unk_token="<unk>"))
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    made = PromptEncoder(Tokenizer(backend, {}))
    assert made.encode(made.special_in("abc</s> c")) == [1, 2, 9, backend.token_to_id("</s>"), 10, 9]
    assert made.encode(Prompt("c</s>")) == [9, *[0] * 4]
