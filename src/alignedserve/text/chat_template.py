"""A model's chat template: sandboxed Jinja with the functions that Hugging Face templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from alignedserve.errors import ConfigError, InvalidRequestError, ModelError
from alignedserve.text.call_arguments import CallArguments, marked, texts_in
from alignedserve.text.turns import TurnsFor, completed
from alignedserve.text.user_text import Marks, join_texts, on_plain_text, on_texts, text_of_method, unmarked

_DEFAULT_NAME, _TOOLS_NAME = "default", "tool_use"
# Filters that read characters, and filters that join texts.
_READING = (
    *("escape", "e", "forceescape", "urlencode", "xmlattr", "striptags", "urlize", "pprint"),
    *("title", "wordcount", "wordwrap", "int", "float"),
)
_JOINING = ("join", "format", "center", "indent")
_OWN_WORDS = ("role",)  # fields of a message that are not the user's text
# A call of a function with one parameter, for conversations that a template is tried with.
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "a", "arguments": CallArguments(a="a")}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "a", "description": "a", "parameters": _SCHEMA}}


class ChatTemplate:
    """Turns a conversation into the prompt text that the model was trained on.

    `special_tokens` ("bos_token", …) are variables of the template. `with_tools`: the source of the model's other
    template, for conversations with tools; "": there is none. Raises ModelError if it does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str = "the chat template",
        *,
        with_tools: str = "",
    ) -> None:
        self._variables = dict(special_tokens)
        self._source = f"{source}\n{with_tools}" if with_tools else source
        self._turns = TurnsFor(source)
        self._template = _compile(source, origin)
        self._with_tools = ChatTemplate(with_tools, special_tokens, origin) if with_tools else None
        self._tried: dict[tuple[str, ...], bool] = {}
        self._reads = _variables_of(self._template, source)
        if self._with_tools is not None:
            self._reads |= self._with_tools._reads

    @classmethod
    def from_folder(
        cls, folder: str | Path, special_tokens: Mapping[str, str], override_file: str = ""
    ) -> ChatTemplate | None:
        """The template of `--chat-template FILE`, else the folder's own; None if it has none."""
        if override_file:
            try:
                return cls(Path(override_file).read_text(encoding="utf-8"), special_tokens, override_file)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat template {override_file} cannot be read: {error}") from error
        source, with_tools, origin = _own_sources(Path(folder))
        return None if source is None else cls(source, special_tokens, origin, with_tools=with_tools)

    @property
    def source(self) -> str:
        return self._source

    def mentions(self, variable: str) -> bool:
        """Whether the template reads a variable of this name."""
        return variable in self._reads

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        marks: Marks,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[str, Marks]:
        """The prompt as `render` returns it, with the user's text marked, and the marks that were used."""
        given = [value for message in messages for name, value in message.items() if name not in _OWN_WORDS]
        marks = marks.for_texts((self._source, *texts_in([given, variables])))
        turns = [
            {name: value if name in _OWN_WORDS else marked(value, marks) for name, value in message.items()}
            for message in messages
        ]
        values = {name: marked(value, marks) for name, value in (variables or {}).items()}
        return self.render(turns, add_generation_prompt, values), marks

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt up to the beginning of the assistant's turn.

        Each message has "role" and "content" (a string; None beside "tool_calls"). `variables`: "tools", and others
        that the template reads. Raises InvalidRequestError if the template refuses the messages, for example because
        roles must alternate.
        """
        values = {"tools": None, "documents": None, **(variables or {})}  # None, as transformers passes them
        if values["tools"] and self._with_tools is not None:
            return self._with_tools.render(messages, add_generation_prompt, variables)
        values["add_generation_prompt"] = add_generation_prompt
        turns = self._turns.adapted(messages)
        try:
            return self._written(turns, values)
        except InvalidRequestError:
            whole = completed(turns, values["tools"])
            if whole is None:
                raise
        return self._written(whole[0], {**values, "tools": whole[1]})

    def _written(self, turns: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return self._rendered(**{**values, "messages": turns})
        except TemplateError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            # Raised by the template's own expressions for these messages.
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InvalidRequestError(f"the model's chat template refuses these messages: {reason}", param="messages")

    def writes(self, *roles: str) -> bool:
        """Whether it writes all messages of a conversation with these roles. An assistant before a tool calls it."""
        if roles not in self._tried:
            turns: list[dict[str, Any]] = [
                {"role": role, "content": f"({number})"} for number, role in enumerate(roles)
            ]
            for turn, following in pairwise(turns):
                if following["role"] == "tool":
                    turn.update(content="", tool_calls=[_CALL])
                    following.update(name="a", tool_call_id=_CALL["id"])
            variables = {"tools": [_TOOL]} if "tool" in roles and self.mentions("tools") else None
            try:
                written = self.render(turns, variables=variables)
            except InvalidRequestError:
                self._tried[roles] = False
            else:
                self._tried[roles] = all(turn["content"] in written for turn in turns)
        return self._tried[roles]

    def written_around_turns(self) -> list[str]:
        """Simple conversations, rendered without the beginning of an answer. They contain the template's markers."""
        turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user", "tool")]
        written = []
        for begin, end in ((0, 4), (1, 4), (1, 5)):
            try:
                written.append(self.render(turns[begin:end], add_generation_prompt=False))
            except InvalidRequestError:  # the template does not support the system role or tools
                continue
        return [*written, *self._written_around_tools()]

    def _written_around_tools(self) -> list[str]:
        """A conversation with a tool, a call and its result; nothing if the template writes none."""
        if not self.mentions("tools"):
            return []
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "a", "name": "a", "tool_call_id": _CALL["id"]},
        ]
        try:
            return [self.render(turns, add_generation_prompt=False, variables={"tools": [_TOOL]})]
        except InvalidRequestError:
            return []

    def _rendered(self, **variables: Any) -> str:
        text: str = self._template.render(**variables, **self._variables)
        return text


def _own_sources(folder: Path) -> tuple[str | None, str, str]:
    """The template, the one for conversations with tools ("": the same), and where they are from."""
    jinja, other = folder / "chat_template.jinja", folder / "additional_chat_templates" / f"{_TOOLS_NAME}.jinja"
    if jinja.is_file():
        with_tools = other.read_text(encoding="utf-8") if other.is_file() else ""
        return jinja.read_text(encoding="utf-8"), with_tools, str(jinja)
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            try:
                value = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
            except (OSError, ValueError, AttributeError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
            with_tools = ""
            if isinstance(value, list):  # several, by name
                named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
                value = named.get(_DEFAULT_NAME) or next(iter(named.values()), None)
                with_tools = named.get(_TOOLS_NAME) or ""
            if isinstance(value, str):
                return value, with_tools if with_tools != value else "", str(file)
    return None, "", ""


def _variables_of(template: Any, source: str) -> frozenset[str]:
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(template.environment.parse(source)))


def _compile(source: str, origin: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.compiler import CodeGenerator, Frame
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Concat, Node
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        """Joins pieces of text so that the user's text stays recognisable."""

        concat = staticmethod(join_texts)
        intercepted_binops = frozenset("%")

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            return on_texts(self.binop_table[operator])(left, right)

        def call(self, context: Context, function: Any, /, *arguments: Any, **options: Any) -> Any:
            of_text = text_of_method(function) is not None
            return super().call(context, on_texts(function) if of_text else function, *arguments, **options)

    class Code(CodeGenerator):
        def visit_Concat(self, node: Concat, frame: Frame) -> None:
            """Makes the environment join `a ~ b`, too."""
            self.write("environment.concat(map(str, (")
            for operand in node.nodes:
                self.visit(operand, frame)
                self.write(", ")
            self.write(")))")

    class Generation(Extension):
        """`{% generation %}` marks the assistant's tokens for training; here its body is simply rendered."""

        tags = frozenset({"generation"})  # type: ignore[assignment]  # Jinja declares a set and reads it only

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(unmarked(message))

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.code_generator_class = Code
    environment.filters["tojson"] = on_plain_text(tojson)
    for name in _READING:
        environment.filters[name] = on_plain_text(environment.filters[name])
    for name in _JOINING:
        environment.filters[name] = on_texts(environment.filters[name])
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelError(f"{origin} is not a valid chat template: {error}") from error
