"""The fields of a chat request about reasoning and about the variables of the chat template."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.nested import check_depth
from alignedserve.gateway.body.validation_errors import TOKEN_LIMIT
from alignedserve.gateway.body.values import Between, Body
from alignedserve.gateway.dialects.detection import HARMONY, reasoning_dialect_of
from alignedserve.gateway.failures import UnsupportedFeatureError
from alignedserve.text import ChatTemplate

_OURS = ("messages", "tools", "documents", "add_generation_prompt")
SWITCHES = ("enable_thinking", "thinking")  # names of the variable that turns reasoning on and off


class ThinkingFields(Body):
    lenient: ClassVar[bool] = False
    """Whether an effort that the template does not read is ignored: agents set one whatever the model is."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A variable of the chat template. none turns reasoning off."
    )
    enable_thinking: bool | None = Field(None, description="A variable of the chat template: reasoning on or off.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    include_reasoning: bool | None = Field(None, description="If false, the reply leaves reasoning out.")
    separate_reasoning: bool | None = Field(None, description="If false, reasoning is a part of the content.")
    thinking_token_budget: Annotated[int, Between(0, TOKEN_LIMIT)] | None = Field(
        None, description="After this many tokens of reasoning, the marker that ends it is forced."
    )

    _unread_settings: list[str] = PrivateAttr(default_factory=list)

    @property
    def without_reasoning(self) -> bool:
        """Whether the client turns reasoning off."""
        return self.enable_thinking is False or (self.enable_thinking is None and self.reasoning_effort == "none")

    def template_variables(self, template: ChatTemplate) -> dict[str, Any]:
        """The variables that the client sets. Raises UnsupportedFeatureError for what the template does not read."""
        variables = dict(self.chat_template_kwargs or {})
        for name, value in variables.items():
            where = f"chat_template_kwargs.{name[:60]}"
            if name in _OURS or name.endswith("_token"):
                raise InvalidRequestError(f"{where} is set by the server", param="chat_template_kwargs")
            if not template.mentions(name) and value is not False:
                raise _unread(where, "chat_template_kwargs")
        check_depth(variables, "chat_template_kwargs")
        self._switch(template, variables)
        effort = self.reasoning_effort
        always = effort == "none" and reasoning_dialect_of(template.source, "") == HARMONY
        if effort is not None and template.mentions("reasoning_effort") and not always:
            variables.setdefault("reasoning_effort", effort)
        elif always or effort not in (None, "none"):
            if not self.lenient:
                raise always_reasons("reasoning_effort") if always else _unread("reasoning_effort", "reasoning_effort")
            self._unread_settings = ["reasoning_effort"]
        return variables

    @property
    def unread_settings(self) -> list[str]:
        """Fields that the model's template does not read; known once it has been asked for the variables."""
        return self._unread_settings

    def _switch(self, template: ChatTemplate, variables: dict[str, Any]) -> None:
        """Turns reasoning on or off, if the client says so."""
        wanted = False if self.without_reasoning else self.enable_thinking
        if wanted is None:
            return
        known = [name for name in SWITCHES if template.mentions(name)]
        if not known and wanted:
            raise _unread("enable_thinking", "enable_thinking")
        for name in known:
            variables.setdefault(name, wanted)


def always_reasons(field: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"{field}: this model's reasoning cannot be turned off", param=field)


def _unread(where: str, param: str) -> UnsupportedFeatureError:
    reason = "this model's chat template does not read it"
    return UnsupportedFeatureError(f"{where} is not supported: {reason}", param=param)
