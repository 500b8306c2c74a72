"""Reads parts of a checkpoint's tensors by the names that parameters have in the model.

transformers' own mapping tells which tensors of the files each parameter is made of. Experts that the files have one by
one, and the model stacked, are read expert by expert. What is made otherwise is read whole, converted and cut.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from alignedserve.engine.parallel.cuts import WHOLE, Cut
from alignedserve.errors import ModelError
from alignedserve.weights.files import read_header

_NUMBER = re.compile(r"(\d+)")
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class _Made:
    """A parameter that `converter` makes of tensors, whose names in the files are in `sources` by its patterns.

    `name`: of the first parameter that it makes of them.
    """

    name: str
    converter: Any
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def stacks(self) -> bool:
        """Whether it stacks matrices, and packs the stacks."""
        each = self.converter.operations
        return all(
            (isinstance(one, MergeModulelist) and one.dim == 0) or (isinstance(one, Concatenate) and one.dim == 1)
            for one in each
        ) and isinstance(each[0], MergeModulelist)


class Checkpoint:
    """The open files of a checkpoint of `model`, which needs no weights."""

    def __init__(self, files: Iterable[Path], model: PreTrainedModel) -> None:
        self._model = model
        self._files = ExitStack()
        self._slices: dict[str, Callable[[], Any]] = {}
        for file in files:
            opened = self._files.enter_context(safe_open(file, "pt"))
            for name in read_header(file):
                self._slices[name] = lambda opened=opened, name=name: opened.get_slice(name)  # type: ignore[misc]
        self._known: dict[str, str] = {}  # parameter -> its name in the files
        self._made: dict[str, _Made] = {}
        self._find_names()

    def _find_names(self) -> None:
        model: Any = self._model
        transforms: list[Any] = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        whole, prefix = model.state_dict(), model.base_model_prefix
        for key in sorted(self._slices, key=_by_number):
            name, pattern = rename_source_key(key, renamings, converters, prefix, whole)
            if name not in whole:
                name, pattern = rename_source_key(key, [], [], prefix, whole)
            if pattern is None:
                self._known[name] = key
                continue
            converter = by_pattern[pattern]
            made = self._made.setdefault(name, _Made(name, converter))
            made.sources.setdefault(pattern, []).append(key)
            for other in converter.target_patterns[1:]:
                self._made[name.replace(converter.target_patterns[0], other)] = made

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
        if (made := self._made.get(name)) is not None:
            return self._stacked(made, whole, cut) if made.stacks else self._converted(made, name, whole, cut)
        if (known := self._known.get(name)) is None:
            return None
        found = self._slices[known]()
        self._require(known, torch.Size(found.get_shape()), whole)
        return cut.of(found)

    def differ(self, name: str, other: str) -> bool:
        """Whether the checkpoint has both tensors, with different values."""
        one, two = self._known.get(name), self._known.get(other)
        if one is None or two is None:
            return False
        first, second = self._slices[one](), self._slices[two]()
        if first.get_shape() != second.get_shape():
            return True
        rows = range(0, first.get_shape()[0], _ROWS_AT_ONCE)
        return any(not torch.equal(first[at : at + _ROWS_AT_ONCE], second[at : at + _ROWS_AT_ONCE]) for at in rows)

    def _stacked(self, made: _Made, whole: torch.Size, cut: Cut) -> torch.Tensor:
        """Of stacked experts: each expert's own part."""
        numbers, part = range(whole[0]), cut
        if cut.dim == 0:  # whole experts
            ((begin, end),) = cut.ranges
            numbers, part = range(begin, end), WHOLE
        packed = [made.sources.get(pattern, []) for pattern in made.converter.source_patterns]
        if any(len(names) != whole[0] for names in packed):
            raise ModelError(f"the checkpoint lacks experts of {made.name}: {whole[0]} are needed")
        shape = torch.Size((whole[1] // len(packed), *whole[2:]))
        return torch.stack([self._expert([names[number] for names in packed], shape, part) for number in numbers])

    def _converted(self, made: _Made, name: str, whole: torch.Size, cut: Cut) -> torch.Tensor:
        own = copy.deepcopy(made.converter)
        for pattern, keys in made.sources.items():
            for key in keys:
                own.add_tensor(made.name, key, pattern, self._slices[key]()[...])
        found = own.convert(made.name, model=self._model, config=self._model.config)
        if name not in found:
            raise ModelError(f"transformers makes no {name} of the checkpoint's {', '.join(made.sources)}")
        tensor = found[name][0] if isinstance(found[name], list) else found[name]
        self._require(name, tensor.shape, whole)
        return cut.of(tensor)

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
            tensor = self._slices[name]()
            self._require(name, torch.Size(tensor.get_shape()), whole)
            found.append(part.of(tensor))
        return torch.cat(found)

    def _require(self, name: str, found: torch.Size, whole: torch.Size) -> None:
        if found != whole:
            raise ModelError(f"the checkpoint has {name} in the shape {list(found)}; the model needs {list(whole)}")


def _by_number(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts expert 10 behind expert 9."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in _NUMBER.split(name)]
