"""Mixtures over several ranks: each attends for its own requests, and computes a share of the experts for all.

In each layer of experts every rank sends the states of its tokens to the ranks that have the experts which the router
chose, and gets the results back. A rank without tokens steps along, since others may need its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from alignedserve.engine.parallel.cuts import Cut
from alignedserve.engine.parallel.group import RankGroup
from alignedserve.errors import UnsupportedModelError
from alignedserve.ranks.degrees import RankPlace

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertShare:
    """The experts of one of `size` ranks. `of` each rank is an equal number of experts in a row."""

    def __init__(self, model: nn.Module, name: str, place: RankPlace) -> None:
        """Raises ConfigError unless the experts of each layer can be shared out equally."""
        self.rank, self.size = place.expert, place.degrees.experts
        self._modules: dict[str, Any] = {path: module for path, module in model.named_modules() if _has_experts(module)}
        for experts in {module.num_experts for module in self._modules.values()} or {0}:
            place.degrees.require_experts(name, experts)

    def cut(self, path: str, shape: torch.Size) -> Cut | None:
        """The part of a parameter of the module `path`; None if it is none of the experts'."""
        module = self._modules.get(path)
        if self.size == 1 or module is None or shape[0] != module.num_experts:
            return None
        each = module.num_experts // self.size
        return Cut(0, ((self.rank * each, (self.rank + 1) * each),), each)

    def install(self, group: RankGroup, width: int, dtype: torch.dtype) -> None:
        """Let the experts compute for all ranks of the group from now on. `width`: of a token's states."""
        for module in self._modules.values():
            module.num_experts //= self.size
            nothing = torch.empty((0, width), dtype=dtype, device=next(module.parameters()).device)
            module.forward = Exchange(group, module.forward, module.num_experts, nothing)


def _has_experts(module: Any) -> bool:
    count = getattr(module, "num_experts", None)
    stacked = [each for each in module._parameters.values() if each is not None and each.dim() == 3]
    return isinstance(count, int) and bool(stacked) and all(each.shape[0] == count for each in stacked)


class Exchange:
    """In place of a layer's experts: the same arguments and result, over all ranks. Each rank calls it in each pass."""

    def __init__(self, group: RankGroup, compute: Compute, experts: int, nothing: torch.Tensor) -> None:
        """`compute`: this rank's own `experts` experts. `nothing`: the states of no token."""
        self._group, self._compute, self._experts, self._nothing = group, compute, experts, nothing
        self._weights = nothing.dtype  # of weights; known from the first call, which the probe makes in each rank

    def __call__(self, states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`states` `[tokens, width]`, `index` and `weights` `[tokens, experts of each]`. Returns new states."""
        if states.dtype is not self._nothing.dtype or states.shape[1:] != self._nothing.shape[1:]:
            raise UnsupportedModelError(f"experts get {tuple(states.shape[1:])} values of {states.dtype} a token")
        self._weights = weights.dtype
        chosen = index.reshape(-1)
        owner = chosen // self._experts
        order = owner.argsort(stable=True)
        tokens = order // max(1, index.shape[-1])
        sizes = torch.bincount(owner, minlength=self._group.size).cpu()
        which, weight = chosen[order] % self._experts, weights.reshape(-1)[order]
        what = torch.stack((which.to(torch.float32), weight.to(torch.float32)), dim=1)
        results = self._over_ranks(states.index_select(0, tokens), what, sizes)
        by_token = torch.empty_like(results).index_copy_(0, order, results).view(*index.shape, -1)
        return by_token.float().sum(1).to(states.dtype)

    def step_along(self) -> None:
        """The pass of a rank without tokens."""
        sizes = torch.zeros(self._group.size, dtype=torch.int64)
        self._over_ranks(self._nothing, self._nothing.new_empty((0, 2), dtype=torch.float32), sizes)

    def _over_ranks(self, states: torch.Tensor, what: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Results of rows in the order of their owners. `what`: the number of the owner's expert, and the weight.

        `sizes`: rows for each rank, int64 `[ranks]` in host memory.
        """
        group = self._group
        table = group.counted(sizes)
        here, sent = table[:, group.rank].tolist(), sizes.tolist()
        taken = group.exchanged(states, sent, here)
        asked = group.exchanged(what, sent, here)
        found = taken
        if len(taken):
            found = self._compute(taken, asked[:, :1].to(torch.int64), asked[:, 1:].to(self._weights)).to(states.dtype)
        return group.returned(found, here, sent)


def exchanges_of(model: nn.Module) -> Iterator[Exchange]:
    """In the order of layers."""
    for module in model.modules():
        if isinstance(found := module.__dict__.get("forward"), Exchange):
            yield found
