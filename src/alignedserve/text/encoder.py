"""Tokenises prompts, with special tokens only where the caller wants them, and long texts in pieces."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from alignedserve.errors import InvalidRequestError
from alignedserve.text.dividing import Divider
from alignedserve.text.division import division_of
from alignedserve.text.pieces import spelled_in_bytes
from alignedserve.text.spellings import Spellings
from alignedserve.text.user_text import Marks

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as Backend

    from alignedserve.text.chat_template import ChatTemplate
    from alignedserve.text.tokenizer import Tokenizer

_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_BRACKETS = {"<": ">", "[": "]", "{": "}", "(": ")", "«": "»", "◁": "▷", "⟨": "⟩"}
_NO_CHARACTER = "\U0010ffff"
_TRIES = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and the spans of its special tokens (begin, end). Other spellings of special tokens are text."""

    text: str
    specials: tuple[tuple[int, int], ...] = ()


class PromptEncoder:
    """Tokenises the prompts of one model.

    Its backend shares the tokenizer's model, but knows each special token only by an unguessable name, its alias. So
    text never spells a special token; the encoder inserts the alias instead.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        source = tokenizer.backend
        added = source.get_added_tokens_decoder()
        special = _special_texts(tokenizer, added, template)
        plain = [token for token in added.values() if token.content not in special]
        markers = [token for token in added.values() if token.content in special]
        self._specials = Spellings(special)
        self.marks = Marks(special)

        vocab = source.get_vocab(with_added_tokens=False)
        self._forbidden = _producible(source, vocab, special)
        model = source.model
        if self._forbidden and type(model).__name__ == "Unigram":
            model, self._forbidden = _renamed(model, self._forbidden), frozenset()
        self._backend = Backend(model)
        if source.normalizer is not None:
            self._backend.normalizer = source.normalizer
        if source.pre_tokenizer is not None:
            self._backend.pre_tokenizer = source.pre_tokenizer
        self._first_added_id = max(vocab.values(), default=-1) + 1
        holes = [AddedToken(_alias(), normalized=False) for _ in range(self._first_added_id - len(vocab))]
        self._aliases = {text: _alias() for text in special}
        self._gap = _alias()  # separates adjacent text, and is removed afterwards
        flags = {token.content: {"lstrip": token.lstrip, "rstrip": token.rstrip} for token in markers}
        known = [AddedToken(alias, normalized=False, **flags[text]) for text, alias in self._aliases.items()]
        self._backend.add_tokens([*holes, *plain, *known, AddedToken(self._gap, normalized=False)])
        names = {**{token.content: token.content for token in plain}, **self._aliases}
        self._ids = {_id_in(self._backend, alias): _id_in(source, text) for text, alias in names.items()}
        self._gap_id = _id_in(self._backend, self._gap)

        self._before, self._after = _around(source)
        division = division_of(source, vocab, plain, markers)
        if self._forbidden:  # such text is split again, so a join would not be exact
            division = replace(division, joins=False)
        self._division = division
        others = Spellings(token.content for token in plain)
        before = r"(?<=\S)" if any(token.lstrip for token in markers) else ""
        at_aliases = replace(division, cut=_cut_at(self._aliases.values(), before, division.cut))
        self._divider = Divider(at_aliases, others, self._encoding, self._tokens)

    # ---- what is special

    def special_in(self, text: str, most: int | None = None) -> Prompt:
        """A prompt in which spellings of special tokens are special tokens, at most `most` of them."""
        return Prompt(text, tuple(islice(self._specials.find(text), most)))

    def of_chat(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """A conversation in which only the template's special tokens are special. Raises InvalidRequestError."""
        marked, marks = template.render_marked(messages, self.marks, variables, add_generation_prompt)
        return Prompt(marks.unmark(marked), tuple(self._specials.find(marked)))

    def of_begun_answer(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A conversation that ends with the content of its last message. Raises InvalidRequestError.

        A tag behind the content shows where it ends, and whether the template drops white space there, as in
        `transformers`.
        """
        *before, last = messages
        tag = secrets.token_hex(16)
        turns = [*before, {**last, "content": f"{last['content']}{tag} "}]
        marked, marks = template.render_marked(turns, self.marks, variables, add_generation_prompt=False)
        text = marks.unmark(marked)
        end = text.rfind(tag)
        if end < 0:
            message = "the model's chat template does not write the last message, so it cannot be continued"
            raise InvalidRequestError(message, param="messages")
        if not text.startswith(f"{tag} ", end):
            end = len(text[:end].rstrip())
        return Prompt(text[:end], tuple(self._specials.find(marked[:end])))

    # ---- tokens

    def encode(self, prompt: Prompt, *, around: bool = True) -> list[int]:
        """Token ids; `around` adds the tokens of the tokenizer's post-processor (usually a BOS).

        Other threads can run meanwhile.
        """
        ids = self._translated(self._tokens(self._spelled(prompt)))
        return [*self._before, *ids, *self._after] if around else ids

    def least_tokens(self, text: str) -> int:
        """A lower bound of the text's number of tokens; 0 if none is known for this tokenizer."""
        return self._division.least_tokens(text)

    @property
    def divisible(self) -> bool:
        """Whether `pieces` can divide a long text."""
        return self._division.possible

    def pieces(self, prompt: Prompt, *, around: bool = True, unbroken: int = 0) -> Iterator[list[int]]:
        """The same tokens, one piece of the text at a time. Each piece takes about the same time, however long the text
        is. An empty list announces a piece that takes longer.

        Raises InvalidRequestError if a part that cannot be divided is longer than `dividing.MOST_UNBROKEN` and
        `unbroken`.
        """
        before, after = (self._before, self._after) if around else ((), ())
        if before:
            yield list(before)
        yield from map(self._translated, self._divider.pieces(self._spelled(prompt), unbroken))
        if after:
            yield list(after)

    def _spelled(self, prompt: Prompt) -> str:
        """The text with aliases in place of special tokens."""
        pieces, at = [], 0
        for begin, end in prompt.specials:
            pieces += [prompt.text[at:begin], self._aliases[prompt.text[begin:end]]]
            at = end
        return "".join([*pieces, prompt.text[at:]])

    def _encoding(self, text: str) -> Encoding:
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)  # `encode` keeps the GIL
        return encoding

    def _tokens(self, text: str) -> list[int]:
        """Ids of the backend. If the model turns text into a special token, that text is split."""
        encoding = self._encoding(text)
        ids: list[int] = encoding.ids
        if not self._forbidden or self._forbidden.isdisjoint(ids):
            return ids
        for _ in range(_TRIES):
            text = self._taken_apart(text, encoding)
            encoding = self._encoding(text)
            if self._forbidden.isdisjoint(encoding.ids):
                return [token for token in encoding.ids if token != self._gap_id]
        raise InvalidRequestError("the text cannot be tokenised without a special token")

    def _taken_apart(self, text: str, encoding: Encoding) -> str:
        pieces, at = [], 0
        for index, token in enumerate(encoding.ids):
            if token in self._forbidden:
                begin, end = encoding.token_to_chars(index) or (0, 0)
                if end - begin < 2:
                    message = f"{text[begin:end]!r} is a special token of this model, and cannot be used as text"
                    raise InvalidRequestError(message)
                pieces.append(text[at : (begin + end) // 2])
                at = (begin + end) // 2
        return self._gap.join([*pieces, text[at:]])

    def _translated(self, ids: list[int]) -> list[int]:
        """The ids of the tokenizer for ids of the backend."""
        if not ids or max(ids) < self._first_added_id:
            return ids
        return [self._ids.get(token, token) for token in ids]


def _special_texts(
    tokenizer: Tokenizer, added: Mapping[int, AddedToken], template: ChatTemplate | None
) -> frozenset[str]:
    """The tokenizer's special tokens, and the tokens that the template writes around the turns of a conversation.

    Other added tokens (`<think>`) are found in any text, because their tokenizer treats them as text. So is a single
    character that is special ("!" as a padding token), because users must be able to write it.
    """
    texts = {token.content for number, token in added.items() if number in tokenizer.special_ids}
    if template is not None:
        written = template.written_around_turns()
        for token in added.values():
            text = token.content
            if len(text) > 2 and _BRACKETS.get(text[0]) == text[-1] and any(text in part for part in written):
                texts.add(text)
    return frozenset(text for text in texts if len(text) > 1)


def _alias() -> str:
    """An unguessable name that contains no cut."""
    return f"\x02{secrets.token_hex(16).translate(_LETTERS)}\x03"


def _cut_at(aliases: Iterable[str], before: str, cut: re.Pattern[str] | None) -> re.Pattern[str] | None:
    """The cut pattern, extended by cuts before aliases, except after white space that an alias may absorb."""
    if (found := Spellings(aliases).pattern) is None:
        return cut
    at_alias = f"{before}(?={found.pattern})"
    return re.compile(at_alias if cut is None else f"{cut.pattern}|{at_alias}")


def _id_in(backend: Backend, text: str) -> int:
    token: int | None = backend.token_to_id(text)
    assert token is not None
    return token


def _producible(backend: Backend, vocab: Mapping[str, int], special: frozenset[str]) -> frozenset[int]:
    """The special tokens that the model itself may produce from a text. BPE produces only those that its merges lead
    to, whatever the surrounding text.
    """
    model = backend.model
    unknown = _unknown(model)
    found = set()
    for text in special:
        token = vocab.get(text)
        if token is None or token == unknown or text == unknown:
            continue
        spelled = [model.tokenize(form) for form in (text, spelled_in_bytes(text))] if _is_bpe(model) else None
        if spelled is None or any(len(made) == 1 and made[0].id == token for made in spelled):
            found.add(token)
    return frozenset(found)


def _renamed(unigram: Any, pieces: frozenset[int]) -> Any:
    """The same model with unguessable names for these pieces."""
    state = json.loads(unigram.__getstate__())
    vocab = [(_alias() if at in pieces else text, score) for at, (text, score) in enumerate(state["vocab"])]
    return type(unigram)(vocab, state["unk_id"], state.get("byte_fallback", False))


def _unknown(model: Any) -> str | int | None:
    """The token for text without a token of its own. No text spells it."""
    if hasattr(model, "unk_token"):
        name: str | None = model.unk_token
        return name
    try:
        return next((int(token.id) for token in model.tokenize(_NO_CHARACTER)), None)
    except Exception:  # tokenizers raises bare Exception: it has no such token
        return None


def _is_bpe(model: Any) -> bool:
    return type(model).__name__ == "BPE"


def _around(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the post-processor puts before and after a text."""
    for text in ("a", "0", "."):
        try:
            inner = backend.encode(text, add_special_tokens=False).ids
        except Exception:  # tokenizers raises bare Exception: the model has no token for it, and no unknown token
            continue
        whole = backend.encode(text).ids
        for begin in range(len(whole) - len(inner) + 1) if inner else ():
            if whole[begin : begin + len(inner)] == inner:
                return tuple(whole[:begin]), tuple(whole[begin + len(inner) :])
    return tuple(backend.encode("").ids), ()
