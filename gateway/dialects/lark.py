"""Writes grammars in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from alignedserve.errors import GrammarError
from alignedserve.grammar.llguidance_schema import json_text

ANY_TEXT = r"/(?s:.*)/"
MOST_CHARACTERS = 1 << 24  # of the grammar: references may repeat a schema, and an option, again and again
MOST_CALLS = 128  # of an answer under a grammar, so that a wild model ends


@dataclass(frozen=True, slots=True)
class CallRules:
    """Expressions for `before`, one or more of `call` with `between`, then `after`. Empty ones write nothing.

    `trigger`: the text before all of it, which nothing else begins with; "": calls come in place of text, and `openers`
    are the characters that they begin with, after spaces.
    """

    call: str
    before: str = ""
    between: str = ""
    after: str = ""
    trigger: str = ""
    openers: str = ""
    alone: bool = False  # an answer ends with its first call

    def expression(self, most: int | None) -> str:
        """One or more calls, after the trigger, at most `most` of them, and MOST_CALLS."""
        most = 1 if self.alone else min(most or MOST_CALLS, MOST_CALLS)
        others = "" if most == 1 else f"({self.between} {self.call}){{0,{most - 1}}}"
        return f"{self.before} {self.call} {others} {self.after}".strip()


class Lark:
    """Collects rules. `special`: ids of the markers that are special tokens of the model's tokenizer.

    All methods that write raise GrammarError once the grammar is larger than MOST_CHARACTERS.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = dict(special)
        self._rules: list[str] = []
        self._room = MOST_CHARACTERS
        marks = sorted(self._special, key=len, reverse=True)
        self._marks = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None

    def rule(self, body: str, attributes: str = "") -> str:
        """The name of a new rule."""
        self._take_room(len(body))
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """The name of a new terminal."""
        self._take_room(len(body))
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """An expression for exactly this text."""
        self._take_room(len(text))
        parts = self._marks.split(text) if self._marks is not None else [text]
        return " ".join(self._special_or_text(part) for part in parts if part)

    def is_special(self, text: str) -> bool:
        return text in self._special

    def json(self, schema: Mapping[str, Any], of: str) -> str:
        """The name of a rule for JSON that satisfies the schema.

        Raises GrammarError for what cannot be followed, with what the schema is `of`.
        """
        try:
            return self.rule("%json " + json_text(deepcopy(schema)))  # a response repeats it as it was sent
        except GrammarError as error:
            raise GrammarError(f"{of}: {error.message}") from None

    def text_until(self, end: str) -> str:
        """An expression for any text up to and including the first `end`."""
        if end in self._special:
            return f"({self.rule(ANY_TEXT)} {self.literal(end)})"
        return self.rule(ANY_TEXT, f"[suffix={_quoted(end)}]")

    def text(self, start: str) -> str:
        """The grammar, whose first rule is `start`."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _take_room(self, characters: int) -> None:
        self._room -= characters
        if self._room < 0:
            raise GrammarError(f"the grammar of calls has over {MOST_CHARACTERS} characters: use smaller schemas")

    def _special_or_text(self, part: str) -> str:
        token = self._special.get(part)
        return _quoted(part) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
