"""Input files: what makes one invalid, and that memory does not grow with them."""

from __future__ import annotations

import json
import tracemalloc
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from alignedserve.gateway.batches.jsonl import MOST_ERRORS, LineReader, Validator, custom_id_of
from alignedserve.gateway.body.planning import ServedModel

MOST_BYTES = 4096
ENDPOINT = "/v1/completions"


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    value = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}, **changes}
    return json.dumps({name: field for name, field in value.items() if field is not ...}).encode() + b"\n"


def validated(path: Path, content: bytes | None = None, most_lines: int = 1 << 20) -> Validator:
    if content is not None:
        path.write_bytes(content)
    model = ServedModel("tiny", None, None, aliases=("gpt-*",))
    validator = Validator(path, ENDPOINT, model, most_lines, MOST_BYTES)
    while not validator.step():
        pass
    validator.close()
    return validator


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{\n", "invalid_json_line", None),
        (b'["a"]\n', "invalid_json_line", None),
        (line(...), "missing_required_parameter", "custom_id"),
        (line(7), "invalid_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/chat/completions"), "mismatched_url", "url"),
        (line(body="x"), "invalid_body", "body"),
        (line(body={"model": "other"}), "model_not_found", "body.model"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line("long", body={"prompt": "x" * MOST_BYTES}), "line_too_long", None),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, wrong: bytes, code: str, param: str | None) -> None:
    found = validated(tmp_path / "in", line("first") + b"\n" + wrong + line("last"))
    assert [(error["code"], error["param"], error["line"]) for error in found.errors] == [(code, param, 3)]
    assert all(error["message"] for error in found.errors)


def test_an_empty_file_and_one_with_too_many_lines_are_wrong(tmp_path: Path) -> None:
    assert [error["code"] for error in validated(tmp_path / "in", b"\n \n").errors] == ["empty_file"]
    many = b"".join(line(str(number)) for number in range(4))
    assert [error["code"] for error in validated(tmp_path / "in", many, most_lines=3).errors] == ["too_many_lines"]
    assert validated(tmp_path / "in", many, most_lines=4).errors == []


def test_at_most_a_hundred_errors_are_told(tmp_path: Path) -> None:
    assert len(validated(tmp_path / "in", b"x\n" * 5000).errors) == MOST_ERRORS


def test_lines_are_read_whole_and_in_order_whatever_their_ends(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(line("a") + b"\r\n\n" + line("b") + line("c").rstrip(b"\n"))
    with LineReader(path, MOST_BYTES) as reader:
        (a, b, c), rest = reader.part(), reader.part()
    assert [(found.index, custom_id_of(found)) for found in (a, b, c)] == [(0, "a"), (3, "b"), (4, "c")]
    assert rest == []


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    found = validated(tmp_path / "in", BOM_UTF8 + line("a").replace(b"\n", b"\r\n") + line("b"))
    assert (found.total, found.errors) == (2, [])
    assert [error["code"] for error in validated(tmp_path / "in", BOM_UTF8).errors] == ["empty_file"]
    wrong = line("a") + BOM_UTF8 + line("b") + line("\xe9", note="").replace(b"\\u00e9", b"\xe9")
    assert [error["line"] for error in validated(tmp_path / "in", wrong).errors] == [2, 3]


def test_a_line_that_is_too_long_stays_so_if_it_is_cut_within_spaces(tmp_path: Path) -> None:
    found = validated(tmp_path / "in", line("a").rstrip() + b" " * MOST_BYTES + b"garbage\n" + line("b"))
    assert [(error["code"], error["line"]) for error in found.errors] == [("line_too_long", 1)]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("wb") as file:
        for number in range(20_000):
            file.write(line(f"{number:040}", body={"prompt": "x" * 400}))
    validated(path)  # warms caches
    tracemalloc.start()
    try:
        found = validated(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.total, found.errors) == (20_000, [])
    assert path.stat().st_size > 10 << 20
    assert peak < 4 << 20  # SQLite's own cache is bounded by `cache_size`
