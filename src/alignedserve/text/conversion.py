"""Converts tokenizers of older formats to `tokenizer.json`, once, with transformers in a separate process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from alignedserve.errors import ModelError

_OLD_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt")
_TIMEOUT_S = 120.0
_SCRIPT = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
backend = getattr(tokenizer, "backend_tokenizer", None)
if backend is None:
    sys.exit("transformers has no fast tokenizer for it")
backend.save(sys.argv[2])
"""


def converted_tokenizer_file(folder: Path) -> Path | None:
    """The `tokenizer.json` converted from a folder's older files, in the user's cache; None if it has no such files.

    Raises ModelError, with a solution, if transformers cannot convert them.
    """
    found = [folder / name for name in _OLD_FILES if (folder / name).is_file()]
    if not found:
        return None
    digest = hashlib.sha256(str(folder.resolve()).encode())
    for file in found:
        stat = file.stat()
        digest.update(f"{file.name}|{stat.st_size}|{stat.st_mtime_ns}".encode())
    target = _cache_folder() / f"{digest.hexdigest()[:24]}.json"
    if not target.is_file():
        _convert(folder, target, found)
    return target


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "alignedserve" / "tokenizers"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:  # no home, or a read-only one
        folder = Path(tempfile.gettempdir()) / f"alignedserve-{os.getuid()}"
        folder.mkdir(exist_ok=True, mode=0o700)
        if folder.stat().st_uid != os.getuid():
            raise ModelError(f"{folder} belongs to another user; set XDG_CACHE_HOME to a folder of your own") from None
    return folder


def _convert(folder: Path, target: Path, found: list[Path]) -> None:
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    names = ", ".join(file.name for file in found)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(folder), str(draft)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"transformers took more than {_TIMEOUT_S:g} s"
    else:
        if done.returncode == 0 and draft.is_file():
            draft.replace(target)
            return
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    draft.unlink(missing_ok=True)
    raise ModelError(
        f"{folder} has no tokenizer.json, and its {names} cannot be converted to one: {reason}; "
        "save it with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
    )
