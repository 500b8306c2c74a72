"""The client's public names, in the order of a typical use."""

from __future__ import annotations

from alignedserve import client, errors

FIRST = ("Client", "AsyncClient", "ChunkStream", "AsyncChunkStream", "Options")


def client_names() -> str:
    """A mkdocstrings directive for each name, with a separate section for errors."""
    classes = [name for name in client.__all__ if not hasattr(errors, name)]
    names = [*(name for name in FIRST if name in classes), *(name for name in classes if name not in FIRST)]
    return "\n\n".join(_directive(name) for name in names)


def _directive(name: str) -> str:
    options = "    options:\n      show_if_no_docstring: true"
    if name in ("Client", "AsyncClient"):  # the methods for tools are inherited
        options += "\n      inherited_members: true"
    return f"::: alignedserve.client.{name}\n{options}"
