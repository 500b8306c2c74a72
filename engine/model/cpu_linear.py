"""Faster matrix products on a CPU: oneDNN with weights packed once, if it is measured to be faster.

torch multiplies fp32 matrices with MKL, which uses half the vector width on AMD machines; oneDNN, also part of torch,
does not. A weight that is packed at load is not packed again at every call, which matters for the few rows of a decode
iteration, in bf16 too. The operators are those that torch's own inductor emits for frozen models
(`torch/_inductor/fx_passes/mkldnn_fusion.py`). If they are missing, fail, differ or are slower, nothing changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set

import torch
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

log = logging.getLogger(__name__)

_PACKED_FOR_ROWS = 32
_MEASURED_ROWS = (1, 32)
_WORTH_IT = 0.95


class PackedLinear(torch.nn.Module):
    """`x @ weight.T + bias` with a packed weight.

    `weight` is a placeholder on the meta device with the shape and dtype of the original: reading its values fails,
    rather than returning wrong ones.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        self._packed = pack(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return multiply(x, self._packed, self.bias)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """`weight` `[out, in]` in oneDNN's own layout. Raises RuntimeError if oneDNN does not support its dtype."""
    with torch.inference_mode(False), torch.no_grad():
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR_ROWS)
    return packed


def multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


Faster = dict[tuple[torch.Size, torch.dtype], bool]


def pack_linears(model: torch.nn.Module, faster: Faster | None = None, but: Set[torch.nn.Module] = frozenset()) -> int:
    """Replace the linear layers of a CPU model whose packed form is faster here; returns how many.

    Each shape is measured once, which takes a few milliseconds. `faster`: of shapes that are known; others are added.
    `but`: layers to leave alone.
    """
    faster = {} if faster is None else faster
    replaced = pack_faster(model, faster, but)
    log.info("%d linear layers use packed oneDNN weights; shapes measured: %d", replaced, len(faster))
    return replaced


def pack_faster(model: torch.nn.Module, faster: Faster, but: Set[torch.nn.Module] = frozenset()) -> int:
    """`pack_linears` without a line in the log."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return 0
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = _linear_weight(child)
            if weight is None or weight.device.type != "cpu" or child in but:
                continue
            key = (weight.shape, weight.dtype)
            if key not in faster:
                faster[key] = _is_faster(weight)
            if faster[key]:
                bias = child.bias if isinstance(child.bias, torch.Tensor) else None
                setattr(parent, name, PackedLinear(weight, bias))
                replaced += 1
    return replaced


def _linear_weight(module: torch.nn.Module) -> torch.Tensor | None:
    """The weight `[out, in]` of a layer that can be replaced.

    A subclass may do more than multiply, so none is replaced.
    """
    if type(module) is torch.nn.Linear:
        return module.weight
    if type(module) is Conv1D:
        return module.weight.t()
    return None


@torch.no_grad()
def _is_faster(weight: torch.Tensor) -> bool:
    try:
        packed = pack(weight)
        plain_s = packed_s = 0.0
        for rows in _MEASURED_ROWS:
            x = torch.linspace(-1.0, 1.0, rows * weight.shape[1]).view(rows, -1).to(weight.dtype)
            expected, found = functional.linear(x, weight), multiply(x, packed, None)
            tolerance = 0.02 * float(expected.abs().max()) if weight.dtype != torch.float32 else 1e-3
            if not torch.allclose(expected.float(), found.float(), rtol=1e-3, atol=tolerance):
                log.warning("oneDNN gives different results for a weight of %s and is not used", tuple(weight.shape))
                return False
            plain_s += _seconds(lambda x=x: functional.linear(x, weight))  # type: ignore[misc]
            packed_s += _seconds(lambda x=x: multiply(x, packed, None))  # type: ignore[misc]
    except (RuntimeError, NotImplementedError) as error:
        log.info("oneDNN cannot pack a weight of %s %s: %s", tuple(weight.shape), weight.dtype, error)
        return False
    return packed_s < _WORTH_IT * plain_s


def _seconds(run: Callable[[], torch.Tensor], tries: int = 5) -> float:
    best = float("inf")
    for _ in range(tries):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best
