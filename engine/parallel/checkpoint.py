"""Reads parts of a checkpoint's tensors by the names that parameters have in the model.

Checkpoints of mixtures name each expert's matrices; the models stack them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open

from alignedserve.engine.parallel.cuts import WHOLE, Cut
from alignedserve.errors import ModelError
from alignedserve.weights.files import read_header

_EXPERTS = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)(\.experts\.)(gate_up_proj|down_proj)$")
_ITS_NAMES = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
_BLOCKS = ("mlp", "block_sparse_moe")
_ROWS_AT_ONCE = 4096
_OTHER_NAMES = ((".mlp.", ".block_sparse_moe."), ("lm_head.", "embed_out."))  # in the model, in checkpoints


class Checkpoint:
    """The open files of a checkpoint. `prefix`: of the base model, which names in the files may lack."""

    def __init__(self, files: Iterable[Path], prefix: str) -> None:
        self._prefix = f"{prefix}."
        self._files = ExitStack()
        self._slices: dict[str, Callable[[], Any]] = {}
        for file in files:
            opened = self._files.enter_context(safe_open(file, "pt"))
            for name in read_header(file):
                self._slices[name] = lambda opened=opened, name=name: opened.get_slice(name)  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def read(self, name: str, whole: torch.Size, cut: Cut) -> torch.Tensor | None:
        """The part of the parameter `name`, whose shape is `whole`; None if the checkpoint lacks it.

        Raises ModelError for another shape.
        """
        if (known := self._known(name)) is None:
            return self._read_experts(name, whole, cut)
        found = self._slices[known]()
        self._require(known, torch.Size(found.get_shape()), whole)
        return cut.of(found)

    def differ(self, name: str, other: str) -> bool:
        """Whether the checkpoint has both tensors, with different values."""
        one, two = self._known(name), self._known(other)
        if one is None or two is None:
            return False
        first, second = self._slices[one](), self._slices[two]()
        if first.get_shape() != second.get_shape():
            return True
        rows = range(0, first.get_shape()[0], _ROWS_AT_ONCE)
        return any(not torch.equal(first[at : at + _ROWS_AT_ONCE], second[at : at + _ROWS_AT_ONCE]) for at in rows)

    def _known(self, name: str) -> str | None:
        """The name that the files have for a parameter; None if they have none."""
        names = (name, name.removeprefix(self._prefix), *(name.replace(*other) for other in _OTHER_NAMES))
        return next((each for each in names if each in self._slices), None)

    def _read_experts(self, name: str, whole: torch.Size, cut: Cut) -> torch.Tensor | None:
        """Of stacked experts: each expert's own part."""
        stacked = _EXPERTS.match(name)
        if stacked is None:
            return None
        numbers, part = range(whole[0]), cut
        if cut.dim == 0:  # whole experts
            ((begin, end),) = cut.ranges
            numbers, part = range(begin, end), WHOLE
        before, middle, kind = stacked.groups()
        for block in _BLOCKS:
            for parts in _ITS_NAMES[kind]:
                names = [[f"{before}{block}{middle}{number}.{each}.weight" for each in parts] for number in numbers]
                if names[0][0] in self._slices:
                    rows = whole[1] // len(parts)
                    return torch.stack([self._expert(own, torch.Size((rows, whole[2])), part) for own in names])
        return None

    def _expert(self, names: list[str], whole: torch.Size, cut: Cut) -> torch.Tensor:
        if cut.dim is None:
            own = [cut] * len(names)
        elif len(names) == 1:
            own = [Cut(cut.dim - 1, cut.ranges, cut.size)]
        else:  # a range of each of the packed matrices
            shares = [
                (begin - number * whole[0], end - number * whole[0]) for number, (begin, end) in enumerate(cut.ranges)
            ]
            own = [Cut(cut.dim - 1, (share,), cut.size // len(shares)) for share in shares]
        found = []
        for name, part in zip(names, own, strict=True):
            if name not in self._slices:
                raise ModelError(f"the checkpoint lacks {name}")
            tensor = self._slices[name]()
            self._require(name, torch.Size(tensor.get_shape()), whole)
            found.append(part.of(tensor))
        return torch.cat(found)

    def _require(self, name: str, found: torch.Size, whole: torch.Size) -> None:
        if found != whole:
            raise ModelError(f"the checkpoint has {name} in the shape {list(found)}; the model needs {list(whole)}")
