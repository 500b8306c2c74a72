"""Shows examples in docstrings as code blocks on the page of the Python API."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:\n(?P<code>(?:(?: {4}.*)?\n)+)", re.MULTILINE)


class DocstringExamples(griffe.Extension):
    """Puts a code fence around the text below `Example:`."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value + "\n").rstrip()


def _fenced(match: re.Match[str]) -> str:
    code = textwrap.dedent(match["code"]).strip()
    return match.group() if code.startswith("```") else f"Example:\n\n```python\n{code}\n```\n\n"
