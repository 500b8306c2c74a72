"""Reads values of bodies that are translated, with errors that name where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from alignedserve.errors import RequestError
from alignedserve.gateway.body.refused import NOTHING, Refusal
from alignedserve.gateway.body.validation_errors import wrong_type
from alignedserve.gateway.failures import MissingFieldError, UnsupportedFeatureError

IMAGE_LEFT_OUT = "[an image, which this model cannot read]"


class Fields:
    """An object of a body. `where`: its place there, "" for the body itself. A value that is null counts as absent."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise wrong_type(where or "the body", "an object", value)
        self.where = where
        self._values: dict[str, Any] = value

    def place(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def get(self, name: str, kind: type[Any], expected: str) -> Any:
        """The value; None if it is absent. Raises WrongTypeError."""
        value = self._values.get(name)
        if value is not None and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
            raise wrong_type(self.place(name), expected, value)
        return value

    def text(self, name: str) -> str:
        """Raises MissingFieldError or WrongTypeError."""
        self.required(name)
        return str(self.get(name, str, "a string"))

    def optional_text(self, name: str) -> str | None:
        found = self.get(name, str, "a string")
        return None if found is None else str(found)

    def flag(self, name: str) -> bool | None:
        found = self.get(name, bool, "a boolean")
        return None if found is None else bool(found)

    def object(self, name: str) -> Fields | None:
        found = self.get(name, dict, "an object")
        return None if found is None else Fields(found, self.place(name))

    def objects(self, name: str) -> list[Fields]:
        """The objects of an array; none if it is absent."""
        entries = self.get(name, list, "an array of objects") or []
        return [Fields(entry, f"{self.place(name)}[{number}]") for number, entry in enumerate(entries)]

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def values(self) -> Mapping[str, Any]:
        return self._values

    def required(self, name: str) -> Any:
        """The value, of any type. Raises MissingFieldError."""
        if (value := self._values.get(name)) is None:
            raise MissingFieldError(f"{self.place(name)} is required", param=self.place(name))
        return value


def text_of(owner: Fields, name: str, kinds: tuple[str, ...]) -> str:
    """Content that is a string, or an array of parts of these `kinds` with a `text`. Absent content is "".

    Raises UnsupportedFeatureError for parts of other types.
    """
    value = owner.raw(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong_type(owner.place(name), "text or an array of parts", value)
    return "".join(part_text(part, kinds) for part in owner.objects(name))


def part_text(part: Fields, kinds: tuple[str, ...]) -> str:
    kind = part.text("type")
    if kind not in kinds:
        raise unsupported(part, "type", f"content of type {kind} is not supported: this server reads text only")
    return part.text("text")


def unsupported(owner: Fields, name: str, message: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(message, param=owner.place(name))


def refuse(fields: Fields, refusals: Mapping[str, Refusal]) -> None:
    """Raises UnsupportedFeatureError for a field of `refusals`, by name, whose value has an effect."""
    for name, refusal in refusals.items():
        if (value := fields.raw(name)) is not None:
            refusal.check(value, fields.place(name))


def refusals(*groups: tuple[str, str], one: tuple[str, ...] = ()) -> dict[str, Refusal]:
    """Refusals by name. Each group: names, separated by spaces, and a reason. `one`: fields in which 1 is harmless."""
    found = {name: reason for names, reason in groups for name in names.split()}
    of_one = dict.fromkeys(one, (1,))
    return {name: Refusal(name, why, (*NOTHING, *of_one.get(name, ()))) for name, why in found.items()}


def unread(owner: Fields | None, *read: str) -> list[str]:
    """Places of the fields of an object that are set, and that are not among those that are `read`."""
    values = {} if owner is None else owner.values()
    return [owner.place(name) for name, value in values.items() if owner and value is not None and name not in read]


@contextmanager
def renamed(names: Mapping[str, str], schema: str = "parameters") -> Iterator[None]:
    """Errors of the chat request name the fields that the client sent. `names`: of a chat field, the client's.

    `schema`: the client's name for a tool's parameters.
    """
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        field = param.partition("[")[0].partition(".")[0]
        if field == "tools":  # the client's tools have no `function` around their fields
            theirs = param.replace(".function", "").replace(".parameters", f".{schema}")
        else:
            theirs = names.get(field, param)
            param = field if field in names else param
        if theirs != param:
            error.message = error.message.replace(param, theirs, 1).replace(f"{theirs}.json_schema", theirs, 1)
            error.param = theirs
        raise
