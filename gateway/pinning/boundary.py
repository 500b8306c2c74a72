"""Which tokens a prompt's beginning has in every prompt that begins with it.

A text's last tokens may join what follows, and a chat template may write a last message otherwise than one in the
middle. So the beginning is rendered with several continuations, and what all of them share is pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.planning import ServedModel, chat_tokens, plan_completion
from alignedserve.gateway.body.requests import parse_chat, parse_completion
from alignedserve.gateway.body.tokenising import TooManyTokens
from alignedserve.gateway.body.validation_errors import as_request_error
from alignedserve.gateway.body.values import Body
from alignedserve.gateway.failures import ContextLengthError

# Beginnings of words, numbers, lines and scripts: whatever a tokenizer joins, it does not join all of them alike.
CONTINUATIONS = ("word", " word", "  word", "\tword", "\nword", "\n\nword", "1", ".", ")", "\u4f60")
MOST_NAME = 256
MOST_JOINED = 16  # characters at the end of a long word


class Beginning(Body):
    """A prompt's beginning that is to be pinned: `text` of completions, or `messages` (and tools) of chats."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=MOST_NAME)] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise InvalidRequestError("exactly one of text and messages is required", param="text")
        if self.text is not None and (self.tools or self.chat_template_kwargs):
            raise InvalidRequestError("tools and chat_template_kwargs belong to messages", param="tools")
        return self


def parse_beginning(body: Any) -> Beginning:
    """Raises InvalidRequestError, which names the invalid field."""
    try:
        return Beginning.model_validate(body)
    except ValidationError as error:
        raise as_request_error(error) from None


async def tokens_of(model: ServedModel, beginning: Beginning) -> list[int]:
    """The tokens with which all prompts begin that begin so. Raises InvalidRequestError, or one of its kinds."""
    model.require(None)
    try:
        if beginning.text is not None:
            return await _of_text(model, beginning.text)
        return await _of_chat(model, beginning)
    except TooManyTokens:
        raise ContextLengthError(f"the prefix is longer than {model.limit[1]}", param="messages") from None


async def _of_text(model: ServedModel, text: str) -> list[int]:
    """Without its last word, unless a space follows it: it may be the beginning of another one.

    Of a long word (a script without spaces, say) only the end is left out, as far as tokens may join there.
    """
    whole = text.rstrip()
    last = whole.split()[-1] if whole == text and whole else ""
    words = whole[: len(whole) - min(len(last), MOST_JOINED)].rstrip()
    texts = [text, *(words + more for more in CONTINUATIONS if more[0].isspace())]
    if words == whole or len(last) > MOST_JOINED:
        texts += [text + more for more in CONTINUATIONS]
    return _shared([await _completion(model, one) for one in texts])


async def _completion(model: ServedModel, text: str) -> Sequence[int]:
    plan = await plan_completion(model, parse_completion({"prompt": text or " ", "max_tokens": 1}))
    return plan.prompts[0].token_ids


async def _of_chat(model: ServedModel, beginning: Beginning) -> list[int]:
    """Rendered with a user's next message; where an answer may follow, also as a whole prompt and with answers."""
    messages = beginning.messages or []
    follow: list[list[dict[str, Any]]] = [[{"role": "user", "content": text}] for text in CONTINUATIONS]
    if messages and messages[-1].get("role") in ("user", "tool"):
        follow.append([])
        user = {"role": "user", "content": "word"}
        follow += [[{"role": "assistant", "content": text}, user] for text in CONTINUATIONS]
    given = beginning.model_dump(include={"tools", "chat_template_kwargs"}, exclude_none=True)
    found, refusal = [], None
    for more in follow:
        request = parse_chat({**given, "messages": [*messages, *more], "max_tokens": 1})
        try:
            found.append((await chat_tokens(model, request, model.limit[0]))[1])
        except InvalidRequestError as error:  # a template may refuse some of these, for example two users in a row
            refusal = error
    if len(found) < 2:
        assert refusal is not None
        raise refusal
    return _shared(found)


def _shared(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The longest common prefix."""
    ordered = sorted(list(sequence) for sequence in sequences)
    low, high = ordered[0], ordered[-1]
    return low[: next((at for at, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), None)]
