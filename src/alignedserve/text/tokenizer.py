"""A model's tokenizer, based on `tokenizers` only, without torch or transformers in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignedserve.errors import ModelError
from alignedserve.text.conversion import converted_tokenizer_file
from alignedserve.text.pieces import PieceRules, rules_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Converts text to token ids and back, as `transformers` does for the same folder.

    `special_tokens` maps names ("bos_token", …) to their text; `special_ids` are the tokens that have no text.
    """

    def __init__(self, backend: Backend, config: dict[str, Any]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = _special_tokens(config)
        _add_tokens(backend, config, self.special_tokens)
        _set_post_processor(backend, config, self.special_tokens)
        added = backend.get_added_tokens_decoder()
        named = (backend.token_to_id(text) for text in self.special_tokens.values())
        self.special_ids = frozenset(
            {token for token, entry in added.items() if entry.special} | {token for token in named if token is not None}
        )
        self.piece_rules: PieceRules | None = rules_of(backend.decoder)
        self.piece = lru_cache(maxsize=1 << 16)(self._piece)
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer | None:
        """The tokenizer of a model folder, or None if it has none.

        Older formats are converted once, by transformers in a separate process. Raises ModelError, which names the
        file, if a tokenizer cannot be read.
        """
        folder = Path(path)
        own = folder / "tokenizer.json"
        file = own if own.is_file() else converted_tokenizer_file(folder)
        if file is None:
            return None
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
        return cls(backend, read_tokenizer_config(folder))

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids; `special_tokens` adds the tokens of the model's post-processor (usually a BOS).

        Spellings of special tokens become these tokens; use `PromptEncoder` for users' text. Other threads can run
        meanwhile.
        """
        (encoded,) = self.backend.encode_batch([text], add_special_tokens=special_tokens)  # `encode` keeps the GIL
        return encoded.ids

    def encode_each(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of each text, as `encode` finds them, without special tokens around it."""
        return [tuple(encoded.ids) for encoded in self.backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of all tokens together; `skip_special`: without special tokens."""
        shown = [token for token in tokens if token not in self.special_ids] if skip_special else list(tokens)
        return self.backend.decode(shown, skip_special_tokens=False)

    def _piece(self, token: int) -> bytes:
        """The bytes of one token by itself; b"" for an id without a token."""
        spelling = self.backend.id_to_token(token)
        if spelling is None:
            return b""
        if token in self.special_ids or self.piece_rules is None:
            return spelling.encode()
        return self.piece_rules.piece(spelling)

    def _token_text(self, token: int) -> str:
        """One token as text; OpenAI's `bytes:\\xe2\\x82` if its bytes are not complete characters."""
        piece = self.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, or {} if it is missing. Raises ModelError if it is broken."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return config


def _content(value: Any) -> str | None:
    """A token's text: a plain string, or the object that transformers writes for an AddedToken."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    return {name: text for name in _SPECIAL_NAMES if (text := _content(config.get(name))) is not None}


def _add_tokens(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json declares, or that only it declares as special."""
    from tokenizers import AddedToken

    known = {entry.content: entry.special for entry in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        for _, entry in sorted(declared.items(), key=lambda item: int(item[0]) if item[0].isdigit() else 0):
            if isinstance(entry, dict) and (text := _content(entry)) is not None and text not in known:
                flags = {flag: bool(entry.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
                backend.add_tokens([AddedToken(text, special=bool(entry.get("special")), **flags)])
                known[text] = bool(entry.get("special"))
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    extra_texts = [_content(entry) for entry in extra] if isinstance(extra, list) else []
    for special in [*named.values(), *extra_texts]:
        if special is not None and not known.get(special, False) and backend.token_to_id(special) is not None:
            backend.add_special_tokens([AddedToken(special, special=True, normalized=False)])


def _set_post_processor(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """`add_bos_token` and `add_eos_token` of tokenizer_config.json override tokenizer.json, as in transformers."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    from tokenizers.processors import TemplateProcessing

    specials: list[tuple[str, int]] = []
    template = "$A:0"
    for flag, name, shape in (("add_bos_token", "bos_token", "{0}:0 {1}"), ("add_eos_token", "eos_token", "{1} {0}:0")):
        text = named.get(name)
        token = backend.token_to_id(text) if text is not None else None
        if config.get(flag) and text is not None and token is not None:
            template = shape.format(text, template)
            specials.append((text, token))
    backend.post_processor = TemplateProcessing(single=template, pair=None, special_tokens=specials)
