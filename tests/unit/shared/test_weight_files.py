"""Headers of safetensors files: our reader accepts and refuses exactly what `safetensors` does."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from alignedserve.errors import ModelError
from alignedserve.weights import files
from alignedserve.weights.files import read_header, weights_identity
from support.broken_models import write_file

ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {
        "a.weight": torch.zeros(3, 2),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "c": torch.zeros((), dtype=torch.int64),
        "empty": torch.zeros(0, 5),
        "mask": torch.zeros(1, 7, dtype=torch.bool),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def seen_by_safetensors(file: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """dtype and shape of each tensor; None if it refuses the file."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except Exception:  # SafetensorError, OSError
        return None


def seen_here(file: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    try:
        return {name: (tensor.dtype, tensor.shape) for name, tensor in read_header(file).items()}
    except ModelError:
        return None


def test_a_sound_file_is_read_as_safetensors_reads_it(file: Path) -> None:
    assert seen_here(file) == seen_by_safetensors(file) is not None


def test_a_file_that_is_cut_off_anywhere_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        assert seen_here(file) is None, length
        assert length % 16 or seen_by_safetensors(file) is None, length


def test_any_other_byte_in_a_header_is_taken_as_safetensors_takes_it(file: Path) -> None:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    for position in range(8 + length):
        for value in (ord("9"), ord('"'), content[position] ^ 0x81):
            file.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
            here, there = seen_here(file), seen_by_safetensors(file)
            if there is None and here is not None:  # only what a newer version might take
                assert any(dtype not in ("F32", "BF16", "I64", "BOOL") for dtype, _ in here.values()), (position, value)
            else:
                assert here == there, (position, value)


HEADERS: dict[str, dict[str, Any] | list[Any] | bytes] = {
    "no tensors": {},
    "metadata alone": {"__metadata__": {"a": "b"}},
    "metadata null": {"__metadata__": None, "a": ENTRY},
    "metadata with numbers": {"__metadata__": {"a": 1}, "a": ENTRY},
    "a list": [ENTRY],
    "a text": b'"a"',
    "key beside": {"a": ENTRY | {"more": 1}},
    "key twice": b'{"a":%b,"a":%b}' % ((json.dumps(ENTRY).encode(),) * 2),
    "spaces around": b'  {"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  ',
    "zero at the end": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}\0',
    "NaN": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":NaN}}',
    "not UTF-8": b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "byte order mark": b'\xef\xbb\xbf{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "UTF-16": json.dumps({"a": ENTRY}).encode("utf-16"),
    "deep": b"[" * 100_000,
    "hole": {"a": ENTRY | {"shape": [1], "data_offsets": [4, 8]}},
    "overlap": {"a": ENTRY, "b": ENTRY},
    "empty in between": {"a": ENTRY, "b": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}},
    "empty in a tensor": {"a": ENTRY, "b": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}},
    "backwards": {"a": ENTRY | {"data_offsets": [8, 0]}},
    "three offsets": {"a": ENTRY | {"data_offsets": [0, 8, 8]}},
    "beyond the end": {"a": ENTRY | {"shape": [3], "data_offsets": [0, 12]}},
    "less than there is": {"a": ENTRY | {"shape": [1], "data_offsets": [0, 4]}},
    "another size": {"a": ENTRY | {"shape": [3]}},
    "negative": {"a": ENTRY | {"shape": [-2]}},
    "fraction": {"a": ENTRY | {"shape": [2.0]}},
    "true": {"a": ENTRY | {"shape": [True, 2]}},
    "huge": {"a": ENTRY | {"shape": [1 << 40, 1 << 40]}},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
    "number for a dtype": {"a": ENTRY | {"dtype": 32}},
    "half bytes": {"a": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}},
    "eight bits of a float": {"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_headers_that_are_odd_are_taken_as_safetensors_takes_them(
    header: dict[str, Any] | bytes, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file, header, b"\0" * 8)
    assert seen_here(file) == seen_by_safetensors(file)


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 100_000_001, 1 << 63])
def test_a_header_of_another_length_is_refused(length: int, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", length) + content[8:])
    assert seen_here(file) is None
    assert seen_by_safetensors(file) is None


def test_a_web_page_in_place_of_a_file_is_shown(file: Path) -> None:
    file.write_text("<!DOCTYPE html><html><body>Not found</body></html>")
    with pytest.raises(ModelError, match="it begins with b'<!DOCTYPE html>"):
        read_header(file)


def test_weights_are_not_read(tmp_path: Path) -> None:
    """They would not fit in memory: 8 TiB in a sparse file."""
    file, size = tmp_path / "model.safetensors", 1 << 43
    write_file(file, {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, b"")
    with file.open("r+b") as stream:
        stream.truncate(stream.seek(0, 2) + size)
    assert read_header(file)["a"].shape == (size,)


def test_weights_have_another_name_once_a_file_that_kv_depends_on_changes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = file.parent
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    name = weights_identity(folder, {})
    assert len(name) == 32
    (folder / "tokenizer.json").write_text("{ }")
    (folder / "README.md").write_text("notes")
    assert weights_identity(folder, {}) == name
    os.utime(file)  # as on another node
    assert weights_identity(folder, {}) == name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    changed = weights_identity(folder, {})
    (folder / "modeling.py").write_text("")
    assert len({name, changed, weights_identity(folder, {})}) == 3
    (folder / "config.json").unlink()
    assert weights_identity(folder, {}) != weights_identity(folder, {})
    (folder / "config.json").write_text("{}")
    file.write_bytes(bytes(100 * 4096))
    monkeypatch.setattr(files, "SAMPLES", 10)  # so that large files have pages that are not read
    name = weights_identity(folder, {})
    file.write_bytes(bytes(49 * 4096) + b"a layer" * 6000 + bytes(51 * 4096 - 42000))
    assert weights_identity(folder, {}) != name
