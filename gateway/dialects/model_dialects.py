"""The dialects of one model, and how an answer of it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignedserve.errors import ConfigError
from alignedserve.gateway.dialects.base import ReasoningDialect, ToolDialect
from alignedserve.gateway.dialects.detection import reasoning_dialect_of, tool_dialect_of
from alignedserve.gateway.dialects.families import AUTO, NONE, OTHER_NAMES, REASONING, TEMPLATE, TOOLS
from alignedserve.gateway.dialects.harmony import HarmonyParser
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.gateway.dialects.pieces import Bound, Chain, MakeId, Parser
from alignedserve.gateway.dialects.response_template import TemplateParser, check_template, markers_of
from alignedserve.gateway.dialects.thinking import ThinkingParser
from alignedserve.text import Tokenizer

HARMONY = "harmony"
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, slots=True)
class ModelDialects:
    """`tools`, `reasoning`: None if the model has no such format.

    `template`: the tokenizer's `response_template`, which reads both. `markers`: special tokens that parsers must see,
    by id.
    """

    tools: ToolDialect | None = None
    reasoning: ReasoningDialect | None = None
    template: Mapping[str, Any] | None = None
    markers: Mapping[int, str] = field(default_factory=dict)

    @property
    def special(self) -> dict[str, int]:
        """The ids of markers that are special tokens."""
        return {text: token for token, text in self.markers.items()}

    @property
    def reads_calls(self) -> bool:
        return self.tools is not None or self.template is not None

    @property
    def reads_reasoning(self) -> bool:
        return self.reasoning is not None or self.template is not None


NO_DIALECTS = ModelDialects()


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of a call are read. `prompt`: the text before them, or its end.

    `begins`: texts that begin a call, and nothing else in the answers of a grammar; None: no grammar makes calls. Where
    one does, its dialect reads them, not the tokenizer's template. `forced`: it makes nothing else. `first`: text does
    not come before calls. `free`: without any grammar, so that calls may begin within reasoning.
    `include_reasoning`: the reply has reasoning. `separate_reasoning`: apart from the content.
    """

    dialects: ModelDialects
    prompt: str
    tools: Sequence[Tool] = ()
    most: int | None = None
    begins: tuple[str, ...] | None = None
    forced: bool = False
    first: bool = False
    free: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True

    def parser(self, seed: str) -> Parser:
        """A parser at an answer's beginning. `seed` names the answer: the ids of its calls are a hash of it."""
        own = self.dialects
        dialect = own.tools
        length = 0 if dialect is None else dialect.id_length

        def make_id(index: int) -> str:
            return _call_id(f"{seed}/{index}", length)

        if own.template is not None and self.begins is None:
            return TemplateParser(own.template, self.prompt, self.tools, make_id, self.most)
        parser = self._by_dialects(make_id)
        return parser if self.begins is None else Bound(parser, self.begins, forced=self.forced, first=self.first)

    def _by_dialects(self, make_id: MakeId) -> Parser:
        dialect, thoughts = self.dialects.tools, self.dialects.reasoning
        if HARMONY in (thoughts and thoughts.name, dialect and self.tools and dialect.name):
            return HarmonyParser(self.tools, make_id, self.most)
        calls = None
        if dialect is not None and self.tools:
            own_parser = dialect.parser if self.begins is None else dialect.bound_parser
            calls = own_parser(self.tools, make_id, self.most)
        if thoughts is None:
            assert calls is not None
            return calls
        first = ThinkingParser(
            thoughts.open,
            thoughts.close,
            begun=thoughts.begun_by(self.prompt),
            cut_by=dialect.ends_reasoning if dialect is not None and calls is not None and self.free else (),
            whole=not self.separate_reasoning,
        )
        return first if calls is None else Chain(first, calls)


def choose_dialects(
    tool_parser: str,
    reasoning_parser: str,
    *,
    chat_template: str,
    tokenizer: Tokenizer | None,
    architecture: str = "",
    response_template: Mapping[str, Any] | None = None,
) -> ModelDialects:
    """The dialects that the configuration names, or with "auto" those of the model.

    `architecture`: the `model_type`. Raises ConfigError for an unknown name, ModelError for a `response_template` that
    cannot be used.
    """
    if tokenizer is None:
        return NO_DIALECTS
    tools = _named(tool_parser, tool_dialect_of(chat_template, architecture), TOOLS, "model.tool_parser")
    reasoning = _named(
        reasoning_parser, reasoning_dialect_of(chat_template, architecture), REASONING, "model.reasoning_parser"
    )
    template = None
    if TEMPLATE in (tool_parser, reasoning_parser) or (response_template and tool_parser == reasoning_parser == AUTO):
        if not response_template:
            raise ConfigError(f"model.tool_parser: the model's tokenizer has no {TEMPLATE}")
        check_template(response_template)
        template = response_template
    texts = {*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ())}
    texts |= set(markers_of(template) if template else ())
    if HARMONY in (tools and tools.name, reasoning and reasoning.name):
        texts |= set(TOOLS[HARMONY].markers)
    ids = {text: tokenizer.backend.token_to_id(text) for text in sorted(texts)}
    markers = {token: text for text, token in ids.items() if token in tokenizer.special_ids}
    return ModelDialects(tools, reasoning, template, markers)


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError for an unknown name."""
    _named(tool_parser, "", TOOLS, "model.tool_parser")
    _named(reasoning_parser, "", REASONING, "model.reasoning_parser")


def _named(name: str, found: str, known: Mapping[str, Any], key: str) -> Any:
    if name in (AUTO, TEMPLATE):
        return known.get(found)
    if name == NONE:
        return None
    name = OTHER_NAMES.get(name, name)
    if name not in known:
        raise ConfigError(f"{key} must be {AUTO}, {NONE}, {TEMPLATE}, or one of {', '.join(known)}; got {name!r}")
    return known[name]


def _call_id(seed: str, length: int) -> str:
    digest = hashlib.blake2b(seed.encode()).digest()
    if not length:
        return f"call_{digest[:12].hex()}"
    return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest[:length])
