"""The trace of the call that is handled now."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from alignedserve.gateway.body.messages import Message
    from alignedserve.gateway.ledger.calls import Call


@dataclass(slots=True)
class CallTrace:
    """A sampled call, from its arrival to its last byte. Its other spans are made when it ends."""

    span: Span  # of the whole call
    ids: tuple[str, str]  # of trace and span, for logs
    header: str  # `traceparent`
    operation: str  # chat, text_completion
    content: bool  # whether its spans show prompts and answers
    begun_ns: int  # Unix time
    call: Call | None = None  # None: its body is not accepted yet
    messages: Sequence[Message] = ()  # of a chat; only with `content`
    error: BaseException | None = None  # the first that it met


# None: the call is not sampled, or traces are off.
current_trace: ContextVar[CallTrace | None] = ContextVar("current_trace", default=None)


def note_chat(messages: Sequence[Message]) -> None:
    """The call is a chat."""
    if (trace := current_trace.get()) is not None:
        trace.operation = "chat"
        trace.messages = messages if trace.content else ()


def note_error(error: BaseException) -> None:
    """The client gets this error."""
    if (trace := current_trace.get()) is not None:
        trace.error = trace.error or error
