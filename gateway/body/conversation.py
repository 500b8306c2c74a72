"""The fields of a conversation beside its messages: tools, reasoning and variables of the chat template."""

from __future__ import annotations

from typing import Any

from alignedserve.gateway.body.thinking import ThinkingFields
from alignedserve.gateway.body.tools import ToolFields
from alignedserve.text import ChatTemplate


class ConversationFields(ToolFields, ThinkingFields):
    def variables(self, template: ChatTemplate) -> dict[str, Any]:
        """What the template gets beside the messages. Raises InvalidRequestError, or one of its kinds."""
        variables = self.template_variables(template)
        if written := self.tool_use().written:
            variables["tools"] = list(written)
        return variables
