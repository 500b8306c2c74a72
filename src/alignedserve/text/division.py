"""Decides how a tokenizer's texts can be divided so that the tokens of the pieces are those of the whole text.

There are two methods (ADR 49). If words are tokenised one by one, a text can be cut between two words. The characters
at the cut must show that no word spans it, and that no word depends on text beyond it. If a whole text is one BPE word,
overlapping pieces can be joined after a token that both have at the same position. This is exact because a sequence of
tokens is the result of BPE if and only if each two neighbours are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from alignedserve.text.pieces import BYTE_CHARACTERS

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

LEAST_OVERLAP = 512
_WINDOW = 1 << 15  # characters
_AHEAD = 64  # characters; every lookahead of a cut is shorter

_State = Mapping[str, Any]

# Before a space, and after a letter, a digit or ASCII punctuation.
_SPACE = r"(?<=[\w!-/:-@\[-`{-~])(?= )"
# Letters in every version of Unicode. They do not compose with the characters that may follow a cut.
_LETTERS = "A-Za-zÀ-ÖØ-ö\u0400-\u0481\u048a-\u04ff\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
# Neither letters nor digits. Without the apostrophe, because a contraction ('s) belongs to the word before it.
_MARKS = '\\n\\t !"#$%&()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~、。，．！？；：（）「」'
_WORD_END = rf"(?<=[{_LETTERS}])(?=[0-9{_MARKS}])|(?<=[0-9])(?=[{_MARKS}])"
_SAME = r"([\n\t !\"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~])\1*"

# Alternatives of the known expressions that split words. No match of them spans a position that `_SPACE` or `_WORD_END`
# finds. None of them has a lookbehind, and only those for white space have a lookahead.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}{suffix}"
    for a, b in (("*", "+"), ("+", "*"))
    for suffix in ("", f"{_CONTRACTIONS}?")
)
_WORDS = (r"\p{L}+", r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+", *_CASED)
_WORDS += (r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",)
_NUMBERS = (r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,2}")
_OTHERS = tuple(rf" ?[^\s\p{{L}}\p{{N}}]{end}" for end in ("+", r"+[\r\n]*", r"++[\r\n]*", r"+[\r\n/]*"))
_OTHERS += (r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",)
_BLANKS = (r"\s+",)
_LINE_ENDS = frozenset((r"\s*[\r\n]+", r"\s*[\r\n]"))
# Blanks between two line ends may be one word with both.
_BLANKS_ONLY = re.compile(r"[^\S\r\n]*+(?![\r\n])")
_MORE = (r"\s+(?!\S)", *_LINE_ENDS, *_CONTRACTIONS[4:-1].split("|"), _CONTRACTIONS)
_MORE += ("'(?i:[sdmt]|ll|ve|re)",)

_MADE_BY_NFC = frozenset("K;`")  # the only ASCII characters that NFC produces from others
_UNIFORM = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Precompiled", "BertNormalizer"}
)
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}
_BREAKING = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})


@dataclass(frozen=True, slots=True)
class Division:
    """How the texts of a tokenizer can be divided without changing their tokens.

    `cut` finds the positions at which a text may be cut. With `joins`, pieces that overlap by `overlap` characters may
    be joined. `run` must then match the whole overlap, and `after` the text that follows it (None: no condition).
    `longest` is the most that one token covers, in bytes (`in_bytes`) or characters; None if there is no bound.
    """

    cut: re.Pattern[str] | None = None
    joins: bool = False
    run: re.Pattern[str] | None = None
    after: re.Pattern[str] | None = None
    overlap: int = 0
    longest: int | None = None
    in_bytes: bool = False

    @property
    def possible(self) -> bool:
        return self.cut is not None or self.joins

    def least_tokens(self, text: str) -> int:
        """A lower bound of the text's number of tokens; 0 if none is known."""
        if self.longest is None:
            return 0
        size = len(text) if not self.in_bytes or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return -(-size // self.longest)

    def last_cut(self, text: str, begin: int, end: int) -> int | None:
        """The last position after `begin`, and at most `end`, at which the text may be cut."""
        if self.cut is None:
            return None
        low = end
        while low > begin:
            high, low = low, max(begin, low - 4 * (end - low) - 256)
            if found := list(self._cuts(text, low + 1, high)):
                return found[-1]
        return None

    def cuts(self, text: str, begin: int, end: int) -> Iterator[int]:
        """The positions from `begin` to `end` at which the text may be cut. Other threads can run meanwhile."""
        for low in range(begin, end + 1, _WINDOW):
            yield from self._cuts(text, low, min(low + _WINDOW - 1, end))

    def _cuts(self, text: str, begin: int, end: int) -> Iterator[int]:
        if self.cut is not None:
            found = (match.start() for match in self.cut.finditer(text, begin, end + _AHEAD))
            yield from takewhile(lambda at: at <= end, found)


def division_of(
    backend: Backend, vocab: Mapping[str, int], added: Sequence[AddedToken], markers: Sequence[AddedToken]
) -> Division:
    """How texts can be divided for a tokenizer. `vocab`: the vocabulary of its model; `added`: tokens that are found in
    any text; `markers`: tokens that occur only where the caller inserts them.
    """
    normalizers = _steps(_state(backend.normalizer), "normalizers")
    splitters = _steps(_state(backend.pre_tokenizer), "pretokenizers")
    is_bpe = _is_plain_bpe(backend.model)
    longest, in_bytes = None, False
    if is_bpe and not any(token.lstrip or token.rstrip for token in (*added, *markers)):
        contents = [token.content for token in (*added, *markers)]
        longest, in_bytes = _longest(normalizers, splitters, vocab, contents, backend.model)
    overlap = max(LEAST_OVERLAP, 4 * max(map(len, [*vocab, *(token.content for token in added)]), default=0))
    division = Division(overlap=overlap, longest=longest, in_bytes=in_bytes)
    if not _keep_to_themselves(added, normalizers):
        return division
    joins = is_bpe and not any(token.lstrip for token in (*added, *markers))  # lstrip depends on preceding text
    if joins and _one_word(normalizers, splitters):
        return replace(division, joins=True)
    if not {step["type"] for step in normalizers} <= _UNIFORM:
        return division
    if _words_by_expression(splitters):
        if any(step.get("add_prefix_space") for step in splitters):  # a space at the cut prevents another one
            return replace(division, cut=re.compile(_SPACE))
        alternatives = {alternative for step in splitters for alternative in _alternatives(step)}
        run, after = _run(alternatives), _BLANKS_ONLY if alternatives & _LINE_ENDS else None
        return replace(division, cut=re.compile(f"{_WORD_END}|{_SPACE}"), joins=joins, run=run, after=after)
    if any(step["type"] in _BREAKING or _is_splitting_metaspace(step) for step in splitters[:1]):
        return replace(division, cut=re.compile(_SPACE))
    return division


def _state(part: Any) -> _State | None:
    return None if part is None else json.loads(part.__getstate__())


def _steps(state: _State | None, name: str) -> list[_State]:
    if state is None:
        return []
    return [step for entry in state[name] for step in _steps(entry, name)] if state["type"] == "Sequence" else [state]


def _is_plain_bpe(model: Any) -> bool:
    """Whether a model merges pairs by rank, without dropout, prefixes or suffixes."""
    return (
        type(model).__name__ == "BPE"
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
    )


def _keep_to_themselves(added: Sequence[AddedToken], normalizers: list[_State]) -> bool:
    """Whether added tokens are found by their text alone, so that a text shows whether one of them spans a cut."""

    def as_written(token: AddedToken) -> bool:
        """Whether normalization cannot produce the token from other text."""
        by_nfc = all(step["type"] == "NFC" for step in normalizers)
        blind = by_nfc and token.content.isascii() and _MADE_BY_NFC.isdisjoint(token.content)
        return not normalizers or not token.normalized or blind

    return all(as_written(token) and not token.single_word and not token.rstrip for token in added)


def _is_splitting_metaspace(step: _State) -> bool:
    return step["type"] == "Metaspace" and bool(step.get("split", True))


def _one_word(normalizers: list[_State], splitters: list[_State]) -> bool:
    """Whether all text between two added tokens is one word, and each character is normalized on its own."""
    replaced: set[str] = set()
    for step in normalizers:
        if step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1 and step["content"]:
            replaced.add(step["pattern"]["String"])
        elif step["type"] != "Prepend":
            return False
    for step in splitters:
        idle = step["type"] == "Split" and step["pattern"].get("String") in replaced  # the normalizer has removed them
        if not idle and (step["type"] != "Metaspace" or _is_splitting_metaspace(step)):
            return False
    return True


def _alternatives(step: _State) -> list[str]:
    """The top-level alternatives of a Split's expression."""
    expression = step["pattern"].get("Regex", "") if step["type"] == "Split" else ""
    parts, depth, at = [""], 0, 0
    while at < len(expression):
        size = 2 if expression[at] == "\\" else 1
        piece = expression[at : at + size]
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(piece, 0)
        if piece == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += piece
        at += size
    return parts


def _words_by_expression(splitters: list[_State]) -> bool:
    """Whether words are found by an expression of known alternatives, and other steps look at single characters."""

    def known(step: _State) -> bool:
        found = set(_alternatives(step))
        groups = (_WORDS, _NUMBERS, _OTHERS, _BLANKS)
        kept = (step["behavior"], step["invert"]) in (("Isolated", False), ("Removed", True))
        return kept and all(found & set(group) for group in groups) and found <= {*_MORE, *(sum(groups, ()))}

    kinds = [step["type"] for step in splitters]
    finders = [step for step in splitters if _is_gpt2(step) or (step["type"] == "Split" and known(step))]
    others = {step["type"] for step in splitters if step not in finders}
    in_text = "Split" not in kinds[kinds.index("ByteLevel") :] if "ByteLevel" in kinds else True
    return bool(finders) and in_text and others <= {"ByteLevel", "Digits", "Punctuation"}


def _run(alternatives: set[str]) -> re.Pattern[str]:
    """The runs within which a piece may begin: the end of their word does not depend on preceding text. Characters that
    may end a word of other characters (`[\\r\\n]*`) are excluded, because their word depends on it.
    """
    ends = {alternative.rpartition("+")[2].rstrip("*") for alternative in alternatives.intersection(_OTHERS)} - {""}
    same = f"(?!{'|'.join(sorted(ends))}){_SAME}" if ends else _SAME
    letters = "" if alternatives.intersection(_CASED) else f"|[{_LETTERS}]+"
    return re.compile(f"[a-z]+|[A-Z]+|{same}{letters}")


def _is_gpt2(step: _State) -> bool:
    """Whether a step is a ByteLevel with its own expression. All alternatives of that expression are known."""
    return step["type"] == "ByteLevel" and bool(step.get("use_regex", True))


def _longest(
    normalizers: list[_State], splitters: list[_State], vocab: Mapping[str, int], added: list[str], model: Any
) -> tuple[int | None, bool]:
    """The most bytes or characters that one BPE token covers, and whether it is bytes; None if text may be dropped."""
    most = max(map(len, vocab), default=1)
    if not normalizers and any(step["type"] == "ByteLevel" for step in splitters) and vocab.keys() >= BYTE_CHARACTERS:
        kept = all(step.get("behavior") in (None, "Isolated") for step in splitters)
        if kept and {step["type"] for step in splitters} <= {"ByteLevel", "Split", "Digits", "Punctuation"}:
            return max(most, *(len(text.encode()) for text in added), 1), True
    if _one_word(normalizers, splitters) and model.byte_fallback and vocab.keys() >= _BYTE_TOKENS:
        return max(most, *map(len, added), 1), False
    return None, False
