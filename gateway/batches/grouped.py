"""The lines of a batch's file in groups whose prompts begin alike, so that what they share is computed once.

The whole file is looked at before the first line is submitted (BatchLLM, `src/alignedserve/prefix_groups.py`). Prompts
are compared as text: nothing has to be tokenised for it, and prompts that begin with the same text begin with the same
tokens but for the last one or two.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import orjson

from alignedserve.gateway.batches.jsonl import PART_BYTES, PART_LINES, Line, LineReader
from alignedserve.prefix_groups import prefix_groups

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20  # larger files are read in their own order: prompts are compared in memory
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens", "n_predict")
_ANSWERS = ("n", "num_return_sequences")
_FIRST = ("instructions", "tools", "messages", "input", "prompt")  # in the order in which a template writes them


def lines_in_order(path: Path, *, by_prefix: bool) -> LineReader | GroupedReader:
    """The reader of a validated file: by groups, or in the order of the file. Blocks for about 0.1 ms a line.

    Raises OSError.
    """
    if by_prefix and (size := path.stat().st_size) > MOST_BYTES:
        said = "a batch of %.0f MiB is read in its own order: prompts are grouped by prefix up to %.0f MiB"
        logger.info(said, size / (1 << 20), MOST_BYTES / (1 << 20))
        by_prefix = False
    return GroupedReader(path) if by_prefix else LineReader(path)


class GroupedReader:
    """As `LineReader`, in another order."""

    def __init__(self, path: Path) -> None:
        indices, places, prompts, limits = [], [], [], []
        with LineReader(path) as reader:
            while part := reader.part():
                for line, place in zip(part, reader.places, strict=True):
                    indices.append(line.index)
                    places.append(place)
                    body = orjson.loads(line.text)["body"]
                    prompts.append(prompt_text(body))
                    limits.append(answer_tokens(body))
        known = [limit for limit in limits if limit]
        mean = sum(known) // len(known) if known else 1  # lines without a limit are taken to be like the others
        groups = prefix_groups(prompts, 1, [limit or mean for limit in limits])
        self._order = [number for group in groups for number in group.members]
        self._indices, self._places = indices, places
        self._next = 0
        self._file: BinaryIO = path.open("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def part(self) -> list[Line]:
        """The next lines, at most PART_LINES and about PART_BYTES; [] at the end."""
        lines: list[Line] = []
        size = 0
        while len(lines) < PART_LINES and size < PART_BYTES and self._next < len(self._order):
            number = self._order[self._next]
            self._next += 1
            self._file.seek(self._places[number])
            text = self._file.readline().strip()
            size += len(text)
            lines.append(Line(self._indices[number], text))
        return lines


def prompt_text(body: Mapping[str, Any]) -> bytes:
    """The fields of a body that its prompt is written from, in that order; b"" if one is nested too deeply to write."""
    try:
        return b"\n".join(orjson.dumps(body[name]) for name in _FIRST if body.get(name) is not None)
    except orjson.JSONEncodeError:  # it was read: reading goes deeper
        return b""


def answer_tokens(body: Mapping[str, Any]) -> int:
    """The most tokens that a body asks for, of all its answers; 0: it does not say."""
    return max(0, _whole(body, _LIMITS, 0)) * max(1, _whole(body, _ANSWERS, 1))


def _whole(body: Mapping[str, Any], names: Iterable[str], default: int) -> int:
    return next((value for name in names if type(value := body.get(name)) is int), default)
