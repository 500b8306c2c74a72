"""The start-up probe: a few tokens through paged attention, compared with the model's own attention.

It finds what a configuration does not tell. A model is refused before it serves a token if it gives different logits
here or fails a check of `attention.probing_attention`: for example, one that bypasses the attention interface, calls it
more than once a layer, shares keys between layers, keeps a state beside them, adds a bias, or masks more than it
declares.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from alignedserve.engine import attention
from alignedserve.engine.attention import ActiveForward
from alignedserve.engine.backends.base import AttentionNeeds
from alignedserve.engine.backends.registry import BACKENDS
from alignedserve.engine.batch import ForwardItem, build_batch
from alignedserve.errors import AlignedServeError, ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from alignedserve.engine.model.loader import LoadedModel

_BLOCK_SIZE = 4
_BLOCKS = 8
# Largest allowed error, relative to the logits' spread. Rounding alone gives 1e-5 in fp32 and 0.01 to 0.02 in bf16
# (fourteen architectures, six layers); a model that bypasses the interface is off by 20 to 75 % (traps.md).
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.08, "float16": 0.04}


def probe(loaded: LoadedModel, backend: str = "torch") -> AttentionNeeds:
    """The model's requirements on a backend. Raises UnsupportedModelError unless paged attention gives its own logits.

    Two requests of 11 and 6 tokens are served packed, in chunks, ending with a decode row each, in blocks out of order.
    The same prompts go through the model alone with its eager attention. The model is left unchanged.
    """
    name = loaded.info.model_type
    prompts = _prompts(loaded.info.vocab_size)
    _refuse_selection(loaded)
    with torch.inference_mode():
        with _attention(loaded.model, attention.PROBING):
            served, needs = _serve(loaded, prompts, backend)
        with _attention(loaded.model, "eager"):
            expected = [_alone(loaded, prompt) for prompt in prompts]
    found, wanted = torch.cat(served), torch.cat(expected)
    if not bool(torch.isfinite(wanted).all()):
        raise ModelError(f"the weights of {loaded.info.path} produce NaN or infinite logits in {loaded.info.dtype}")
    error = _error(found, wanted, loaded.info.dtype)
    if not error <= _TOLERANCE[loaded.info.dtype]:
        raise UnsupportedModelError(
            f"model_type {name!r} is not supported: with paged attention its logits are off by {error:.1%} of their "
            "spread"
        )
    return needs


def _error(found: torch.Tensor, wanted: torch.Tensor, dtype: str) -> float:
    """Root mean square error of a position's logits relative to their standard deviation.

    In fp32 it is that of the worst position, in lower precision that of the median one: there rounding may select other
    experts of a mixture, which changes single positions as much as a wrong attention changes all of them.
    """
    positions = (found - wanted).square().mean(dim=-1).sqrt() / (wanted.std() + 1e-6)
    return float(positions.max() if dtype == "float32" else positions.median())


@contextmanager
def _attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(attention.SERVING)


def _prompts(vocab_size: int) -> list[list[int]]:
    return [[(3 + 7919 * i) % vocab_size for i in range(11)], [(5 + 104729 * i) % vocab_size for i in range(6)]]


def _serve(loaded: LoadedModel, prompts: list[list[int]], backend: str) -> tuple[list[torch.Tensor], AttentionNeeds]:
    """Logits of every position of both prompts, in three packed passes, and the requirements of their attention."""
    info = loaded.info
    shape = (_BLOCKS, *info.geometry(_BLOCK_SIZE).block_shape)
    cache = torch.zeros(shape, dtype=getattr(torch, info.dtype), device=loaded.device)
    blocks = [[6, 1, 4], [7, 2]]
    paged = BACKENDS.get(backend)(cache)
    rows: list[list[torch.Tensor]] = [[], []]
    for cuts in (((0, 5), (0, 1)), ((5, 10), (1, 5)), ((10, 11), (5, 6))):
        items = [
            ForwardItem(prompt[begin:end], begin, ids, "all")
            for prompt, ids, (begin, end) in zip(prompts, blocks, cuts, strict=True)
        ]
        batch = build_batch(items, _BLOCK_SIZE, _BLOCKS, loaded.device)
        paged.begin(batch)
        with attention.active(ActiveForward(paged)) as forward:
            logits = _logits(loaded, batch.input_ids, batch.position_ids)
        _check_layers(loaded, forward.layers)
        at = 0
        for index, (begin, end) in enumerate(cuts):
            rows[index].append(logits[at : at + end - begin])
            at += end - begin
    if len(forward.heads) != 1:
        raise UnsupportedModelError(f"model_type {info.model_type!r} is not supported: its layers differ in heads")
    needs = replace(
        loaded.needs,
        heads=forward.heads.pop(),
        block_size=_BLOCK_SIZE,
        sliding_window="sliding_window" in forward.options,
        softcap="softcap" in forward.options,
        sinks="s_aux" in forward.options,
    )
    return [torch.cat(parts) for parts in rows], needs


def _alone(loaded: LoadedModel, prompt: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt], device=loaded.device)
    return _logits(loaded, ids, torch.arange(len(prompt), device=loaded.device).unsqueeze(0))


def _logits(loaded: LoadedModel, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    try:
        output = loaded.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    except AlignedServeError:
        raise
    except Exception as error:  # any error of foreign model code whose assumptions do not hold
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"model_type {loaded.info.model_type!r} is not supported: it fails on a packed batch ({reason})"
        ) from error
    logits: torch.Tensor = output.logits[0].float()
    return logits


def _refuse_selection(loaded: LoadedModel) -> None:
    """Refuse layers that select visible keys ('indexer'). They hide keys only if there are many: no probe shows it."""
    for module in loaded.model.modules():
        if "indexer" in type(module).__name__.lower():
            raise UnsupportedModelError(
                f"model_type {loaded.info.model_type!r} is not supported: it selects keys ({type(module).__name__})"
            )


def _check_layers(loaded: LoadedModel, layers: list[int]) -> None:
    if layers != list(loaded.layers):
        raise UnsupportedModelError(
            f"model_type {loaded.info.model_type!r} is not supported: of its {len(loaded.layers)} layers, "
            f"{len(layers)} went through transformers' attention interface (in the order {layers[:8]}...)"
        )
