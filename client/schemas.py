"""JSON schemas of Python's types, and objects of these types from JSON.

pydantic is not needed. Where the program uses it, it describes and reads its own models and types unknown here.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    None: {"type": "null"},
    Any: {},
    object: {},
    dict: {"type": "object"},
    list: {"type": "array"},
}
_LISTS: dict[Any, Callable[[Iterable[Any]], Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_QUALIFIERS = {"Required", "NotRequired", "ReadOnly", "Final"}
_MEMBERS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")


class NoSchemaError(TypeError):
    """A type has no JSON schema."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """`schema` of a type. `read` makes the object of a JSON value; raises ValueError for one of another type."""

    schema: dict[str, Any]
    read: Callable[[Any], Any]


class Shapes:
    """The shapes of types. Classes with fields become `definitions`, so that they may refer to themselves."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._fields: dict[Any, dict[str, Shape]] = {}

    def whole(self, kind: Any) -> Shape:
        """The shape of a type, with the definitions that its schema needs."""
        shape = self.of(kind)
        return Shape(self.with_definitions(shape.schema), shape.read)

    def with_definitions(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {**schema, "$defs": self.definitions} if self.definitions else dict(schema)

    def of(self, kind: Any) -> Shape:
        """Raises NoSchemaError."""
        try:
            plain = _PLAIN.get(kind)
        except TypeError:  # not hashable
            plain = None
        if plain is not None:
            return Shape(plain, lambda value: _plain(kind, value))
        if hasattr(kind, "__supertype__"):  # a NewType
            return self.of(kind.__supertype__)
        if hasattr(kind, "__value__") and hasattr(kind, "__type_params__"):  # `type X = …`
            return self.of(kind.__value__)
        origin = typing.get_origin(kind)
        if origin is not None:
            return self._generic(kind, origin, typing.get_args(kind))
        if isinstance(kind, type):
            return self._class(kind)
        raise NoSchemaError(f"has no JSON schema for {kind!r}")

    def _generic(self, kind: Any, origin: Any, arguments: tuple[Any, ...]) -> Shape:
        if origin is typing.Annotated:
            return self._annotated(kind, *arguments)
        if getattr(origin, "_name", "") in _QUALIFIERS:
            return self.of(arguments[0])
        if origin is typing.Literal:
            return _choice([(one.value if isinstance(one, enum.Enum) else one, one) for one in arguments])
        if origin in (typing.Union, types.UnionType):
            return _either([self.of(one) for one in arguments], kind)
        if origin in _LISTS or (origin is tuple and arguments[1:] == (...,)):
            return _list(self.of(arguments[0]), _LISTS.get(origin, tuple))
        if origin is tuple:
            return _tuple([self.of(one) for one in arguments])
        if origin in _MAPPINGS and arguments[0] is str:
            return _mapping(self.of(arguments[1]))
        return self._adapted(kind)

    def _annotated(self, kind: Any, inner: Any, *notes: Any) -> Shape:
        """With a description, if a note is one. Other notes, as limits of a value, are pydantic's."""
        about = next(filter(None, map(_description, notes)), None)
        if any(_description(note) is None or hasattr(note, "metadata") for note in notes) and "pydantic" in sys.modules:
            return self._adapted(kind)
        shape = self.of(inner)
        return shape if about is None else Shape({**shape.schema, "description": about}, shape.read)

    def _class(self, kind: type[Any]) -> Shape:
        if hasattr(kind, "__pydantic_core_schema__"):
            return self._adapted(kind)
        if issubclass(kind, enum.Enum):
            return _choice([(member.value, member) for member in kind])
        if dataclasses.is_dataclass(kind):
            return self._defined(kind, [field.name for field in dataclasses.fields(kind) if field.init], None)
        if typing.is_typeddict(kind):
            return self._defined(kind, kind.__annotations__, kind.__required_keys__)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return self._defined(kind, kind._fields, None)
        return self._adapted(kind)

    def _defined(self, kind: type[Any], names: Iterable[str], required: Iterable[str] | None) -> Shape:
        """A class with fields. `required`: None for all of them."""
        name = self._name(kind)
        if name not in self.definitions:
            self.definitions[name] = {}
            try:
                hints = typing.get_type_hints(kind, include_extras=True)
            except NameError as error:
                raise NoSchemaError(f"cannot resolve an annotation of {kind.__qualname__}: {error}") from error
            fields = {field: self.of(hints[field]) for field in names}
            self.definitions[name] = {
                "type": "object",
                "properties": {field: shape.schema for field, shape in fields.items()},
                "required": [field for field in fields if _is_required(hints[field], field, required)],
                "additionalProperties": False,
            }
            self._fields[kind] = fields
        return Shape({"$ref": f"#/$defs/{name}"}, lambda value: self._made(kind, value))

    def _made(self, kind: type[Any], value: Any) -> Any:
        fields = self._fields[kind]
        if not isinstance(value, dict) or not value.keys() <= fields.keys():
            raise ValueError(f"{value!r} is not a {kind.__name__}")
        try:
            return kind(**{name: fields[name].read(one) for name, one in value.items()})
        except TypeError as error:  # a field is missing
            raise ValueError(f"{value!r} is not a {kind.__name__}: {error}") from error

    def _name(self, kind: type[Any]) -> str:
        """The name of a definition; classes of equal names have different ones."""
        if kind not in self._names:
            name = kind.__qualname__.replace("<locals>", "").replace(".", "_")
            while name in self._names.values():
                name += "_"
            self._names[kind] = name
        return self._names[kind]

    def _adapted(self, kind: Any) -> Shape:
        """By pydantic, if the program has imported it."""
        pydantic = sys.modules.get("pydantic")
        if pydantic is None:
            raise NoSchemaError(f"has no JSON schema for {kind!r}")
        prefix = self._name(kind) if isinstance(kind, type) else f"type{len(self._names)}"
        self._names.setdefault(repr(kind), prefix)
        try:
            adapter = pydantic.TypeAdapter(kind)
            schema = closed(adapter.json_schema(ref_template=f"#/$defs/{prefix}_{{model}}"))
        except pydantic.errors.PydanticUserError as error:
            raise NoSchemaError(f"has no JSON schema for {kind!r}") from error
        self.definitions |= {f"{prefix}_{name}": one for name, one in schema.pop("$defs", {}).items()}
        return Shape(schema, lambda value: adapter.validate_json(json.dumps(value)))


def _is_required(hint: Any, field: str, required: Iterable[str] | None) -> bool:
    """Whether a class's field must be there. A TypedDict with annotations as strings does not know it itself."""
    qualifier = getattr(typing.get_origin(hint), "_name", "")
    if qualifier in ("Required", "NotRequired"):
        return qualifier == "Required"
    return required is None or field in required


def _description(note: Any) -> str | None:
    """The description that a note of `Annotated` is: a text, or an object with one."""
    found = note if isinstance(note, str) else getattr(note, "documentation", getattr(note, "description", None))
    return found if isinstance(found, str) else None


def _plain(kind: Any, value: Any) -> Any:
    if kind in (Any, object) or (value is None and kind in (None, type(None))):
        return value
    if kind in (int, float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and (kind is float or isinstance(value, int) or value.is_integer()):
            with contextlib.suppress(OverflowError):
                return kind(value)
    elif isinstance(kind, type) and isinstance(value, kind):
        return value
    raise ValueError(f"{value!r} is not {_article(kind)}")


def _article(kind: Any) -> str:
    name = getattr(kind, "__name__", str(kind))
    return f"an {name}" if name[:1] in "aeiou" else f"a {name}"


def _choice(options: list[tuple[Any, Any]]) -> Shape:
    """One of these JSON values, each with its object."""
    values = [value for value, _ in options]
    if not values or not all(value is None or isinstance(value, str | int | float) for value in values):
        raise NoSchemaError(f"has no JSON schema for the values {values}")
    texts = {"type": "string"} if all(isinstance(value, str) for value in values) else {}

    def read(value: Any) -> Any:
        for one, found in options:
            if value == one and isinstance(value, bool) is isinstance(one, bool):
                return found
        raise ValueError(f"{value!r} is not one of {values}")

    return Shape({**texts, "enum": values}, read)


def _either(shapes: list[Shape], kind: Any) -> Shape:
    def read(value: Any) -> Any:
        for shape in shapes:
            try:
                return shape.read(value)
            except ValueError:
                continue
        raise ValueError(f"{value!r} is of none of {kind}")

    return Shape({"anyOf": [shape.schema for shape in shapes]}, read)


def _list(inner: Shape, make: Callable[[Iterable[Any]], Any]) -> Shape:
    def read(value: Any) -> Any:
        return make([inner.read(one) for one in _plain(list, value)])

    return Shape({"type": "array", "items": inner.schema}, read)


def _tuple(shapes: list[Shape]) -> Shape:
    count = len(shapes)
    schema = {"type": "array", "prefixItems": [shape.schema for shape in shapes], "items": False, "minItems": count}

    def read(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != count:
            raise ValueError(f"{value!r} is not a list of {count} values")
        return tuple(shape.read(one) for shape, one in zip(shapes, value, strict=True))

    return Shape(schema, read)


def _mapping(inner: Shape) -> Shape:
    def read(value: Any) -> Any:
        return {key: inner.read(one) for key, one in _plain(dict, value).items()}

    return Shape({"type": "object", "additionalProperties": inner.schema}, read)


def closed(schema: Any) -> Any:
    """The schema without keys that it does not name, in objects that do not say: a model could write any number."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _MEMBERS and isinstance(value, dict):
            found[name] = {member: closed(one) for member, one in value.items()}
        else:
            found[name] = value if name in _VALUES else closed(value)
    if found.get("type") == "object" and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found
