"""Tokens to text one at a time, stop strings, tokenizers of several families, chat templates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from alignedserve.errors import ConfigError, InvalidRequestError, ModelError
from alignedserve.model import resolve_model
from alignedserve.text import ChatTemplate, IncrementalDetokenizer, StopChecker, StopMatcher, StoppableText, Tokenizer

TINY = resolve_model("tiny")


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    tokenizer = Tokenizer.from_folder(TINY)
    assert tokenizer is not None
    return tokenizer


def save(backend: Backend, folder: Path, **config: Any) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def sentencepiece_like(folder: Path, *, strip: bool = True, **config: Any) -> Tokenizer:
    """Llama 2's family: a mark for spaces, single bytes as fallback, one leading space stripped."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁Hello",
        "▁world",
        "!",
        "▁",
        "a",
        "▁a",
    ]
    backend = Backend(
        models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    return save(backend, folder, **{"bos_token": "<s>", "eos_token": "</s>", **config})


def word_pieces(folder: Path) -> Tokenizer:
    """A family without rules for single tokens."""
    words = ["[UNK]", "hello", "##ing", "world", ",", "é", "[SEP]"]
    backend = Backend(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return save(backend, folder, sep_token="[SEP]")


def ids_of(tokenizer: Tokenizer, *words: str) -> list[int]:
    found = [tokenizer.backend.token_to_id(word) for word in words]
    return [token for token in found if token is not None]


def streamed(tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, context or [])
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


# ---- detokenising


def test_pieces_of_any_tokens_join_to_the_text_of_all(tiny: Tokenizer) -> None:
    source = random.Random(7)
    for _ in range(300):
        ids = [source.randrange(tiny.vocab_size) for _ in range(40)]
        assert "".join(streamed(tiny, ids)) == tiny.decode(ids)


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = Tokenizer.from_folder(TINY)
    assert tokenizer is not None
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text or any(
        special in text
        for special in ("<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    )


def test_an_incomplete_character_is_held_back_until_it_is_whole(tiny: Tokenizer) -> None:
    ids = tiny.encode("a😀b")
    pieces = streamed(tiny, ids)
    assert "".join(pieces) == "a😀b"
    assert all("�" not in piece for piece in pieces)
    assert "😀" in pieces
    assert pieces.count("") >= 3, "the first bytes of the emoji give no text"


def test_an_answer_that_ends_inside_a_character_ends_with_a_replacement(tiny: Tokenizer) -> None:
    ids = tiny.encode("😀")
    assert "".join(streamed(tiny, ids[:-1])) == "�"


def test_special_tokens_have_no_text(tiny: Tokenizer) -> None:
    hello = tiny.encode("Return")
    (end,) = ids_of(tiny, "<|end|>")
    assert "".join(streamed(tiny, [end, *hello, end])) == "Return"
    assert tiny.decode([end, *hello, end]) == "Return"


def whole(tokenizer: Tokenizer, ids: list[int], *, spaces: bool = True) -> str:
    """The text with special tokens, token by token."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=False, spaces=spaces)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


def test_special_tokens_that_are_shown_are_where_the_whole_text_has_them(tiny: Tokenizer, tmp_path: Path) -> None:
    source = random.Random(8)
    for tokenizer, first in ((tiny, 0), (sentencepiece_like(tmp_path), 259)):  # its bytes: other replacements
        specials = sorted(tokenizer.special_ids)[:2]
        for _ in range(100):
            ids = [source.choice([source.randrange(first, tokenizer.vocab_size), *specials]) for _ in range(20)]
            assert whole(tokenizer, ids) == tokenizer.decode(ids, skip_special=False)
            assert whole(tokenizer, ids, spaces=False) == whole(tokenizer, ids)


def test_spaces_between_special_tokens_may_be_left_out(tmp_path: Path) -> None:
    tokenizer = word_pieces(tmp_path)
    ids = ids_of(tokenizer, "hello", "##ing", "[SEP]", "[SEP]", "world", "[SEP]")
    assert whole(tokenizer, ids) == "helloing [SEP] [SEP] world [SEP]"
    assert whole(tokenizer, ids, spaces=False) == "helloing [SEP][SEP] world [SEP]"


def test_a_stop_string_is_found_in_the_special_tokens_that_are_shown(tiny: Tokenizer) -> None:
    (end,) = ids_of(tiny, "<|end|>")
    ids = [*tiny.encode("a"), end, *tiny.encode("b")]
    shown = StopChecker(tiny, ["end|"], skip_special=False)
    hidden = StopChecker(tiny, ["end|"])
    assert [shown.push(token) for token in ids] == [False, True, True]
    assert not any(hidden.push(token) for token in ids)


def test_a_leading_space_depends_on_what_is_before(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    hello, world = ids_of(tokenizer, "▁Hello", "▁world")
    assert streamed(tokenizer, [hello, world]) == ["Hello", " world", ""]
    assert streamed(tokenizer, [world], context=[hello]) == [" world", ""]
    (bos,) = ids_of(tokenizer, "<s>")
    assert streamed(tokenizer, [hello], context=[bos]) == ["Hello", ""], "a special token is no text"


def test_bytes_of_a_fallback_become_characters(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    smile = ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in "😀".encode()))
    (a,) = ids_of(tokenizer, "a")
    assert streamed(tokenizer, [a, *smile, a]) == ["a", "", "", "", "😀", "a", ""]
    assert "".join(streamed(tokenizer, [a, *smile[:2], a])) == "a�a"
    assert "".join(streamed(tokenizer, [a, *smile, a])) == tokenizer.decode([a, *smile, a])


def test_the_librarys_stream_is_not_exact(tiny: Tokenizer, tmp_path: Path) -> None:
    """Once it is exact, it can replace ours."""
    stream, begun = decoders.DecodeStream(), tiny.encode("a😀")[:-1]
    assert [stream.step(tiny.backend, token) for token in begun] == ["a", None, None, None]
    assert "".join(streamed(tiny, begun)) == tiny.decode(begun) == "a�"

    tokenizer = sentencepiece_like(tmp_path)
    stream, ids = decoders.DecodeStream(), ids_of(tokenizer, "a", "<0xC3>", "<0xA9>", "<0xA9>", "a")
    assert [stream.step(tokenizer.backend, token) for token in ids[:-1]] == ["a", None, "é", None]
    with pytest.raises(Exception, match="Invalid prefix"):
        stream.step(tokenizer.backend, ids[-1])
    assert streamed(tokenizer, ids) == ["a", "", "é", "�", "a", ""]


def test_a_decoder_that_looks_at_neighbours_gives_the_same_text(tmp_path: Path) -> None:
    tokenizer = word_pieces(tmp_path)
    assert tokenizer.piece_rules is None
    ids = ids_of(tokenizer, "hello", "##ing", "world", ",", "[SEP]", "é", "hello")
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[1] == "ing"
    assert streamed(tokenizer, ids_of(tokenizer, "world"), context=ids[:1])[0] == " world"


def test_tokens_are_shown_one_by_one(tiny: Tokenizer) -> None:
    assert [tiny.token_text(token) for token in tiny.encode("Return the")] == ["Return", " the"]
    assert tiny.token_text(tiny.encode("😀")[0]).startswith("bytes:\\xf0")
    assert tiny.piece(10**9) == b""


# ---- stop strings


def reference_cut(text: str, stops: list[str]) -> str:
    """The text before the stop string that completes first; of several, before the longest."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), max_size=30),
)
@settings(max_examples=500, deadline=None)
def test_a_stop_string_cuts_at_the_same_place_whatever_the_pieces(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher, shown, rest = StopMatcher(stops), "", text
    for size in [*sizes, len(text)]:
        shown += matcher.push(rest[:size])
        rest = rest[size:]
        assert reference_cut(text, stops).startswith(shown), "text was shown that a stop string claims"
    shown += matcher.finish()
    assert shown == reference_cut(text, stops)
    assert (matcher.matched is not None) == any(stop in text for stop in stops)


@given(st.text(alphabet="ab", max_size=20), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1))
@settings(max_examples=100, deadline=None)
def test_a_text_may_end_with_its_stop_string(text: str, stops: list[str]) -> None:
    without, including = StopMatcher(stops), StopMatcher(stops, include=True)
    shown = without.push(text) + without.finish()
    longer = including.push(text) + including.finish()
    assert including.matched == without.matched
    assert longer == shown + (without.matched or "")


def test_a_possible_beginning_is_held_back_and_released() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("one ST") == "one "
    assert matcher.push("AY two") == "STAY two"
    assert matcher.push(" S") == " "
    assert matcher.finish() == "S"


def test_a_stop_string_across_tokens_is_found_at_its_last_token(tiny: Tokenizer) -> None:
    ids = tiny.encode("alpha END omega")
    checker = StopChecker(tiny, ["END"])
    found = [checker.push(token) for token in ids]
    at = found.index(True)
    assert "END" in tiny.decode(ids[: at + 1])
    assert "END" not in tiny.decode(ids[:at])
    assert all(found[at:])


def test_a_resumed_check_counts_what_was_generated_before(tiny: Tokenizer) -> None:
    ids = tiny.encode("alpha END omega")
    whole = StopChecker(tiny, ["END"])
    at = [whole.push(token) for token in ids].index(True)
    for cut in range(at + 1):
        resumed = StopChecker(tiny, ["END"], ids[:cut])
        assert [resumed.push(token) for token in ids[cut:]].index(True) == at - cut


def test_the_first_tokens_complete_no_stop_string(tiny: Tokenizer) -> None:
    ids = tiny.encode("a") * 5
    checker = StopChecker(tiny, ["a"], min_tokens=3)
    assert [checker.push(token) for token in ids] == [False, False, False, True, True]
    text = StoppableText(tiny, ["a"], min_tokens=3)
    assert "".join(map(text.push, ids)) + text.finish() == "aaa"


# ---- tokenizers of a folder


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.from_folder(tmp_path) is None


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match="tokenizer_config"):
        Tokenizer.from_folder(tmp_path)


def test_the_configuration_says_whether_a_bos_is_added(tmp_path: Path) -> None:
    (bos,) = ids_of(sentencepiece_like(tmp_path), "<s>")
    assert sentencepiece_like(tmp_path).encode("a")[0] != bos
    with_bos = sentencepiece_like(tmp_path, add_bos_token=True, add_eos_token=True)
    ids = with_bos.encode("a")
    assert (ids[0], ids[-1]) == (bos, bos + 1)
    assert with_bos.encode("a", special_tokens=False) == ids[1:-1]
    assert sentencepiece_like(tmp_path, add_bos_token=False).encode("a")[0] != bos


def test_a_token_that_only_the_configuration_calls_special_has_no_text(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path, eos_token={"content": "!", "lstrip": False}, pad_token=None)
    assert tokenizer.special_tokens["eos_token"] == "!"
    assert "".join(streamed(tokenizer, ids_of(tokenizer, "▁Hello", "!"))) == "Hello"


def test_older_formats_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = json.loads((TINY / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("Return the list.")) == "Return the list."
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: pytest.fail("converted twice"))
    assert Tokenizer.from_folder(folder) is not None


def test_what_cannot_be_converted_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("alignedserve.text.conversion._SCRIPT", "import sys; sys.exit('there is no fast one')")
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"tokenizer\.model cannot be converted to one: there is no fast one"):
        Tokenizer.from_folder(tmp_path)


# ---- chat templates

USER = [{"role": "user", "content": "<b>hi</b>"}]


def render(source: str, messages: list[dict[str, str]] = USER, **specials: str) -> str:
    return ChatTemplate(source, specials).render(messages)


def test_the_shipped_template_ends_where_the_assistant_begins(tiny: Tokenizer) -> None:
    template = ChatTemplate.from_folder(TINY, tiny.special_tokens)
    assert template is not None
    text = template.render([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert text == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"


def test_a_template_finds_what_hugging_face_gives_it() -> None:
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<b>hi</b>"}]'
    assert render("{{ bos_token }}{{ add_generation_prompt }}", bos_token="<s>") == "<s>True"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}") == "user"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("a\n{% if true %}\nb\n{% endif %}\nc") == "a\nb\nc"


def test_the_developer_is_the_system_where_a_template_knows_no_developer() -> None:
    developer = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", developer) == "system"
    assert render("{% if messages[0].role == 'developer' %}{{ messages[0].role }}{% endif %}", developer) == "developer"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.more }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_refuses_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template") as raised:
        render(source)
    assert raised.value.param == "messages"


def test_a_template_that_does_not_compile_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="not a valid chat template"):
        ChatTemplate("{% for %}", {})


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path, {}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})
    )
    for expected in ("D", "J", "O"):
        override = ""
        if expected == "J":
            (tmp_path / "chat_template.jinja").write_text("J")
        if expected == "O":
            override = str(tmp_path / "own.jinja")
            Path(override).write_text("O")
        template = ChatTemplate.from_folder(tmp_path, {}, override)
        assert template is not None
        assert template.render(USER) == expected
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        ChatTemplate.from_folder(tmp_path, {}, str(tmp_path / "missing.jinja"))


def test_a_character_that_the_prompt_left_incomplete_is_the_answers_only_if_it_goes_on(tiny: Tokenizer) -> None:
    tokenizer = tiny
    of_byte = {tiny.piece(token): token for token in range(tiny.backend.get_vocab_size())}
    first, second, third, letter = (of_byte[bytes([byte])] for byte in "€a".encode())
    whole = IncrementalDetokenizer(tokenizer, [first, second])
    assert [whole.push(third), whole.push(letter), whole.finish()] == ["€", "a", ""]
    broken = IncrementalDetokenizer(tokenizer, [first, second])
    assert [broken.push(letter), broken.push(first), broken.finish()] == ["a", "", "\ufffd"]
    assert IncrementalDetokenizer(tokenizer, [first, second]).finish() == ""
