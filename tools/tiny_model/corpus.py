"""The training text of the tiny model, which every Python installation contains.

Docstrings of the standard library (read from source with ``ast``, and from the built-in and
extension modules by import) and the help topics of ``pydoc``. Everything is sorted and free of
duplicates, so one Python version always yields the same documents in the same order.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType

SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "ensurepip",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
PUBLIC_MODULES = {"posix": "os", "posixpath": "os.path", "_io": "io", "builtins": ""}
HELD_OUT_PER_MILLE = 30
MINIMUM_CHARACTERS = 20


class Kind(Enum):
    """The kind of thing that a document describes. The chat questions depend on it."""

    MODULE = "module"
    CLASS = "class"
    FUNCTION = "function"
    TOPIC = "topic"


@dataclass(frozen=True)
class Document:
    """A docstring or help topic, with the name that users know it by."""

    name: str
    kind: Kind
    signature: str
    text: str

    @property
    def is_public(self) -> bool:
        """Whether no part of the dotted name starts with an underscore."""
        return not any(part.startswith("_") for part in self.name.split("."))

    @property
    def is_held_out(self) -> bool:
        """Whether the document is excluded from training. A hash of its text decides."""
        digest = hashlib.sha256(self.text.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE

    def as_plain_text(self) -> str:
        """The document as ``help()`` would show it: heading, blank line, text."""
        return f"{self.signature}\n\n{self.text}\n"


def collect_documents() -> list[Document]:
    """All documents of this installation, without duplicates, in a fixed order."""
    found = [*_source_documents(), *_extension_documents(), *_topic_documents()]
    seen: set[str] = set()
    documents = []
    for document in found:
        if len(document.text) >= MINIMUM_CHARACTERS and document.text not in seen:
            seen.add(document.text)
            documents.append(document)
    return documents


def _public_name(module: str, *parts: str) -> str:
    """Join a dotted name; `posixpath.join` becomes `os.path.join`, `_socket.x` `socket.x`."""
    public = PUBLIC_MODULES.get(module, module.removeprefix("_"))
    return ".".join(part for part in (public, *parts) if part)


def _source_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            parts = [*relative.parent.parts, relative.stem]
            module = ".".join(part for part in parts if part != "__init__")
            yield from _documents_of_source(module, path.read_bytes())


def _documents_of_source(module: str, source: bytes) -> Iterator[Document]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    text = ast.get_docstring(tree)
    if text:
        name = _public_name(module)
        yield Document(name, Kind.MODULE, f"module {name}", text)
    yield from _documents_of_body(module, (), tree.body)


def _documents_of_body(module: str, outer: tuple[str, ...], body: list[ast.stmt]) -> Iterator[Document]:
    """Classes and functions of a module's or class's body, methods included."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            name = _public_name(module, *outer, node.name)
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            signature = f"class {name}({bases})" if bases else f"class {name}"
            kind = Kind.CLASS
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = _public_name(module, *outer, node.name)
            signature = f"{name}({ast.unparse(node.args)})"
            kind = Kind.FUNCTION
        else:
            continue
        text = ast.get_docstring(node)
        if text:
            yield Document(name, kind, signature, text)
        if isinstance(node, ast.ClassDef):
            yield from _documents_of_body(module, (*outer, node.name), node.body)


def _extension_documents() -> Iterator[Document]:
    """Docstrings of modules written in C, which have no source to parse."""
    for name in sorted(sys.stdlib_module_names):
        if _is_extension(name):
            module = importlib.import_module(name)
            if module.__doc__:
                public = _public_name(name)
                text = inspect.cleandoc(module.__doc__)
                yield Document(public, Kind.MODULE, f"module {public}", text)
            yield from _documents_of_namespace(name, (), module)


def _is_extension(name: str) -> bool:
    if name == "builtins":
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return spec.origin == "built-in" or spec.origin.endswith(suffixes)


def _documents_of_namespace(module: str, outer: tuple[str, ...], holder: ModuleType | type) -> Iterator[Document]:
    for attribute, value in sorted(vars(holder).items()):
        is_class = inspect.isclass(value)
        if attribute.startswith("__") or not (is_class or inspect.isroutine(value)):
            continue
        name = _public_name(module, *outer, attribute)
        if isinstance(value.__doc__, str):
            kind = Kind.CLASS if is_class else Kind.FUNCTION
            signature = _signature_of_object(name, kind, value)
            yield Document(name, kind, signature, inspect.cleandoc(value.__doc__))
        if isinstance(value, type) and not outer:
            yield from _documents_of_namespace(module, (attribute,), value)


def _signature_of_object(name: str, kind: Kind, value: object) -> str:
    if kind is Kind.CLASS:
        return f"class {name}"
    signature: str | None = getattr(value, "__text_signature__", None)
    if not signature:
        return f"{name}(...)"
    return name + re.sub(r"\$\w+(, /)?(, )?", "", signature)


def _topic_documents() -> Iterator[Document]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for topic, text in sorted(topics.items()):
        name = topic.removeprefix("typesseq-").replace("-", " ")
        yield Document(name, Kind.TOPIC, f"Help topic: {name}", text.strip())
