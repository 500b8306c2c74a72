"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.conversation import ConversationFields
from alignedserve.gateway.body.messages import MAX_MESSAGES, Message
from alignedserve.gateway.body.refused import Refusal
from alignedserve.gateway.body.validation_errors import as_request_error
from alignedserve.gateway.body.values import Body, PromptToken

_Model = Annotated[str, Field(max_length=1024)]
_REFUSALS = (
    Refusal("chat_template", "the server sets the chat template: --chat-template FILE"),
    Refusal("mm_processor_kwargs", "this server reads text only"),
)
_REFUSED: Mapping[str, Refusal] = {entry.field: entry for entry in _REFUSALS}


class TokenizeRequest(ConversationFields):
    refused = _REFUSED

    model: _Model | None = Field(None, description="The served model's name; may be omitted.")
    prompt: str | None = Field(None, description="A text. Either prompt or messages.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = Field(
        None, description="A conversation, which the chat template renders."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the tokens around a text (BOS). By default for a prompt, not for messages."
    )
    add_generation_prompt: bool = Field(True, description="End messages with the beginning of an answer.")
    allow_special_tokens: bool = Field(
        False, description="Read special tokens' names in a prompt as these tokens, as in /v1/completions."
    )
    return_token_strs: bool = Field(False, description="Also return each token as the vocabulary spells it.")

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("exactly one of prompt and messages is required", param="prompt")
        if self.messages is None:
            for name in ConversationFields.model_fields:
                if getattr(self, name) not in (None, []):
                    raise InvalidRequestError(f"{name} belongs to messages, not to a prompt", param=name)
        else:
            said = self.add_generation_prompt if "add_generation_prompt" in self.model_fields_set else None
            self.check_end(self.messages, new_turn=said)
        return self


class DetokenizeRequest(Body):
    model: _Model | None = Field(None, description="The served model's name; may be omitted.")
    tokens: Annotated[list[PromptToken], Field(fail_fast=True)]


def parse_tokenize(body: Any) -> TokenizeRequest:
    """Raises InvalidRequestError, which names the invalid field."""
    try:
        return TokenizeRequest.model_validate(body)
    except ValidationError as error:
        raise as_request_error(error) from None


def parse_detokenize(body: Any) -> DetokenizeRequest:
    """Raises InvalidRequestError, which names the invalid field."""
    try:
        return DetokenizeRequest.model_validate(body)
    except ValidationError as error:
        raise as_request_error(error) from None
