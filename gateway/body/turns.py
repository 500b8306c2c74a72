"""Conversations of agents, in turns that a chat template takes.

Agents put system messages among the others, send several messages of the user in a row, and text after results of
tools. Templates that refuse one of these, or leave it out, get the same text in the order in which it was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile

from alignedserve.gateway.body.messages import Message
from alignedserve.text import ChatTemplate

_SYSTEM = ("system", "developer")
_BETWEEN = "\n\n"


def turns_for(template: ChatTemplate, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, or others with the same text if the template does not write all of these."""
    messages = _with_beginning(template, messages)
    first = messages[0].role
    before = (first,) if first in _SYSTEM else ()
    later = {message.role for message in messages[1:]} & set(_SYSTEM)
    if any(not template.writes(*before, "user", "assistant", role, "user") for role in later):
        messages = list(_as_user(messages))
    follows = {(_role(one), other.role) for one, other in pairwise(messages)}
    rows = ("user", "user") not in follows or template.writes("user", "user")
    called = ("user", "assistant", "tool")
    after = ("tool", "user") not in follows or template.writes(*called, "user") or not template.writes(*called)
    return messages if rows and after else _merged(messages, {"user": not rows, "tool": not after})


def _with_beginning(template: ChatTemplate, messages: Sequence[Message]) -> Sequence[Message]:
    """System messages at the beginning are one, or the user's text, where the template does not write them."""
    begin = list(takewhile(lambda message: message.role in _SYSTEM, messages))
    rest = messages[len(begin) :]
    if not begin or not rest:
        return messages
    if not template.writes(begin[0].role, "user") and rest[0].role == "user":
        return [_with_text(rest[0], *begin, rest[0]), *rest[1:]]
    if len(begin) > 1 and not template.writes(*(message.role for message in begin[:3]), "user"):
        return [_with_text(begin[0], *begin), *rest]
    return messages


def _as_user(messages: Iterable[Message]) -> Iterable[Message]:
    """System messages after the first become the user's. None comes between a call and its result."""
    held: list[Message] = []
    open_calls = 0
    for number, message in enumerate(messages):
        if number and message.role in _SYSTEM:
            text = f"<system>\n{message.content}\n</system>"
            held.append(message.model_copy(update={"role": "user", "content": text}))
        elif _role(message) == "tool":
            open_calls -= 1
            yield message
        else:
            yield from held
            held, open_calls = [], len(message.calls)
            yield message
        if open_calls <= 0:
            yield from held
            held = []
    yield from held


def _merged(messages: Iterable[Message], joins: dict[str, bool]) -> list[Message]:
    """`joins`: whether a message of the user that follows one of this role becomes a part of it."""
    found: list[Message] = []
    for message in messages:
        if found and message.role == "user" and joins.get(_role(found[-1])):
            found[-1] = _with_text(found[-1], found[-1], message)
        else:
            found.append(message)
    return found


def _role(message: Message) -> str:
    return "tool" if message.role == "function" else message.role


def _with_text(message: Message, *texts: Message) -> Message:
    return message.model_copy(update={"content": _BETWEEN.join(filter(None, (one.content for one in texts)))})
