"""Which part of each parameter a rank holds, by transformers' own plan (`base_model_tp_plan`) or ours.

Columns of a product's output are cut by whole heads or by units of the MLP, rows of the next product's input likewise,
units and vocabularies into equal parts, the last filled up with zeros. A KV head of which there are fewer than ranks is
held by several. Packed products (queries, keys and values in one; gate and up in one) are cut part by part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import PretrainedConfig

from alignedserve.errors import UnsupportedModelError
from alignedserve.geometry import require_degree
from alignedserve.model import ModelInfo
from alignedserve.ranks.plans import ATTENTION, OWN_PLANS, require_packing

_MULTIPLE = 8  # elements of 2 bytes
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Style(Enum):
    WHOLE = "whole"
    COLUMNS = "columns"  # of the output
    ROWS = "rows"  # of the input: results are summed
    VOCABULARY = "vocabulary"


_STYLES = {
    "colwise": Style.COLUMNS,
    "colwise_gather_output": Style.COLUMNS,
    "colwise_rep": Style.COLUMNS,
    "packed_colwise": Style.COLUMNS,
    "rowwise": Style.ROWS,
    "rowwise_split_input": Style.ROWS,
    "rowwise_rep": Style.ROWS,
    "packed_rowwise": Style.ROWS,
    "moe_tp_experts": Style.ROWS,
    "replicated_with_grad_allreduce": Style.WHOLE,
    "replicate": Style.WHOLE,
    "local_params": Style.WHOLE,
}


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a parameter that a rank holds: `ranges` along `dim`, each filled up with zeros; all have `size`.

    `dim` None: all of it. `zero`: zeros of its shape, since another rank adds it.
    """

    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    size: int = 0
    zero: bool = False

    def shape(self, whole: torch.Size) -> torch.Size:
        if self.dim is None:
            return whole
        return torch.Size((*whole[: self.dim], self.size, *whole[self.dim + 1 :]))

    def of(self, tensor: Any) -> torch.Tensor:
        """The part of a tensor, or of a slice of a safetensors file."""
        if self.dim is None:
            whole: torch.Tensor = tensor[...]
            return torch.zeros_like(whole) if self.zero else whole
        before = (slice(None),) * self.dim
        missing = (self.size - sum(end - begin for begin, end in self.ranges)) // len(self.ranges)
        parts = []
        for begin, end in self.ranges:
            parts.append(tensor[(*before, slice(begin, end))])
            if missing:
                own = parts[-1]
                parts.append(own.new_zeros((*own.shape[: self.dim], missing, *own.shape[self.dim + 1 :])))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class Ranks:
    """The share of one of `size` ranks in a model's heads, units and vocabulary."""

    info: ModelInfo
    rank: int
    size: int

    @property
    def heads(self) -> int:
        return self.info.heads // self.size

    @property
    def head_begin(self) -> int:
        return self.rank * self.heads

    @property
    def kv_heads(self) -> int:
        return max(1, self.info.kv_heads // self.size)

    @property
    def kv_begin(self) -> int:
        return self.rank * self.info.kv_heads // self.size

    @property
    def kv_range(self) -> tuple[int, int]:
        """The first KV head, and the one after the last."""
        return self.kv_begin, self.kv_begin + self.kv_heads

    @property
    def vocabulary(self) -> int:
        """Rows of the vocabulary of each rank; the last ranks have fewer of their own."""
        return self.share(self.info.vocab_size)[1]

    def require(self) -> None:
        """Raises ConfigError unless heads can be shared out."""
        require_degree(self.info.name, self.info.heads, self.info.kv_heads, self.size)

    def share(self, whole: int) -> tuple[tuple[int, int], int]:
        """The range of this rank in `whole` units, and the units of each rank: the last ranks may have fewer.

        Products of experts need rows of whole 16 bytes.
        """
        size = -(-whole // self.size)
        rounded = -(-size // _MULTIPLE) * _MULTIPLE
        if rounded * (self.size - 1) < whole:  # else a rank would have none
            size = rounded
        begin = min(self.rank * size, whole)
        return (begin, min(begin + size, whole)), size


class Plan:
    """The styles of a model's modules and parameters."""

    def __init__(self, config: PretrainedConfig, prefix: str, size: int) -> None:
        """`prefix`: of the base model's names. `size`: ranks that share each layer; one needs no plan.

        Raises UnsupportedModelError if there is no plan, or one with unknown words.
        """
        if size == 1:
            self._styles: dict[str, Style] = {}
            return
        require_packing(config.model_type, getattr(config, "multi_query", None))
        plan = OWN_PLANS.get(config.model_type) or getattr(config, "base_model_tp_plan", None)
        if not plan:
            raise UnsupportedModelError(f"model_type {config.model_type!r} has no plan for tensor parallel ranks")
        unknown = sorted(set(plan.values()) - set(_STYLES))
        if unknown:
            raise UnsupportedModelError(
                f"the plan of model_type {config.model_type!r} for tensor parallel ranks has {', '.join(unknown)}, "
                "which is not supported"
            )
        if not any("attn" in name or "attention" in name for name in plan):
            plan = ATTENTION | plan
        self._styles = {f"{prefix}.{name}": _STYLES[style] for name, style in plan.items()}

    def style(self, name: str) -> Style:
        """Of a module, or of a parameter that has its own line."""
        return self._styles.get(_NUMBER.sub("*", name), Style.WHOLE)


def cut_of(
    name: str,
    shape: torch.Size,
    style: Style,
    ranks: Ranks,
    *,
    transposed: bool = False,
    interleaved: bool = False,
) -> Cut:
    """The part of a parameter. `name`: its full name. `transposed`: a product's weight is `[in, out]`. `interleaved`:
    rows of the gate and of what it gates alternate in experts.
    """
    parent, _, kind = name.rpartition(".")
    module = parent.rpartition(".")[2]
    if style is Style.WHOLE or ranks.size == 1:
        return WHOLE
    if style is Style.VOCABULARY:
        own, size = ranks.share(shape[0])
        return Cut(0, (own,), size)
    if style is Style.ROWS:
        if kind == "bias" or kind.endswith("_bias"):  # added to a sum: once
            return WHOLE if ranks.rank == 0 else Cut(zero=True)
        dim = len(shape) - (2 if transposed else 1)
        return _one(dim, *_units(name, module if kind == "weight" else kind, shape[dim], ranks))
    if kind in ("weight", "bias"):
        dim = len(shape) - 1 if transposed and len(shape) > 1 else 0
        label = module
    else:  # a parameter of its own, such as the stacked matrices of experts
        dim = max(0, len(shape) - (1 if transposed else 2)) if kind.endswith("_proj") else len(shape) - 1
        label = kind
    return _packed(dim, label, name, shape[dim], ranks, interleaved=interleaved and kind not in ("weight", "bias"))


def _packed(dim: int, label: str, name: str, whole: int, ranks: Ranks, *, interleaved: bool) -> Cut:
    info = ranks.info
    if label in ("qkv_proj", "c_attn"):
        _require_width(name, whole, (info.heads + 2 * info.kv_heads) * info.head_dim)
        q = (ranks.head_begin * info.head_dim, (ranks.head_begin + ranks.heads) * info.head_dim)
        k = (ranks.kv_begin * info.head_dim, (ranks.kv_begin + ranks.kv_heads) * info.head_dim)
        first, second = info.heads * info.head_dim, info.kv_heads * info.head_dim
        ranges = (q, _shifted(k, first), _shifted(k, first + second))
        return Cut(dim, ranges, sum(end - begin for begin, end in ranges))
    if label.startswith("gate_up_proj"):
        own, size = ranks.share(whole // 2)
        if interleaved:
            return _one(dim, (2 * own[0], 2 * own[1]), 2 * size)
        return Cut(dim, (own, _shifted(own, whole // 2)), 2 * size)
    return _one(dim, *_units(name, label, whole, ranks))


def _units(name: str, label: str, whole: int, ranks: Ranks) -> tuple[tuple[int, int], int]:
    info = ranks.info
    if label in ("k_proj", "v_proj"):
        begin, count, width = ranks.kv_begin, ranks.kv_heads, info.head_dim
        _require_width(name, whole, info.kv_heads * width)
    elif "attn" in name or "attention" in name:  # in whole heads: of keys, too, where there is one for each query head
        begin, count, width = ranks.head_begin, ranks.heads, whole // info.heads
        _require_width(name, whole, info.heads * width)
    else:
        return ranks.share(whole)
    return (begin * width, (begin + count) * width), count * width


def _require_width(name: str, whole: int, expected: int) -> None:
    if whole != expected:
        raise UnsupportedModelError(
            f"tensor parallel ranks cannot share {name}: it is {whole} wide, the configuration's heads {expected}"
        )


def _one(dim: int, own: tuple[int, int], size: int) -> Cut:
    return Cut(dim, (own,), size)


def _shifted(own: tuple[int, int], by: int) -> tuple[int, int]:
    return own[0] + by, own[1] + by
