"""The order in which a batch's lines are submitted: prompts that begin alike together, each line once."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from alignedserve.gateway.batches import grouped
from alignedserve.gateway.batches.grouped import answer_tokens, lines_in_order, prompt_text
from alignedserve.gateway.batches.jsonl import Line, LineReader


def write(path: Path, *bodies: dict[str, Any]) -> None:
    lines = [json.dumps({"custom_id": str(n), "body": body}).encode() for n, body in enumerate(bodies)]
    path.write_bytes(BOM_UTF8 + b"\n  \n".join(lines) + b"\n")  # blank lines count


def read(path: Path, *, by_prefix: bool = True) -> list[Line]:
    found: list[Line] = []
    with lines_in_order(path, by_prefix=by_prefix) as reader:
        while part := reader.part():
            found += part
    return found


def chat(system: str, user: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"max_tokens": 5, "messages": messages}


def test_lines_of_one_prefix_are_submitted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "PART_LINES", 2)
    file = tmp_path / "in.jsonl"
    long, short = "The manual. " * 50, "In short. " * 20
    write(file, chat(long, "one"), chat(short, "one"), {"prompt": "x" * 9}, chat(long, "two"), chat(short, "two"))
    assert [line.index for line in read(file)] == [4, 2, 8, 0, 6]
    assert sorted(read(file), key=lambda line: line.index) == read(file, by_prefix=False)


def test_where_every_line_limits_its_answer_those_with_much_to_decode_go_first(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    short, long = {"prompt": "a" * 40}, {"prompt": [1] * 45}
    write(file, short | {"max_tokens": 4}, long | {"max_completion_tokens": 30}, short | {"max_tokens": 5, "n": 8})
    # The two short ones are one group: 42 units for 44 tokens. The long one: 91 for 30.
    assert [line.index for line in read(file)] == [0, 4, 2]
    write(file, short | {"max_tokens": 4}, long | {"max_completion_tokens": 30}, short | {"max_tokens": 1})
    assert [line.index for line in read(file)] == [2, 0, 4]
    write(file, short, long | {"max_completion_tokens": 30}, short | {"max_tokens": 2})
    assert [line.index for line in read(file)] == [0, 4, 2], "a line without a limit counts as the mean, 16"
    write(file, long, short)
    assert [line.index for line in read(file)] == [2, 0], "without any limit, the least to compute"
    assert answer_tokens({"max_output_tokens": 7, "n": None}) == 7
    assert answer_tokens({"n_predict": 3, "num_return_sequences": 2}) == 6
    assert answer_tokens({"max_tokens": True, "n": True}) == 0


def test_a_file_too_large_to_compare_keeps_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "in.jsonl"
    write(file, chat("b" * 99, "c"), {"prompt": "a"})
    assert [line.index for line in read(file)] == [2, 0]
    monkeypatch.setattr(grouped, "MOST_BYTES", 10)
    assert [line.index for line in read(file)] == [0, 2]
    assert isinstance(lines_in_order(file, by_prefix=True), LineReader)


def test_the_prompt_is_what_a_template_writes_first() -> None:
    body = {"model": "m", "messages": [1], "max_tokens": 3, "tools": [2]}
    assert prompt_text(body) == b"[2]\n[1]"


def test_a_body_that_is_nested_too_deeply_to_write_does_not_stop_the_others(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    write(file, {"messages": deep}, {"prompt": "a"})
    assert sorted(line.index for line in read(file)) == [0, 2]
