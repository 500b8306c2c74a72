"""The bytes of a single token, for decoders that work token by token.

Two families cover nearly every model: byte-level BPE (GPT-2, Llama 3, Qwen), whose vocabulary spells bytes as printable
characters, and SentencePiece with byte fallback (Llama 2, Mistral, Gemma), whose tokens are text with a mark for the
space, and `<0xNN>` for single bytes. For other decoders there is no such rule: see `IncrementalDetokenizer`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_alphabet()
_SPELLED = {byte: character for character, byte in _ALPHABET.items()}
BYTE_CHARACTERS = _ALPHABET.keys()


def spelled_in_bytes(text: str) -> str:
    """The spelling of a text in a byte-level vocabulary."""
    return "".join(_SPELLED[byte] for byte in text.encode())


@dataclass(frozen=True, slots=True)
class PieceRules:
    """How a token's spelling becomes bytes. `strip_left`: number of spaces removed at the start of a text."""

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    strip_left: int = 0

    def piece(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_ALPHABET[character] for character in token])
            except KeyError:  # an added token, which is spelled as itself
                return token.encode()
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def rules_of(decoder: Any) -> PieceRules | None:
    """The rules of a `tokenizers` decoder, or None if tokens cannot be decoded one by one."""
    if decoder is None:
        return None
    return _rules_of_state(json.loads(decoder.__getstate__()))


def _rules_of_state(state: dict[str, Any]) -> PieceRules | None:
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return PieceRules(byte_level=True)
    if "ByteFallback" not in kinds:
        return None
    replacements: list[tuple[str, str]] = []
    strip_left = 0
    for step in steps:
        match step["type"]:
            case "Replace" if "String" in step["pattern"] and not strip_left:
                replacements.append((step["pattern"]["String"], step["content"]))
            case "Strip" if step["content"] == " " and not step["stop"]:
                strip_left += step["start"]
            case "ByteFallback" | "Fuse":
                pass
            case _:
                return None
    return PieceRules(byte_level=False, replacements=tuple(replacements), strip_left=strip_left)
