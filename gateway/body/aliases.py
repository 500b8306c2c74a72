"""Names that other servers have for fields of a request. Each has one meaning, that of the field it stands for."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.validation_errors import TOKEN_LIMIT
from alignedserve.gateway.body.values import INT64, Between, Body, StopStrings
from alignedserve.request import MAX_SAMPLES

_ALIAS = "Alias of {}."
_MEANT = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "num_return_sequences": "n",
    "no_stop_trim": "include_stop_str_in_output",
}


def _alias(name: str) -> Any:
    return Field(None, description=_ALIAS.format(_MEANT[name]))


class Aliases(Body):
    """Sets the fields that its names stand for. Raises InvalidRequestError if both are given and differ."""

    n_predict: Annotated[int, Between(1, TOKEN_LIMIT)] | None = _alias("n_predict")
    min_new_tokens: Annotated[int, Between(0, TOKEN_LIMIT)] | None = _alias("min_new_tokens")
    sampling_seed: Annotated[int, Between(*INT64)] | None = _alias("sampling_seed")
    stop_sequences: StopStrings | None = _alias("stop_sequences")
    repeat_penalty: Annotated[float, Between(0, 100, above=True)] | None = _alias("repeat_penalty")
    num_return_sequences: Annotated[int, Between(1, MAX_SAMPLES)] | None = _alias("num_return_sequences")
    no_stop_trim: bool | None = _alias("no_stop_trim")

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        for name, meant in _MEANT.items():
            if (value := getattr(self, name, None)) is None:
                continue
            if meant in self.model_fields_set and getattr(self, meant) not in (None, (), value):
                raise InvalidRequestError(f"{meant} and {name} differ; set only one of them", param=name)
            setattr(self, meant, value)
        return self
