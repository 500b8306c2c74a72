"""The contract of a dialect of tool calls, and of one of reasoning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.gateway.dialects.pieces import MakeId, Parser


class ToolDialect(ABC):
    """How models of a family write tool calls.

    `markers`: tokens that its parser must see, special or not. `begins`: texts that begin a call, and no text of an
    answer under a grammar. `ends_reasoning`: beginnings of a call that its models write within reasoning, without
    closing it.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]] = ()
    begins: ClassVar[tuple[str, ...]]
    ends_reasoning: ClassVar[tuple[str, ...]] = ()
    id_length: ClassVar[int] = 0  # of ids that we make; 0: any

    @abstractmethod
    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        """A parser of content with calls of `tools`, at most `most` of them."""

    def bound_parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        """A parser of content under a grammar that makes calls: it reads no call where the grammar makes none."""
        return self.parser(tools, make_id, most)

    @abstractmethod
    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        """Rules for calls of `tools`. Raises GrammarError for a schema that the format cannot express."""


@dataclass(frozen=True, slots=True)
class ReasoningDialect:
    """Reasoning between two markers. `begun`: an answer begins within it, unless its prompt has closed it.

    `markers`: tokens that its parser must see, special or not; by default the two.
    """

    name: str
    open: str
    close: str
    begun: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.tokens or (self.open, self.close)

    def begun_by(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within reasoning."""
        end = prompt.rstrip()[-200:]
        opened, closed = end.rfind(self.open.strip()), end.rfind(self.close.strip())
        if end.endswith(self.close.strip()):
            return False
        return self.begun or (opened > closed and end.endswith(self.open.strip()))
