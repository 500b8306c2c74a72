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
_AGAIN = f"{END}{START}assistant"
_ENDS = (END, CALL, RETURN, START)
_LONGEST_HEADER = 256
_FIRST = ("", "<", "a", "t")  # characters that a header may begin with
_HEADER = re.compile(
    rf"(?:{re.escape(START)})?\s*(?:assistant)?\s*(?:to=(?P<first>[^\s<]+))?\s*{re.escape(CHANNEL)}\s*(?P<channel>analysis|commentary|final)"
    rf"\s*(?:to=(?P<second>[^\s<]+))?\s*(?:{re.escape(CONSTRAIN)})?\s*[a-z]*\s*"
)
_PREFIX = "functions."


class HarmonyParser(CallMachine):
    """Reads reasoning, too. A recipient that is no tool, and a header that is none, are text."""

    openers = ""

    def __init__(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> None:
        self._thinks = False
        super().__init__(tools, make_id, most)

    @property
    def reasoning(self) -> bool:
        return self._thinks

    def read(self) -> Reading[None]:
        while (yield from self.peek()):
            if not (yield from self.attempt(self.call())):
                self.content((yield from self.char()))
                self.back((yield from self.until((START, CHANNEL), self.content)))
                continue
            yield from self._after()

    def call(self) -> Reading[bool]:
        """Reads a header, and the message after it."""
        header = ""
        while not header.endswith(MESSAGE):
            character = yield from self.char()
            header += character
            if not character or len(header) > _LONGEST_HEADER or header.lstrip()[:1] not in _FIRST:
                return False
            if header.endswith((CHANNEL, START)) and header.count(CHANNEL) + header.count(START) > 2:
                return False
        found = _HEADER.fullmatch(header.removesuffix(MESSAGE))
        recipient = found and (found["first"] or found["second"])
        if found is None or (recipient and not self._knows(recipient)):
            return False
        if recipient:
            return (yield from self._arguments(recipient.removeprefix(_PREFIX)))
        self.commit()
        self._thinks = found["channel"] == "analysis"
        yield from self._body()
        return True

    def _knows(self, recipient: str) -> bool:
        more = self._most is None or self.calls < self._most
        return more and recipient.startswith(_PREFIX) and recipient.removeprefix(_PREFIX) in self.tools

    def _body(self) -> Reading[None]:
        end = yield from self.until(_ENDS, self.thought if self._thinks else self.content)
        self._thinks = False
        self.back(end)

    def _arguments(self, name: str) -> Reading[bool]:
        """Reads a call's arguments. An empty message, which is no JSON, has none."""
        if not (yield from self.call_of(name, ())):
            end = yield from self.one_of(_ENDS)
            self.back(end)
            if not end and ((yield from self.peek()) or self.tools[name].parameters.get("required")):
                return False  # the token that ends a call ends the answer, too, and is not in its text
            self.begin(name)
            self.argue("{}")
        yield from self.spaces()
        return True

    def _after(self) -> Reading[None]:
        """Passes the end of a message and the beginning of the next one's header."""
        if (yield from self.one_of((END, CALL, RETURN))):
            yield from self.spaces()
        yield from self.literal(START)


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
