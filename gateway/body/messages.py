"""The messages of a chat request: roles, and content as a string or as a list of text parts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # pydantic needs this class before Python 3.12

from alignedserve.gateway.body import refused
from alignedserve.gateway.body.values import LIST, STRICT, TEXT, Sent, Unsupported, text_or_list

MAX_MESSAGES = 4096


class TextPart(TypedDict):
    """A text part of a message's content."""

    __pydantic_config__ = STRICT  # type: ignore[misc]

    type: Annotated[
        Literal["text"], Unsupported("content parts of type {} are not supported: this server reads text only")
    ]
    text: str


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join([part["text"] for part in content])


_Content = Annotated[
    Annotated[str, TEXT] | Annotated[list[TextPart], Field(fail_fast=True), LIST],
    text_or_list("text or an array of parts"),
]


class Message(BaseModel):
    """One message of a conversation."""

    model_config = STRICT  # not a Body: its validator runs Python code for each of possibly thousands of messages

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, Sent(_Content, _joined)]
    name: str | None = None
    tool_call_id: str | None = None

    def check(self, where: str) -> None:
        """Raises UnsupportedFeatureError for a field that the chat template would not receive."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name in refused.MESSAGE:
                refused.MESSAGE[name].check(value, f"{where}.{name}")

    @property
    def turn(self) -> dict[str, str]:
        """The message in the form that the chat template expects."""
        turn: dict[str, str] = {"role": self.role, "content": self.content}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn
