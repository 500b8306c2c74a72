"""The fields of a conversation beside its messages: tools, reasoning and variables of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.messages import Message
from alignedserve.gateway.body.thinking import ThinkingFields
from alignedserve.gateway.body.tools import ToolFields
from alignedserve.text import ChatTemplate


class ConversationFields(ToolFields, ThinkingFields):
    continue_final_message: bool | None = Field(
        None, description="The answer goes on with the last message, the assistant's, instead of a new turn."
    )

    def check_end(self, messages: Sequence[Message], *, new_turn: bool | None) -> None:
        """Raises InvalidRequestError for an end that cannot be continued. `new_turn`: what the client says of it."""
        last = messages[-1]
        if self.continue_final_message:
            if new_turn:
                message = "continue_final_message and add_generation_prompt exclude each other"
                raise InvalidRequestError(message, param="continue_final_message")
            if last.role != "assistant" or last.content is None or last.calls:
                message = "continue_final_message requires the assistant's message, without calls, as the last one"
                raise InvalidRequestError(message, param="continue_final_message")

    def variables(self, template: ChatTemplate) -> dict[str, Any]:
        """What the template gets beside the messages. Raises InvalidRequestError, or one of its kinds."""
        variables = self.template_variables(template)
        if written := self.tool_use().written:
            variables["tools"] = list(written)
        return variables
