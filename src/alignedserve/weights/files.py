"""Reads the headers of a model folder's safetensors files. It reads no weights, and needs no library.

It refuses the headers that `safetensors` would refuse later, in the workers, after Ray has started: the file must end
with the last tensor's last byte, and tensors must be contiguous. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from alignedserve.errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
AGAIN = "copy or download it again"

SAMPLES = 4096
"""Pages that are read of a model's files to tell it from another: of 16 MiB or less all."""

_PAGE_BYTES = 4096
_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_SHOWN = 5  # names in a message
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}  # the size of a type that is not in this table is checked by the workers


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """The files that transformers would load. They may be missing, and the folder may contain copies in other formats.

    Raises ModelError if there are no weights or the index is broken.
    """
    named = config.get("transformers_weights")
    if isinstance(named, str) and not named.endswith(".index.json"):
        return [folder / named]
    if not isinstance(named, str) and is_there(folder / WEIGHTS):
        return [folder / WEIGHTS]
    index = folder / (named if isinstance(named, str) else INDEX)
    if not is_there(index):
        raise ModelError(_no_weights(folder))
    return [folder / name for name in sorted(set(_weight_map(index).values()))]


def weights_identity(folder: Path, config: Mapping[str, Any]) -> str:
    """A name of the model's weights, configuration and code, 32 characters: the same on each node.

    Of the sizes of their files and of SAMPLES pages at equal distances. Files that cannot be read have a new name each
    time: KV of their model cannot be recognised. Raises like `weight_files`.
    """
    files = [*weight_files(folder, config), folder / "config.json", *sorted(folder.glob("*.py"))]
    found = hashlib.blake2b(digest_size=16)
    try:
        sizes = [file.stat().st_size for file in files]
        step = max(_PAGE_BYTES, sum(sizes) // SAMPLES)
        for file, size in zip(files, sizes, strict=True):
            found.update(f"{file.name} {size}\n".encode())
            with file.open("rb", buffering=0) as stream:
                for at in range(0, size, step):
                    stream.seek(at)
                    found.update(stream.read(_PAGE_BYTES))
    except OSError:
        return secrets.token_hex(16)
    return found.hexdigest()


def read_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of the files. Raises ModelError for a file that is missing, truncated or not a safetensors file."""
    files = list(files)
    if missing := [file for file in files if not is_there(file)]:
        names = ", ".join(file.name for file in missing[:_SHOWN])
        more = " ..." if len(missing) > _SHOWN else ""
        raise ModelError(
            f"{missing[0].parent} lacks {len(missing)} of {len(files)} weight files: {names}{more}; copy or download "
            f"them{_dangling(missing[0])}"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(read_header(file))
    return tensors


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one file. Raises ModelError if safetensors could not read it."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            begin = stream.read(64)
            header_bytes = _header_bytes(file, begin, size)
            stream.seek(_PREFIX_BYTES)
            text = stream.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{file} is not a readable safetensors file: its header is not JSON ({error}); {AGAIN}"
        ) from error
    data_bytes = size - _PREFIX_BYTES - header_bytes
    return _tensors(file, header, data_bytes)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError if the file has other content, or cannot be read."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    _refuse_pointer(file, content)
    try:
        found = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: it is not JSON ({error}); {AGAIN}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} is not a JSON object; {AGAIN}")
    return found


def _refuse_pointer(file: Path, begin: bytes) -> None:
    """Raises ModelError if the file is a git-lfs pointer instead of the file itself."""
    if begin.startswith(LFS_POINTER):
        raise ModelError(
            f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull` in {file.parent}, or download it"
        )


def is_pointer(file: Path) -> bool:
    """Whether the file is a git-lfs pointer; False if it is missing or cannot be read."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def is_there(file: Path) -> bool:
    """Whether it is a regular file. Links are followed; a folder or a pipe is not a file."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except OSError:
        return False


def _dangling(file: Path) -> str:
    return f" ({file.name} is a link to {os.readlink(file)}, which does not exist)" if file.is_symlink() else ""


def _no_weights(folder: Path) -> str:
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if any("-of-" in name for name in found):
        return f"{folder} has {len(found)} *.safetensors, but no {INDEX} that lists their tensors: copy or download it"
    if found:
        return (
            f"{folder} has neither {WEIGHTS} nor {INDEX}, only {', '.join(found[:_SHOWN])}: give a folder as "
            "transformers' save_pretrained writes it"
        )
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
    hint = "; pickled weights are not loaded, convert them to safetensors" if pickled else _dangling(folder / WEIGHTS)
    return f"{folder} has no *.safetensors weights{hint}"


def _weight_map(index: Path) -> Mapping[str, str]:
    raw = read_json(index)
    found = raw.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) and name for name in found.values()):
        raise ModelError(f"{index} has no weight_map of tensors to files; {AGAIN}")
    if not isinstance(raw.get("metadata"), dict):
        raise ModelError(f'{index} has no object "metadata", which transformers requires (it may be empty: {{}})')
    return found


def _header_bytes(file: Path, begin: bytes, size: int) -> int:
    """Length of the header in bytes. Raises ModelError if the beginning shows that the file is invalid."""
    _refuse_pointer(file, begin)
    if not size:
        raise ModelError(f"{file} is empty; {AGAIN}")
    length = int.from_bytes(begin[:_PREFIX_BYTES], "little")
    if size < _PREFIX_BYTES or length > _MAX_HEADER_BYTES:
        raise ModelError(f"{file} is not a readable safetensors file: it begins with {begin[:16]!r}; {AGAIN}")
    if length > size - _PREFIX_BYTES:
        raise ModelError(
            f"{file} is not a readable safetensors file: its header would have {length} bytes, but the file has only "
            f"{size}; {AGAIN}"
        )
    return length


def _tensors(file: Path, header: Any, data_bytes: int) -> dict[str, Tensor]:
    """The header's entries, checked against each other and the bytes that follow it."""
    if not isinstance(header, dict):
        raise ModelError(f"{file} is not a readable safetensors file: its header is not a JSON object; {AGAIN}")
    _check_metadata(file, header.pop("__metadata__", None))
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        begin, end, tensors[name] = _entry(file, name, entry)
        spans.append((begin, end, name))
    at = max((end for _, end, _ in spans), default=0)
    if at != data_bytes:
        wrong = "is truncated" if at > data_bytes else "has more data than its header describes"
        raise ModelError(
            f"{file} {wrong}: it has {data_bytes} bytes of weights, but its header describes {at}; {AGAIN}"
        )
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            _refuse_entry(file, name, f"begins at byte {begin}, but the previous tensor ends at {at}")
        at = end
    return tensors


def _entry(file: Path, name: str, entry: Any) -> tuple[int, int, Tensor]:
    """Begin and end of a tensor in bytes after the header, and the tensor."""
    if not isinstance(entry, dict):
        _refuse_entry(file, name, "has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        _refuse_entry(file, name, f"has dtype {dtype!r}, shape {shape!r} and data_offsets {offsets!r}")
    begin, end = offsets
    bits = _BITS.get(dtype)
    if end < begin or (bits is not None and (end - begin) * 8 != math.prod(shape) * bits):
        _refuse_entry(file, name, f"is {dtype} {shape}, but occupies the bytes from {begin} to {end}")
    return begin, end, Tensor(file, dtype, tuple(shape))


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_metadata(file: Path, metadata: Any) -> None:
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ModelError(f"{file} is not a readable safetensors file: its __metadata__ has values that are not strings")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _refuse_entry(file: Path, name: str, reason: str) -> NoReturn:
    raise ModelError(f"{file} is not a readable safetensors file: its header is wrong, {name!r} {reason}; {AGAIN}")
