"""Ways in which a model folder breaks in practice: `BROKEN[kind](folder)` breaks a good one.

The folder comes from `make_model("llama", folder, max_shard_size=SHARD)`: several shards and their index.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARD = "200KB"
INDEX = "model.safetensors.index.json"
LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 4920916\n"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the bytes after it."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_file(file: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header, data = read_header(file)
    change(header)
    write_file(file, header, data)


def edit_json(file: Path, **values: Any) -> None:
    """Set keys of a JSON object; None removes a key."""
    raw = json.loads(file.read_text())
    raw.update(values)
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def config_of(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


def tensors_of(header: dict[str, Any]) -> list[str]:
    return sorted(name for name in header if name != "__metadata__")


def remove_tensor(folder: Path, name: str) -> None:
    """Remove a tensor from its shard, which stays a valid file, but not from the index."""
    for file in shards(folder):
        header, data = read_header(file)
        if name in header:
            begin, end = header.pop(name)["data_offsets"]
            for entry in (header[other] for other in tensors_of(header)):
                if entry["data_offsets"][0] >= end:
                    entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]
            write_file(file, header, data[:begin] + data[end:])


def _cut(folder: Path, size: Callable[[int], int]) -> None:
    content = shards(folder)[-1].read_bytes()
    shards(folder)[-1].write_bytes(content[: size(len(content))])


def _overlap(header: dict[str, Any]) -> None:
    names = sorted(tensors_of(header), key=lambda name: header[name]["data_offsets"][0])
    for name in names[1:]:
        begin, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = [begin - 4, end - 4]


def _other_dtype(folder: Path) -> None:
    for file in shards(folder):
        edit_header(file, lambda header: [header[name].update(dtype="I32") for name in tensors_of(header)])


def _pickled(folder: Path) -> None:
    for file in shards(folder):
        file.rename(file.with_name(file.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")))
    (folder / INDEX).unlink()


BROKEN: dict[str, Callable[[Path], object]] = {
    "truncated shard": lambda folder: _cut(folder, lambda size: size // 2),
    "shard one byte short": lambda folder: _cut(folder, lambda size: size - 1),
    "empty shard": lambda folder: shards(folder)[0].write_bytes(b""),
    "missing shard": lambda folder: shards(folder)[1].unlink(),
    "git-lfs pointer": lambda folder: shards(folder)[0].write_text(LFS_POINTER),
    "header without end": lambda folder: shards(folder)[0].write_bytes(b"\xff" * 4096),
    "header that is no JSON": lambda folder: write_file(shards(folder)[0], b"{" * 64, b""),
    "overlapping tensors": lambda folder: edit_header(shards(folder)[0], _overlap),
    "bytes after the last tensor": lambda folder: shards(folder)[0].open("ab").write(b"\0" * 64),
    "tensor missing": lambda folder: remove_tensor(folder, "model.layers.1.mlp.up_proj.weight"),
    "integers as weights": _other_dtype,
    "other vocabulary": lambda folder: edit_json(folder / "config.json", vocab_size=520),
    "other hidden size": lambda folder: edit_json(folder / "config.json", hidden_size=128),
    "one layer more": lambda folder: edit_json(folder / "config.json", num_hidden_layers=4),
    "text for a number": lambda folder: edit_json(folder / "config.json", hidden_size="64"),
    "unknown model_type": lambda folder: edit_json(folder / "config.json", model_type="llama99"),
    "no language model": lambda folder: edit_json(folder / "config.json", model_type="clip"),
    "no model_type": lambda folder: edit_json(folder / "config.json", model_type=None),
    "quantised": lambda folder: edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"}),
    "config that is no JSON": lambda folder: (folder / "config.json").write_text('{"model_type": "llama",'),
    "pickled weights": _pickled,
}
