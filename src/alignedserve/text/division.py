"""Where a text may be cut so that the tokens of its pieces are the tokens of the whole; what is proven of a tokenizer.

Two arguments are used (ADR 49). Where words are tokenised one by one, a cut between two of them is exact, if the
characters beside it show that no word reaches over it, and no word on either side depends on what is beyond. Where a
whole text is one word of BPE, two pieces that overlap can be joined after a token that both have at the same place: a
sequence of tokens is BPE's if every two neighbours in it are.
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
_AHEAD = 64  # what a cut looks at is not longer

_State = Mapping[str, Any]

# Before a space, after a letter, digit or ASCII punctuation.
_SPACE = r"(?<=[\w!-/:-@\[-`{-~])(?= )"
# Letters that are letters in every version of Unicode, and compose with nothing that follows here.
_LETTERS = "A-Za-zÀ-ÖØ-ö\u0400-\u0481\u048a-\u04ff\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
# Neither letters nor digits. The apostrophe is missing: contractions ('s) belong to what is before them.
_MARKS = '\\n\\t !"#$%&()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~、。，．！？；：（）「」'
_WORD_END = rf"(?<=[{_LETTERS}])(?=[0-9{_MARKS}])|(?<=[0-9])(?=[{_MARKS}])"
_SAME = r"([\n\t !\"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~])\1*"

# Alternatives of the expressions that are known to split words. No match of any of them has in it what `_SPACE` or
# `_WORD_END` names, none looks behind itself, and only white space looks ahead.
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
_BLANKS_ONLY = re.compile(r"[^\S\r\n]*+(?![\r\n])")  # else they may belong to a word that a line end began before them
_MORE = (r"\s+(?!\S)", *_LINE_ENDS, *_CONTRACTIONS[4:-1].split("|"), _CONTRACTIONS)
_MORE += ("'(?i:[sdmt]|ll|ve|re)",)

_MADE_BY_NFC = frozenset("K;`")  # of other characters; no other ASCII is
_UNIFORM = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Precompiled", "BertNormalizer"}
)
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}
_BREAKING = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})


@dataclass(frozen=True, slots=True)
class Division:
    """What is proven. `cut` finds positions at which a text may be cut; `joins`: pieces that overlap by `overlap`
    characters may be joined where `run` (None: anything) matches all of the overlap, and `after` (None: anything) what
    is beyond it. `longest`, in bytes or characters: no token covers more of a text.
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
        """No fewer than so many tokens come of it."""
        if self.longest is None:
            return 0
        size = len(text) if not self.in_bytes or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return -(-size // self.longest)

    def last_cut(self, text: str, begin: int, end: int) -> int | None:
        """The last position after `begin`, up to `end`, at which it may be cut."""
        if self.cut is None:
            return None
        low = end
        while low > begin:
            high, low = low, max(begin, low - 4 * (end - low) - 256)
            if found := list(self._cuts(text, low + 1, high)):
                return found[-1]
        return None

    def cuts(self, text: str, begin: int, end: int) -> Iterator[int]:
        """Where it may be cut, from `begin` to `end`. Other threads may run meanwhile."""
        for low in range(begin, end + 1, _WINDOW):
            yield from self._cuts(text, low, min(low + _WINDOW - 1, end))

    def _cuts(self, text: str, begin: int, end: int) -> Iterator[int]:
        if self.cut is not None:
            found = (match.start() for match in self.cut.finditer(text, begin, end + _AHEAD))
            yield from takewhile(lambda at: at <= end, found)


def division_of(
    backend: Backend, vocab: Mapping[str, int], added: Sequence[AddedToken], markers: Sequence[AddedToken]
) -> Division:
    """What is proven of a tokenizer whose model has this vocabulary. `added`: tokens that are found in any text;
    `markers`: those that stand only where the caller says so.
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
    joins = is_bpe and not any(token.lstrip for token in (*added, *markers))  # they depend on what is before them
    if joins and _one_word(normalizers, splitters):
        return replace(division, joins=True)
    if not {step["type"] for step in normalizers} <= _UNIFORM:
        return division
    if _words_by_expression(splitters):
        if any(step.get("add_prefix_space") for step in splitters):  # no piece but the first may get one
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
    """Byte pairs merged by rank, and nothing else."""
    return (
        type(model).__name__ == "BPE"
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
    )


def _keep_to_themselves(added: Sequence[AddedToken], normalizers: list[_State]) -> bool:
    """Added tokens are found by their text alone, so that it can be seen where one of them reaches over a cut."""

    def as_written(token: AddedToken) -> bool:
        """Whether a normalized text spells it only where the text itself does."""
        by_nfc = all(step["type"] == "NFC" for step in normalizers)
        blind = by_nfc and token.content.isascii() and _MADE_BY_NFC.isdisjoint(token.content)
        return not normalizers or not token.normalized or blind

    return all(as_written(token) and not token.single_word and not token.rstrip for token in added)


def _is_splitting_metaspace(step: _State) -> bool:
    return step["type"] == "Metaspace" and bool(step.get("split", True))


def _one_word(normalizers: list[_State], splitters: list[_State]) -> bool:
    """The whole text between two added tokens goes to the model at once, each character by itself normalized."""
    replaced: set[str] = set()
    for step in normalizers:
        if step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1 and step["content"]:
            replaced.add(step["pattern"]["String"])
        elif step["type"] != "Prepend":
            return False
    for step in splitters:
        idle = step["type"] == "Split" and step["pattern"].get("String") in replaced  # there are none any more
        if not idle and (step["type"] != "Metaspace" or _is_splitting_metaspace(step)):
            return False
    return True


def _alternatives(step: _State) -> list[str]:
    """Of the expression of a Split, those at its top level."""
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
    """Words are found by an expression whose every alternative is known; the other steps look at single characters."""

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
    """Runs of which a piece may begin with any character: where their word ends does not depend on what was before.
    Of what may end a word of other characters (`[\\r\\n]*`) it does.
    """
    ends = {alternative.rpartition("+")[2].rstrip("*") for alternative in alternatives.intersection(_OTHERS)} - {""}
    same = f"(?!{'|'.join(sorted(ends))}){_SAME}" if ends else _SAME
    letters = "" if alternatives.intersection(_CASED) else f"|[{_LETTERS}]+"
    return re.compile(f"[a-z]+|[A-Z]+|{same}{letters}")


def _is_gpt2(step: _State) -> bool:
    """A ByteLevel that splits by an expression of its own: all its alternatives are among the known ones."""
    return step["type"] == "ByteLevel" and bool(step.get("use_regex", True))


def _longest(
    normalizers: list[_State], splitters: list[_State], vocab: Mapping[str, int], added: list[str], model: Any
) -> tuple[int | None, bool]:
    """The most of a text that one token of BPE covers, and whether in bytes; None where something may be left out."""
    most = max(map(len, vocab), default=1)
    if not normalizers and any(step["type"] == "ByteLevel" for step in splitters) and vocab.keys() >= BYTE_CHARACTERS:
        kept = all(step.get("behavior") in (None, "Isolated") for step in splitters)
        if kept and {step["type"] for step in splitters} <= {"ByteLevel", "Split", "Digits", "Punctuation"}:
            return max(most, *(len(text.encode()) for text in added), 1), True
    if _one_word(normalizers, splitters) and model.byte_fallback and vocab.keys() >= _BYTE_TOKENS:
        return max(most, *map(len, added), 1), False
    return None, False
