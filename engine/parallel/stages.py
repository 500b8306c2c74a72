"""A stage of a pipeline: a model that computes some of its layers, between what other processes compute.

The model keeps its structure. Layers of other stages pass on what they get; the first own layer gets what the stage
before has sent, and after the last own layer the pass ends here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from alignedserve.engine.parallel.division import Costs, by_weights
from alignedserve.engine.parallel.group import RankGroup
from alignedserve.errors import UnsupportedModelError
from alignedserve.ranks.degrees import RankPlace


class Pipe:
    """What a rank gets from the stage before its own, and gives to the next: hidden states `[1, tokens, width]`."""

    def __init__(
        self, group: RankGroup, place: RankPlace, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`group`: of all ranks. `device`: of this one."""
        self._group, self._place = group, place
        self.width = width
        self._dtype, self._device = dtype, device
        self._held: torch.Tensor | None = None  # what captured passes begin with
        self._captured = False

    def take(self, tokens: int) -> torch.Tensor:
        if self._captured:
            assert self._held is not None
            return self._held[:, :tokens]
        states = torch.empty((1, tokens, self.width), dtype=self._dtype)
        return self._group.receiving(states, self._place.rank - self._place.degrees.tensor)().to(self._device)

    def give(self, states: torch.Tensor) -> None:
        if self._captured:
            return
        if states.dtype is not self._dtype or states.shape[2] != self.width:
            raise UnsupportedModelError(
                f"a stage passes on {self.width} values of {self._dtype} a token, not {states.shape[2]} of "
                f"{states.dtype}"
            )
        self._group.send(states.contiguous(), self._place.rank + self._place.degrees.tensor)

    def hold(self, tokens: int) -> None:
        """Make the memory that captured passes of at most so many tokens begin with."""
        self._held = torch.zeros((1, tokens, self.width), dtype=self._dtype, device=self._device)

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Within it a pass begins with what is held, and gives nothing: messages are no part of a CUDA graph."""
        self._captured = True
        try:
            yield
        finally:
            self._captured = False

    def replay(self, tokens: int, replay: Callable[[], None], states: torch.Tensor | None) -> None:
        """A captured pass of so many tokens, with its messages. `states`: `[tokens, width]`, which it leaves for the
        next stage; None in the last one.
        """
        if self._held is not None:
            self._held[:, :tokens].copy_(self.take(tokens))
        replay()
        if states is not None:  # a copy, since the next pass writes there
            self.give(states.to(self._dtype, copy=True).unsqueeze(0))


def said_by(layer: nn.Module) -> dict[str, str | int]:
    """What a model may ask of a layer, such as its type of attention."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, str | int)}


class Elsewhere(nn.Module):
    """In place of a layer that is computed elsewhere: it passes on what it gets."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(said_by(layer))

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return hidden_states


class _ReachedEnd(Exception):  # noqa: N818  (it is no error)
    """The last layer of a stage is computed."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


class Stage:
    """The stage `place.stage` of a model that has no weights yet; all of it, if it is the only one."""

    def __init__(self, model: PreTrainedModel, layers: int, place: RankPlace) -> None:
        """Raises ConfigError for fewer layers than stages, UnsupportedModelError if the layers are not found."""
        self.layers = range(layers)
        self._place = place
        self._model: Any = model
        self.path = ""
        """Of the list of layers in the model; empty for a single stage."""
        if place.degrees.stages > 1:
            place.degrees.require_layers(type(model).__name__, layers)
            self.path = _path_of_layers(model, layers)

    def by_weights(self, why: str = "") -> Costs:
        """What layers and the head cost. `why`: the reason if times are not known."""
        model = self._model
        chosen = getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None) or 0
        head = model.get_output_embeddings().weight.numel()
        return by_weights(model.get_submodule(self.path), chosen, head, why)

    def keep(self, layers: range) -> None:
        """Remove what other stages compute. `layers`: of this one."""
        self.layers = layers
        model, place, listed = self._model, self._place, self._model.get_submodule(self.path)
        for number, layer in enumerate(listed):
            if number not in layers:
                listed[number] = Elsewhere(layer)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = embedding.weight is head.weight
        if place.stage and not (place.is_last_stage and tied):
            _drop(embedding)
        if not place.is_last_stage:
            _drop(head)

    @property
    def embeds(self) -> bool:
        """Whether it begins with the tokens."""
        return self._place.stage == 0

    def install(self, group: RankGroup, device: torch.device) -> Pipe:
        """From now on the model computes with the stages around it, on this device. What a stage before the last gives
        as its logits are the hidden states behind it.
        """
        model = self._model
        layers = model.get_submodule(self.path)
        dtype, width = model.dtype, model.config.get_text_config(decoder=True).hidden_size
        pipe = Pipe(group, self._place, width, dtype, device)
        taken: list[torch.Tensor] = []
        if not self.embeds:
            embedding = model.get_input_embeddings()
            embedding.forward = lambda ids: torch.zeros(
                (*ids.shape, embedding.embedding_dim), dtype=dtype, device=ids.device
            )
            layers[self.layers.start].register_forward_pre_hook(_replacing(taken), with_kwargs=True)
        if not self._place.is_last_stage:
            layers[self.layers.stop - 1].register_forward_hook(_end)
        plain = model.forward

        @wraps(plain)
        def forward(input_ids: torch.Tensor, **kwargs: Any) -> Any:
            if not self.embeds:
                taken[:] = [pipe.take(input_ids.shape[1])]
            try:
                return plain(input_ids=input_ids, **kwargs)
            except _ReachedEnd as end:
                pipe.give(end.states)
                return SimpleNamespace(logits=end.states)

        model.forward = forward
        return pipe


def language_model(model: PreTrainedModel) -> str:
    """The path of what has the layers of tokens: a part of a model that has others, for images, beside it."""
    if model.config.get_text_config(decoder=True) is model.config:
        return str(model.base_model_prefix)
    embedding = model.get_input_embeddings()
    path: str = next(path for path, module in model.named_modules() if module is embedding)
    return path.rpartition(".")[0]


def _path_of_layers(model: PreTrainedModel, layers: int) -> str:
    lists: list[str] = [
        name for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) == layers
    ]
    if not lists:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of {layers} layers to share out")
    beginning = f"{language_model(model)}."
    return next((name for name in lists if name.startswith(beginning)), lists[0])


def _drop(module: nn.Module) -> None:
    for own in (module._parameters, module._buffers):
        own.update(dict.fromkeys(own))


def _replacing(taken: list[torch.Tensor]) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (states,) = taken
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    return hook


def _end(_module: nn.Module, _inputs: Any, output: Any) -> None:
    raise _ReachedEnd(output if isinstance(output, torch.Tensor) else output[0])
