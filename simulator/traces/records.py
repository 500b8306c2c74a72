"""Traces as JSON lines: Mooncake's and Bailian's, and the request log of our gateways (`--request-log`)."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.simulator import trace_formats
from alignedserve.simulator.traces.fields import Place, objective_of, priority_of, seconds_of, tokens_of
from alignedserve.simulator.traces.measured import LogFigures
from alignedserve.simulator.traces.tables import Found
from alignedserve.simulator.traces.trace import Row

_MOONCAKE_BLOCK = 512  # tokens of each of its hash_ids
_BLOCK_SIZES = (_MOONCAKE_BLOCK, 16, 32, 64, 128, 256, 1024, 2048, 4096, 8, 4, 2, 1)
"""Tokens of an id, where no line has `block_tokens`: the first that fits. 16: Bailian's."""
_MOONCAKE = ("timestamp", "input_length", "output_length")
_REQUEST_LOG = ("arrival_unix_s", "input_tokens", "output_tokens")
_MOST_ID = (1 << 63) - 1  # of a block


def parse(text: str, file: str) -> Found:
    """Parse the file. Raises TraceError."""
    read: _Reader | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        record = _Record(line, file, number)
        if read is None:
            read = _choose(record)
        read.add(record)
    if read is None:
        Place(file, 1, 1).fail("the file is empty")
    return read.finish()


class _Record:
    """One line. Values are accessed by key; a value's place is the position of its key."""

    def __init__(self, line: str, file: str, number: int) -> None:
        self._line = line
        self._file = file
        self._number = number
        try:
            self.values: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError as error:
            Place(file, number, error.colno).fail(f"not JSON: {error.msg}")
        except RecursionError:
            Place(file, number, 1).fail("not a trace: its JSON is nested too deeply")
        except ValueError:  # Python's limit on the digits of an integer
            most = sys.get_int_max_str_digits()
            found = re.search(rf"\d{{{most + 1}}}", line)
            Place(file, number, found.start() + 1 if found else 1).fail(f"a number with more than {most} digits")
        if not isinstance(self.values, dict):
            Place(file, number, 1).fail("a line must hold a JSON object")

    def place(self, key: str) -> Place:
        return Place(self._file, self._number, max(0, self._line.find(f'"{key}"')) + 1, key)

    def get(self, key: str) -> tuple[Any, Place]:
        if key not in self.values:
            self.place(key).fail("is missing")
        return self.values[key], self.place(key)


@dataclass(frozen=True, slots=True)
class _Ids:
    """How many ids a line has for its prompt. `place`: of the ids."""

    count: int
    input_tokens: int
    place: Place

    def fill(self, size: int) -> int:
        """Blocks of `size` tokens that the prompt fills, the last one perhaps in part."""
        return -(-self.input_tokens // size)


class _Mooncake:
    """Also Alibaba's Bailian traces, which name each line's `chat_id`: their times are seconds."""

    def __init__(self) -> None:
        self._found = Found("mooncake", timed=True)
        self._ids: list[_Ids] = []
        self._sized = False  # a line has told the size of its blocks
        self._seen: set[int] = set()
        self._hits = 0
        self._blocks = 0

    def add(self, record: _Record) -> None:
        per_s = 1.0 if "chat_id" in record.values else 1e3
        arrival_s = seconds_of(*record.get("timestamp")) / per_s
        inputs, outputs = tokens_of(*record.get("input_length")), tokens_of(*record.get("output_length"))
        blocks = _names(record, "hash_ids")
        _block_tokens(self._found, record, blocks, _MOONCAKE_BLOCK)
        if blocks:
            self._ids.append(_Ids(len(blocks), inputs, record.place("hash_ids")))
            self._sized |= "block_tokens" in record.values
        self._found.add(Row(inputs, outputs, arrival_s, blocks=blocks), record.place("timestamp"))
        self._blocks += len(blocks)
        for position, block in enumerate(blocks):  # a prefix ends at the first block that no earlier request had
            if block not in self._seen:
                self._seen.update(blocks[position:])
                break
            self._hits += 1

    def finish(self) -> Found:
        if self._ids and not self._sized and (size := _inferred_size(self._ids)) != _MOONCAKE_BLOCK:
            self._found.block_tokens = size
            self._found.notes.append(
                f"hash_ids are taken to name blocks of {size} tokens: every line has as many as its prompt fills"
            )
        size = self._found.block_tokens
        for ids in self._ids:
            if ids.count > (most := ids.fill(size)):
                ids.place.fail(
                    f"{ids.count} ids are more than the {most} blocks of {size} tokens that the prompt fills; "
                    "`block_tokens` in a line says how many tokens each id is of"
                )
        if self._hits:
            share = self._hits / self._blocks
            self._found.notes.append(
                f"{self._hits} of {self._blocks} prompt blocks of the whole trace ({share:.1%}) repeat an earlier "
                "request's prefix; every prompt is computed in full without kv_pool.prefix_cache"
            )
        return self._found


def _inferred_size(lines: Sequence[_Ids]) -> int:
    """The first of `_BLOCK_SIZES` of which every line names all blocks, or all full ones; else Mooncake's."""
    for size in _BLOCK_SIZES:
        if all(ids.count == ids.fill(size) for ids in lines) or all(
            ids.count == ids.input_tokens // size for ids in lines
        ):
            return size
    return _MOONCAKE_BLOCK


class _RequestLog:
    def __init__(self) -> None:
        self._found = Found("request log", timed=True, any_order=True)  # ordered by the requests' ends
        self._empty = 0
        self._ids: set[str] = set()
        self._figures = LogFigures()

    def add(self, record: _Record) -> None:
        outputs = tokens_of(*record.get("output_tokens"), least=0)
        given = record.values.get("request_id")
        if not isinstance(given, str | int | None):
            record.place("request_id").fail("must be text or a whole number")
        request_id = "" if given is None else str(given)
        if request_id in self._ids:  # a request that continued through another gateway
            request_id = ""
        self._ids.add(request_id)
        arrival_s = seconds_of(*record.get("arrival_unix_s"))
        inputs = tokens_of(*record.get("input_tokens"), least=min(outputs, 1))
        objective_s = objective_of(record.values.get("wait_objective_s"), record.place("wait_objective_s"))
        priority = priority_of(record.values.get("priority"), record.place("priority"))
        named = _names(record, "blocks")
        size = _block_tokens(self._found, record, named)
        whole = inputs // size if size else 0
        of_prompt, of_answer = named[:whole], named[whole:]
        row = Row(inputs, outputs, arrival_s, request_id, objective_s, priority, of_prompt, of_answer)
        if outputs == 0:
            self._empty += 1
        else:
            self._found.add(row, record.place("arrival_unix_s"))
            self._figures.add(record.values, arrival_s, outputs)

    def finish(self) -> Found:
        self._found.measured = self._figures.describe()
        if self._empty:
            self._found.notes.append(f"{self._empty} requests of the log ended without a token and were left out")
        return self._found


def _block_tokens(found: Found, record: _Record, blocks: tuple[int, ...], default: int | None = None) -> int:
    """The tokens of a block, as in earlier lines; 0 if the line names none. `default`: where it does not tell."""
    if not blocks:
        return 0
    if default is not None and "block_tokens" not in record.values:
        size = default
    else:
        size = tokens_of(*record.get("block_tokens"))
    if found.block_tokens not in (0, size):
        record.place("block_tokens").fail(f"must be {found.block_tokens}, as in earlier lines")
    found.block_tokens = size
    return size


def _names(record: _Record, key: str) -> tuple[int, ...]:
    """Ids of blocks; none if they are null or missing. Negative ones are left for answers without a name.

    An id names its block and all tokens before it, so no line has one twice.
    """
    found = record.values.get(key)
    if found is None:
        return ()
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one <= _MOST_ID for one in found):
        record.place(key).fail("must be a list of whole numbers from 0 to 2^63 - 1")
    if len(set(found)) < len(found):
        again = next(one for one, times in Counter(found).items() if times > 1)
        record.place(key).fail(f"{again} is there twice, but an id names all tokens up to the end of its block")
    return tuple(found)


_Reader = _Mooncake | _RequestLog


def _choose(record: _Record) -> _Reader:
    keys = set(record.values)
    if keys & set(_MOONCAKE[1:]):
        return _Mooncake()
    if not keys & set(_REQUEST_LOG):
        shown = ", ".join(sorted(keys)[:8])
        record.place("").fail(f"the keys {shown} match no known trace format; a line has {trace_formats.JSONL_KEYS}")
    return _RequestLog()
