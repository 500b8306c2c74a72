"""gpt-oss (harmony): messages with a channel and perhaps a recipient, `<|channel|>analysis<|message|>…<|end|>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.hermes import arguments_rule
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.pieces import MakeId, Parser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_ENDS = (END, CALL, RETURN)
_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)
_HEADS = (START, CHANNEL)  # markers that begin a header
_LONGEST_HEADER = 256
_MOST_HEADS = 3  # of a header, in which the channel may be repeated
_FIRST = ("", "<", "a", "t")  # characters that a header may begin with
_PREFIX = "functions."
_ROLE = "assistant"
_USER = (None, _ROLE)  # recipients of messages for the user
_TYPE = r"[\w.+/-]+"


def _to(group: str) -> str:
    return rf"(?:to=(?P<{group}>[\w.:/-]+)\s*)?"


_HEADER = re.compile(
    rf"\s*(?:{re.escape(START)}\s*)?(?:{_ROLE}\s*)?{_to('first')}"
    rf"(?:{re.escape(CHANNEL)}\s*(?P<channel>analysis|commentary|final)\b\s*{_to('second')}){{1,2}}"
    rf"(?:{re.escape(CONSTRAIN)}\s*(?:{_TYPE})?\s*|{_TYPE}\s*)?(?:{re.escape(MESSAGE)})?",
    re.ASCII,
)
_ANY_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_WORDS = ("", *_MARKERS, _ROLE, "analysis", "commentary", "final", "to=a")
_REST = f"{CHANNEL}final"


def _begins_header(text: str) -> bool:
    """Whether a header may begin with this text, which has a marker."""
    if len(text) > _LONGEST_HEADER or not _ANY_MARKER.search(text):
        return False
    ways = {text + word[at:] for word in _WORDS for at in range(len(word) + 1) if text.endswith(word[:at])}
    return any(_HEADER.fullmatch(way) or _HEADER.fullmatch(way + _REST) for way in ways)


class HarmonyParser(CallMachine):
    """Reads reasoning, too. Neither markers nor headers are text; a header off the pattern is, without its markers.

    A message to a recipient that is no tool, or with arguments that are no object, is text of its channel. The
    beginning of a header, where the answer ends, is dropped.
    """

    openers = ""

    def __init__(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> None:
        self._thinks = False
        super().__init__(tools, make_id, most)

    @property
    def reasoning(self) -> bool:
        return self._thinks

    @property
    def cut(self) -> str:
        return _ANY_MARKER.sub("", self._cut)

    def read(self) -> Reading[None]:
        may_begin = True  # a header, here
        while (yield from self.peek()):
            if may_begin and (yield from self.attempt(self.call())):
                may_begin = yield from self._text()
                continue
            if self._cut and _begins_header("".join(reversed(self._again))):
                self._again, self._cut = [], ""
                return
            marker = yield from self.one_of(_MARKERS)
            if marker in (*_ENDS, START):
                self._thinks = False
            if marker in _ENDS:
                yield from self.spaces()
            may_begin = marker in _ENDS or (yield from self._text())

    def _text(self) -> Reading[bool]:
        """Reads text up to the next marker. Returns whether a header may begin with it."""
        marker = yield from self.until(_MARKERS, self.thought if self._thinks else self.content)
        self.back(marker)
        return marker in _HEADS

    def call(self) -> Reading[bool]:
        """Reads a header, and the arguments of a call."""
        header = ""
        while not header.endswith(MESSAGE):
            character = yield from self.char()
            header += character
            if not character or len(header) > _LONGEST_HEADER or header.lstrip()[:1] not in _FIRST:
                return False
            if header.endswith(_ENDS) or (header.endswith(_HEADS) and sum(map(header.count, _HEADS)) > _MOST_HEADS):
                return False
        found = _HEADER.fullmatch(header)
        if found is None:
            return False
        self._thinks = False
        recipient = found["first"] if found["second"] in _USER else found["second"]
        if recipient is not None and self._knows(recipient):
            if (yield from self._arguments(recipient.removeprefix(_PREFIX))):
                return True
            if self._saw_end:  # so that the beginning of a call is known as such
                self._cut = "".join(reversed(self._again))
        self.commit()
        self._thinks = found["channel"] == "analysis"
        return True

    def _knows(self, recipient: str) -> bool:
        more = self._most is None or self.calls < self._most
        return more and recipient.startswith(_PREFIX) and recipient.removeprefix(_PREFIX) in self.tools

    def _arguments(self, name: str) -> Reading[bool]:
        """Reads a call's arguments. An empty message, which is no JSON, has none."""
        space = yield from self.spaces()
        if not (yield from self.call_of(name, ())):
            end = yield from self.one_of((*_ENDS, START))
            self.back(end)
            if not end and ((yield from self.peek()) or self.tools[name].parameters.get("required")):
                self.back(space)
                return False  # the token that ends a call ends the answer, too, and is not in its text
            self.begin(name)
            self.argue("{}")
        yield from self.spaces()
        return True


class Harmony(ToolDialect):
    name = "harmony"
    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    begins = ("",)  # all that may be a header

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return HarmonyParser(tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        forms = []
        for tool in tools:
            head = f"{CHANNEL}commentary to={_PREFIX}{tool.name} {CONSTRAIN}json{MESSAGE}"
            forms.append(f"{lark.literal(head)} {arguments_rule(lark, tool)}")
        return CallRules(lark.rule(" | ".join(forms)), alone=True)
