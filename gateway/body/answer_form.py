"""What the answers of a chat request must be, and how they are read: its tools, its reasoning, its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from alignedserve.errors import GrammarError
from alignedserve.gateway.body.requests import ChatRequest
from alignedserve.gateway.body.thinking import always_reasons
from alignedserve.gateway.body.tokenising import in_turn
from alignedserve.gateway.body.tools import ToolUse
from alignedserve.gateway.dialects.composing import AnswerForm, grammar_of
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.gateway.dialects.model_dialects import HARMONY, ModelDialects, Reading
from alignedserve.gateway.failures import UnsupportedFeatureError
from alignedserve.request import GrammarKind, GrammarSpec
from alignedserve.text import Tokenizer
from alignedserve.thinking import ThinkingLimit

if TYPE_CHECKING:
    from alignedserve.gateway.body.planning import ServedModel

_PROMPT_END = 4096  # characters of the prompt that a reading keeps
_LARGE_TOOLS = 1024  # bytes of schemas; the grammar of larger ones is written outside the event loop's thread
_SPACES = ("\n", "\n\n", " ")  # what models write before reasoning
_MOST_TRIED = 16  # tools, for the one that a grammar fails for
_OF_JSON = '{["-0123456789tfn'  # characters that JSON begins with
_LARGE_SCHEMA = 1 << 16  # characters


@dataclass(frozen=True, slots=True)
class ChatForm:
    """`grammar` is compiled. `reading`: None if the text is the answer's content as it is."""

    grammar: GrammarSpec | None = None
    reading: Reading | None = None
    thinking: ThinkingLimit | None = None


async def chat_form(model: ServedModel, request: ChatRequest, use: ToolUse, prompt: str) -> ChatForm:
    """`prompt`: the rendered conversation. Raises InvalidRequestError (or one of its kinds), which names the field."""
    dialects = model.dialects
    assert dialects is not None
    _check_tools(dialects, use)
    if request.continue_final_message:
        dialects = _within_content(dialects)
    begun = dialects.reasoning is not None and dialects.reasoning.begun_by(prompt)
    if begun and request.without_reasoning:
        field = "reasoning_effort" if request.enable_thinking is None else "enable_thinking"
        if not request.lenient:
            raise always_reasons(field)
        request.unread_settings.append(field)
    exact = use.limited or use.most == 1 or any(tool.strict for tool in use.tools)
    bound = use.forced or (dialects.tools is not None and exact)
    asked = request.grammar_spec()
    grammar = await _grammar(model, dialects, asked, use, bound=bound, begun=begun)
    reading = None
    separate = request.separate_reasoning is not False
    if use.any or (dialects.reads_reasoning and (separate or dialects.template is None)):
        include = request.include_reasoning is not False
        reading = Reading(
            dialects, prompt[-_PROMPT_END:], use.tools, use.most,
            None if grammar is None else _begins(dialects, None if asked is None else asked[0], use), use.forced,
            first=asked is not None, free=grammar is None, include_reasoning=include, separate_reasoning=separate,
        )  # fmt: skip
    calls = dialects.tools.ends_reasoning if dialects.tools is not None and use.any and grammar is None else ()
    return ChatForm(grammar, reading, _limit(dialects, request, model.tokenizer, calls, begun=begun))


def _within_content(dialects: ModelDialects) -> ModelDialects:
    """For an answer that has begun: its reasoning, if it had one, is over."""
    if HARMONY in (dialects.tools and dialects.tools.name, dialects.reasoning and dialects.reasoning.name):
        reason = "the answers of gpt-oss consist of messages that end with a marker"
        raise UnsupportedFeatureError(
            f"continue_final_message is not supported: {reason}", param="continue_final_message"
        )
    return replace(dialects, reasoning=None)


def _begins(dialects: ModelDialects, asked: GrammarSpec | None, use: ToolUse) -> tuple[str, ...] | None:
    """Texts that begin a call, and no answer that is `asked` for; None if no call is possible.

    A single character is the beginning of calls that come in place of text.
    """
    if not use.any or dialects.tools is None:
        return None
    own = dialects.tools.begins
    if asked is None or use.forced:
        return own
    if asked.kind is not GrammarKind.JSON:
        return tuple(text for text in own if len(text) != 1)
    firsts = "{" if _is_object(asked.text) else _OF_JSON
    return tuple(
        text[:1] if text[:1] not in firsts else text[:2] for text in own if len(text) != 1 or text not in firsts
    )


def _is_object(schema: str) -> bool:
    """Whether the JSON that satisfies the schema is an object, as far as a short look tells."""
    if len(schema) > _LARGE_SCHEMA:
        return False
    try:
        value = orjson.loads(schema)
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("type") == "object"


def _check_tools(dialects: ModelDialects, use: ToolUse) -> None:
    if not use.any:
        return
    if not dialects.reads_calls:
        reason = "this model's chat template writes no tools in a known format; --tool-parser names one"
        raise UnsupportedFeatureError(f"tools is not supported: {reason}", param="tools")
    if dialects.tools is None and (use.forced or any(tool.strict for tool in use.tools)):
        reason = "the tokenizer's response_template has no grammar; --tool-parser names a format that has one"
        field = "tool_choice" if use.forced else "tools"
        raise UnsupportedFeatureError(f"{field} is not supported: {reason}", param=field)


async def _grammar(
    model: ServedModel,
    dialects: ModelDialects,
    asked: tuple[GrammarSpec, str] | None,
    use: ToolUse,
    *,
    bound: bool,
    begun: bool,
) -> GrammarSpec | None:
    """The grammar of the whole answer, compiled; None if any text will do."""
    if not bound and (asked is None or (dialects.reasoning is None and not use.any)):
        return await model.compiled(asked)
    tools = use.tools if dialects.tools is not None else ()
    answer = None if asked is None else asked[0]
    form = AnswerForm(answer, tools, use.forced, use.most, begun)
    field = "tools" if tools or asked is None else asked[1]
    try:
        return await _compiled(model, dialects, form, field)
    except GrammarError as error:
        if asked is not None and not use.forced:
            await model.compiled(asked)  # raises if this is what cannot be followed
        loose = [tool if tool.strict else _loosened(tool) for tool in tools]
        if not tools:
            raise
        if all(tool.strict for tool in tools):
            raise await _of_a_tool(model, tools, error) from None
    try:
        return await _compiled(model, dialects, replace(form, tools=loose), field)
    except GrammarError as error:
        raise await _of_a_tool(model, loose, error) from None


async def _of_a_tool(model: ServedModel, tools: Sequence[Tool], error: GrammarError) -> GrammarError:
    """The error with the tool whose schema has it by itself, and the place there, if that can be found."""
    found = error
    if not any(error.message.startswith(f"tool {tool.name}") for tool in tools):
        for tool in tools[:_MOST_TRIED]:
            text = orjson.dumps({"type": "object", **tool.parameters}).decode()
            try:
                await model.compile(GrammarSpec(GrammarKind.JSON, text), f"tool {tool.name}")
            except GrammarError as own:
                found = own
                break
    found.param = "tools"
    return found


async def _compiled(model: ServedModel, dialects: ModelDialects, form: AnswerForm, field: str) -> GrammarSpec:
    write = partial(grammar_of, form, dialects)
    large = len(orjson.dumps([tool.parameters for tool in form.tools])) > _LARGE_TOOLS
    spec = await in_turn(write) if large else write()
    await model.compile(spec, field)
    return spec


def _loosened(tool: Tool) -> Tool:
    """The same function with the names and types of its parameters only: all that a tool without `strict` promises."""
    if "properties" not in tool.parameters:
        return replace(tool, parameters={})
    properties: dict[str, Any] = {}
    for name, inner in tool.parameters.get("properties", {}).items():
        kind = inner.get("type") if isinstance(inner, dict) else None
        properties[name] = {"type": kind} if isinstance(kind, str) else {}
    return replace(tool, parameters={"properties": properties, "required": tool.parameters.get("required", [])})


def _limit(
    dialects: ModelDialects, request: ChatRequest, tokenizer: Tokenizer | None, calls: Sequence[str], *, begun: bool
) -> ThinkingLimit | None:
    """`calls`: texts that begin a call, and end reasoning."""
    budget, thoughts = request.thinking_token_budget, dialects.reasoning
    if budget is None or request.continue_final_message:
        return None
    if thoughts is None or tokenizer is None:
        reason = "this model has no known format of reasoning; --reasoning-parser names one"
        raise UnsupportedFeatureError(
            f"thinking_token_budget is not supported: {reason}", param="thinking_token_budget"
        )
    opened, closed, *others = (
        tuple(tokenizer.encode(text, special_tokens=False))
        for text in (thoughts.open, thoughts.close, *_SPACES, *calls)
    )
    spaces, begins = others[: len(_SPACES)], tuple(others[len(_SPACES) :])
    before = tuple(space[0] for space in spaces if len(space) == 1 and space[0] not in (*opened, *closed))
    return ThinkingLimit(budget, opened, closed, begun, before, begins)
