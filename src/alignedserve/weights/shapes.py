"""Checks that the tensors of a checkpoint match its config.json, for the model types in `names.py`.

Transformers would refuse the same checkpoints when it loads the weights, in each worker, after Ray has started. Only
integers in place of weights are refused here alone. If a value is missing in config.json, and the source of
transformers shows no default, the sizes that depend on it are not checked. Additional tensors are ignored.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alignedserve.errors import ModelError, UnsupportedModelError
from alignedserve.transformers_source import ConfigSource, config_source
from alignedserve.weights.files import Tensor
from alignedserve.weights.names import FAMILIES, Family, Shapes

# Names that differ between transformers 5 and the checkpoints that it writes by default.
_RENAMED = {".block_sparse_moe.": ".mlp.", "embed_out.weight": "lm_head.weight"}
_OF_A_LAYER = re.compile(r"(?:^|\.)((?:layers|h)\.(\d+)\..+)$")
_TERM = re.compile(r"(\d*)([A-Z]?)")
_NO_WEIGHTS = frozenset(("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "C64"))
_KEYS = {
    "V": "vocab_size",
    "P": "max_position_embeddings",
    "H": "hidden_size",
    "D": "head_dim",
    "N": "num_attention_heads",
    "E": "num_local_experts",
    "W": "word_embed_proj_dim",
}
_EXPERTS = (_KEYS["E"], "num_experts", "n_routed_experts", "moe_num_experts")
_WRAPPERS = {"module.": "torch's DataParallel", "_orig_mod.": "torch.compile", "base_model.model.": "peft"}
_WITH_IMAGES = dict.fromkeys(("language_model.", "model.language_model."), "a model with images")
_COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SHOWN = 3
_REPAIR = "weights and config.json are of different models, or one of them was edited: copy or download both again"

Sizes = Mapping[str, int | None]


class _Unknown:
    """Stands for a value that config.json leaves out and that has no known default."""


class _Values:
    """The values of config.json, with the defaults of its configuration class."""

    def __init__(self, raw: Mapping[str, Any], source: ConfigSource | None) -> None:
        self._raw = raw
        self._source = source
        aliases = source.aliases if source else {}
        self._names = {name: {name, alias} for alias, name in aliases.items()} | {
            alias: {name, alias} for alias, name in aliases.items()
        }

    def get(self, key: str) -> Any:
        names = self._names.get(key, {key})
        if given := [self._raw[name] for name in names if name in self._raw]:
            return given[0] if all(value == given[0] for value in given) else _Unknown
        if self._source is None:
            return _Unknown
        if default := [self._source.defaults[name] for name in names if name in self._source.defaults]:
            return default[0]
        return None if self._source.complete and not names & self._source.fields else _Unknown

    def size(self, key: str, absent: int | None = None) -> int | None:
        """A whole number above 0; `absent` if the key has no value; None if the value is unknown."""
        value = self.get(key)
        if value is None:
            return absent
        return value if type(value) is int and value > 0 else None


def model_types(config: Mapping[str, Any]) -> set[str]:
    """The model types of config.json: its own, and that of the language model within it."""
    return {str(each["model_type"]) for each in (config, _language_model(config)) if each.get("model_type")}


def head_counts(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Query heads and KV heads by config.json; None if they are not known without transformers."""
    values = _values_of(config)
    heads = values.size("num_attention_heads")
    kv_heads = values.size("num_key_value_heads", absent=heads)
    return None if heads is None or kv_heads is None else (heads, kv_heads)


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Layers by config.json; None if they are not known without transformers."""
    return _values_of(config).size("num_hidden_layers")


def expert_count(config: Mapping[str, Any]) -> int | None:
    """Experts by config.json; 0 for a model without any, None if they are not known without transformers."""
    values = _values_of(config)
    counts = [values.size(key, absent=0) for key in _EXPERTS]
    return next(filter(None, counts), None if None in counts else 0)


def _values_of(config: Mapping[str, Any]) -> _Values:
    """Without defaults if code that comes with the checkpoint reads it."""
    text = _language_model(config)
    known = "auto_map" not in config and isinstance(text.get("model_type"), str)
    return _Values(text, config_source(text["model_type"]) if known else None)


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def check_shapes(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises ModelError if a tensor is missing or its shape differs from the configuration.

    Raises UnsupportedModelError if weights are not floating-point numbers. Models that are not in FAMILIES are not
    checked.
    """
    text = _text_config(config)
    family = FAMILIES.get(str(text.get("model_type")))
    if family is None or (
        text["model_type"] == "mistral" and "layer_types" in text
    ):  # transformers reads it as another model type then
        return
    _check_names(folder, tensors, family, _WRAPPERS if text is not config else _WRAPPERS | _WITH_IMAGES)
    values = _Values(text, config_source(text["model_type"]))
    stored, sizes = _by_key(tensors), _sizes(family, values)
    _check_sizes(folder, family, values)
    _check_layers(folder, family, values, stored)
    missing, wrong = [], []
    for key, dims in _expected(family, values, stored, nested=text is not config):
        shape, found = _shape(dims, sizes), stored.get(key, [])
        fitting = [tensor for tensor in found if _fits(tensor.shape, shape)]
        if not found:
            missing.append(key)
        elif not fitting:
            wrong.append(_wrong(key, found[0], dims, shape, values))
        elif all(tensor.dtype in _NO_WEIGHTS for tensor in fitting):
            raise UnsupportedModelError(
                f"{fitting[0].file}: {key} is stored as {fitting[0].dtype}, not as floating-point weights: a quantised "
                "model is not supported; convert it to float32, float16 or bfloat16"
            )
    if wrong:
        raise _contradiction(folder, f"{_some(wrong, '; ')}")
    if missing:
        raise _contradiction(folder, f"the weights lack {_count(len(missing), 'tensor')}: {_some(missing, ', ')}")


def _contradiction(folder: Path, what: str) -> ModelError:
    return ModelError(f"{folder / 'config.json'} contradicts the weights in its folder: {what}; {_REPAIR}")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model; in Gemma 3 with images it is nested."""
    return _language_model(config) if config["model_type"] == "gemma3" else config


def _check_names(folder: Path, tensors: Mapping[str, Tensor], family: Family, wrappers: Mapping[str, str]) -> None:
    if not tensors:
        raise ModelError(f"the weights of {folder} hold no tensors; copy or download them again")
    names = [name for name in tensors if name not in family.head]
    for prefix, wrapper in wrappers.items():
        if names and all(name.startswith(prefix) for name in names):
            raise ModelError(
                f"the weights of {folder} are named {prefix}..., as {wrapper} names the weights of a wrapped model: "
                "save the wrapped model itself"
            )


def _by_key(tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Tensors by name without prefix: `layers.N.` and what follows, or the last two parts."""
    stored: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors.items():
        found = _OF_A_LAYER.search(name)
        key = found[1] if found else ".".join(name.split(".")[-2:])
        for other, usual in _RENAMED.items():
            key = key.replace(other, usual)
        stored[key].append(tensor)
    return stored


def _check_sizes(folder: Path, family: Family, values: _Values) -> None:
    for key in _COUNTS if family.mlps else (*_COUNTS, family.width):  # with experts the MLP width may be unused
        value = values.get(key)
        if type(value) is int and value < 1:
            raise ModelError(f"{folder / 'config.json'}: {key} must be at least 1, not {value}; correct it")
    hidden, heads = values.size("hidden_size"), values.size("num_attention_heads")
    if family.equal_heads and hidden and heads and hidden % heads:
        raise ModelError(
            f"{folder / 'config.json'}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
            "correct it, or copy or download it again"
        )


def _check_layers(folder: Path, family: Family, values: _Values, stored: Mapping[str, Any]) -> None:
    found = {int(parts[1]) for key in stored if (parts := key.split("."))[0] == family.layers and parts[1].isdigit()}
    wanted = values.size("num_hidden_layers")
    if wanted and found and max(found) + 1 < wanted:
        raise _contradiction(folder, f"it has {wanted} layers (num_hidden_layers), the weights have {max(found) + 1}")


def _expected(family: Family, values: _Values, stored: Mapping[str, Any], *, nested: bool) -> Iterator[tuple[str, str]]:
    """Name and shape letters of each tensor that the checkpoint must contain."""
    tied = nested or values.get("tie_word_embeddings") is not False
    for key, dims in family.top.items():
        if tied and key == family.embedding and key not in stored and next(iter(family.head)) in stored:
            continue  # tied weights may be stored as the head only
        yield key, dims
    yield from ((key, dims) for key, dims in family.head.items() if not tied or key.endswith(".bias"))
    layer = dict(family.layer)
    for flag, shapes in family.flagged.items():
        if values.get(flag) is True:
            layer.update(shapes)
    for number in range(values.size("num_hidden_layers") or 0):
        prefix = f"{family.layers}.{number}."
        yield from ((prefix + name, dims) for name, dims in layer.items())
        yield from _mlp(family, values, stored, prefix)


def _mlp(family: Family, values: _Values, stored: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """The tensors of the MLP alternative that matches the checkpoint best."""
    experts = values.size(_KEYS["E"]) or 0
    ways = [list(_each_expert(shapes, experts, prefix)) for shapes in family.mlps]
    if ways:
        yield from max(ways, key=lambda way: sum(key in stored for key, _ in way) / len(way))


def _each_expert(shapes: Shapes, experts: int, prefix: str) -> Iterator[tuple[str, str]]:
    for name, dims in shapes.items():
        numbers: Sequence[int] = range(experts) if "{}" in name else (0,)
        yield from ((prefix + name.replace("{}", str(number)), dims) for number in numbers)


def _sizes(family: Family, values: _Values) -> Sizes:
    """The size for each letter; None if it is unknown."""
    sizes: dict[str, int | None] = {letter: values.size(key) for letter, key in _KEYS.items()}
    hidden, heads = sizes["H"], sizes["N"]
    head_dim = values.size("head_dim", absent=hidden // heads if hidden and heads else None)
    kv_heads = values.size("num_key_value_heads", absent=heads)
    return sizes | {
        "D": head_dim,
        "W": values.size("word_embed_proj_dim", absent=hidden),
        "Q": heads * head_dim if heads and head_dim else None,
        "K": kv_heads * head_dim if kv_heads and head_dim else None,
        "I": values.size(family.width, absent=4 * hidden if hidden and family.width == "n_inner" else None),
        "X": values.size(family.expert_width),
    }


def _shape(dims: str, sizes: Sizes) -> tuple[int | None, ...]:
    return tuple(_sum(dim, sizes) for dim in dims.split())


def _sum(terms: str, sizes: Sizes) -> int | None:
    total = 0
    for term in terms.split("+"):
        parts = _TERM.fullmatch(term)
        assert parts is not None, terms
        size = sizes[parts[2]] if parts[2] else 1
        if size is None:
            return None
        total += int(parts[1] or 1) * size
    return total


def _fits(shape: Sequence[int], sizes: Sequence[int | None]) -> bool:
    return len(shape) == len(sizes) and all(size in (None, found) for found, size in zip(shape, sizes, strict=True))


def _wrong(key: str, tensor: Tensor, dims: str, shape: Sequence[int | None], values: _Values) -> str:
    asked = ", ".join("any" if size is None else str(size) for size in shape)
    letters = sorted(set(re.findall("[A-Z]", dims)))
    because = [f"{_KEYS[letter]} {values.get(_KEYS[letter])}" for letter in letters if letter in "VPHEN"]
    reason = f" ({', '.join(because)})" if because else ""
    return f"{key} in {tensor.file.name} is {list(tensor.shape)}, but the configuration asks for [{asked}]{reason}"


def _some(what: Sequence[str], between: str) -> str:
    more = f"{between}and {len(what) - _SHOWN} more" if len(what) > _SHOWN else ""
    return between.join(what[:_SHOWN]) + more


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
