"""The attention function that transformers calls, and its arguments to a paged backend.

Two implementations are registered with transformers:

- `alignedserve` is used for serving. It is not in the mask interface, so that `create_causal_mask` returns None at once
  (transformers 5.17 to 5.23; a registered one costs a scan of `position_ids`, which synchronises a GPU).
- `alignedserve_probe` is used once, after loading. Its mask function returns a `MaskMark`, so that the attention
  function sees what the model's mask would have hidden, and refuses a model that hides more than its arguments say.

Both refuse unknown keyword arguments: an ignored one would silently give wrong tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from alignedserve.engine.backends.base import AttentionBackend, AttentionOptions
from alignedserve.errors import AlignedServeError, UnsupportedModelError
from alignedserve.geometry import StoreSlice

SERVING = "alignedserve"
PROBING = "alignedserve_probe"

# Arguments of transformers that do not affect which token sees which, at any value.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "position_embeddings",
        "use_cache",
        "return_dict",
        "output_hidden_states",
        "output_router_logits",
        "logits_to_keep",
        "past_key_values",
        "layer_idx",
        "num_items_in_batch",
    }
)
# Harmless at one value only.
_HARMLESS_VALUES: dict[str, Any] = {"output_attentions": False, "is_causal": True, "dropout": 0.0}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the KV of a rank is. In a store of all: part `part` of `parts` equal parts of each layer's heads.

    The store is seen as one of `parts` times as many layers, each with a part of the heads. A store of the rank's own
    has the layers and heads `held`.
    """

    parts: int = 1
    part: int = 0
    held: StoreSlice | None = None

    def layer(self, layer: int) -> int:
        first = 0 if self.held is None else self.held.layer_begin
        return (layer - first) * self.parts + self.part

    def view(self, cache: torch.Tensor) -> torch.Tensor:
        """A contiguous store `[blocks, layers, kv_heads, ...]` as `[blocks, layers * parts, kv_heads / parts, ...]`."""
        blocks, layers, kv_heads, *rest = cache.shape
        return cache.view(blocks, layers * self.parts, kv_heads // self.parts, *rest)


@dataclass(slots=True)
class ActiveForward:
    """The current forward pass of this thread: its backend, and the layers that attended so far.

    `on_layer` is called with each layer once the device has the work that writes its keys and values. While probing,
    `heads` and `options` record the numbers of query heads and the options of the layers.
    """

    backend: AttentionBackend
    layers: list[int] = field(default_factory=list)
    on_layer: Callable[[int], None] | None = None
    place: Place = field(default_factory=Place)
    heads: set[int] = field(default_factory=set)
    options: set[str] = field(default_factory=set)


class _Current(threading.local):
    forward: ActiveForward | None = None


_current = _Current()


@dataclass(frozen=True, slots=True)
class MaskMark:
    """Replaces a mask while probing: `local_size` is the window (or chunk) that the mask would apply."""

    local_size: int | None


@contextmanager
def active(forward: ActiveForward) -> Iterator[ActiveForward]:
    """Make `forward` the pass that this thread's attention functions use."""
    previous, _current.forward = _current.forward, forward
    try:
        yield forward
    finally:
        _current.forward = previous


def register() -> None:
    """Register both implementations with transformers (idempotent)."""
    AttentionInterface.register(SERVING, paged_attention)
    AttentionInterface.register(PROBING, probing_attention)
    AttentionMaskInterface.register(PROBING, _mask_mark)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the paged store of the active forward pass.

    `query` is `[1, heads, tokens, head_dim]`, `key` and `value` are `[1, kv_heads, tokens, head_dim]` of the new
    tokens. `s_aux` is `[heads]`, transformers' name for attention sinks. Returns `[1, tokens, heads, head_dim]`. Raises
    UnsupportedModelError for an unknown argument.
    """
    forward = _current.forward
    if forward is None:
        raise AlignedServeError("paged attention was called outside ModelRunner.forward")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} has its own attention mask")
    for name, given in kwargs.items():
        if given is not None and name not in _HARMLESS:
            _refuse_unless_harmless(module, name, given)
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise UnsupportedModelError(
            f"{type(module).__name__} has sinks (s_aux) of shape {tuple(s_aux.shape)} for {query.shape[1]} query heads"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    forward.layers.append(layer)
    packed = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    attended = forward.backend.attend(forward.place.layer(layer), *packed, options).unsqueeze(0)
    if forward.on_layer is not None:
        forward.on_layer(layer)
    return attended, None


def probing_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`paged_attention`, after the checks that are too expensive for every call while serving."""
    name = type(module).__name__
    if not isinstance(attention_mask, MaskMark):
        raise UnsupportedModelError(f"{name} does not take its mask from transformers' mask interface")
    if attention_mask.local_size != kwargs.get("sliding_window"):
        raise UnsupportedModelError(
            f"{name} hides all but {attention_mask.local_size} tokens by its mask and passes "
            f"sliding_window={kwargs.get('sliding_window')}: the two must agree"
        )
    if not isinstance(getattr(module, "layer_idx", None), int):
        raise UnsupportedModelError(f"{name} does not give its layer number (layer_idx)")
    if getattr(module, "is_causal", True) is not True:
        raise UnsupportedModelError(f"{name} is not causal")
    if key.shape[-1] != value.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise UnsupportedModelError(
            f"{name} has heads of different sizes (query {query.shape[-1]}, key {key.shape[-1]}, "
            f"value {value.shape[-1]})"
        )
    if query.shape[1] % key.shape[1]:
        raise UnsupportedModelError(f"{name} has {query.shape[1]} query heads on {key.shape[1]} key heads")
    forward = _current.forward
    if forward is not None:
        forward.heads.add(query.shape[1])
        forward.options |= {key for key in ("sliding_window", "softcap", "s_aux") if kwargs.get(key) is not None}
    return paged_attention(module, query, key, value, None, **kwargs)


def _refuse_unless_harmless(module: torch.nn.Module, name: str, given: Any) -> None:
    if name in _HARMLESS_VALUES and not isinstance(given, torch.Tensor) and given == _HARMLESS_VALUES[name]:
        return
    raise UnsupportedModelError(f"{type(module).__name__} needs {name!r}, which paged attention does not support")


def _mask_mark(*_args: Any, local_size: int | None = None, attention_mask: Any = None, **_kwargs: Any) -> MaskMark:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedModelError("the model masks tokens of a batch that has no padding")
    return MaskMark(local_size)
