"""Loads a model's weights, strictly, and verifies that paged attention computes the model's own results."""

from __future__ import annotations

import contextlib
import inspect as python_inspect
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from alignedserve.engine import attention
from alignedserve.engine.backends.base import AttentionNeeds
from alignedserve.engine.model.cpu_linear import pack_linears
from alignedserve.engine.model.probe import probe
from alignedserve.engine.step_progress import Progress
from alignedserve.errors import AlignedServeError, ModelError, ResourceError
from alignedserve.model import ModelInfo, check_model_folder
from alignedserve.weights.files import read_tensors, weight_files

if TYPE_CHECKING:
    from alignedserve.engine.parallel.stages import Pipe

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, with paged attention."""

    info: ModelInfo
    model: PreTrainedModel
    device: torch.device
    keeps_logits: bool
    """Whether its forward takes `logits_to_keep` as a tensor of positions."""
    needs: AttentionNeeds
    """The requirements of its attention on a backend, as found by the probe with its own block size."""
    layers: range
    """The layers that this process computes."""
    stages: str = ""
    """Of several stages: which layers each has, and why; in the process of rank 0."""
    pipe: Pipe | None = None
    """What connects it with the stages before and behind it."""


def load_model(
    info: ModelInfo,
    device: str | torch.device,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, count: None,
) -> LoadedModel:
    """Load the safetensors weights of `info` on `device`. `progress` is called after each tensor.

    Raises ModelError for weights that are missing, broken or of other shapes (no weight is ever randomly initialised),
    UnsupportedModelError if paged attention does not give the model's own logits.
    """
    folder = Path(info.path)
    # Gives better errors for a broken file than the code below
    read_tensors(weight_files(folder, check_model_folder(folder)))
    attention.register()
    target = torch.device(device)
    with _telling(progress):
        model: Any = _from_pretrained(info, trust_remote_code)
    try:
        model = model.eval().requires_grad_(False).to(target)
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"{info.name} ({info.weight_bytes / 2**30:.1f} GiB of weights) does not fit on {target}"
        ) from error
    loaded = before_probe(info, model, target)
    loaded = replace(loaded, needs=probe(loaded))
    if target.type == "cpu":
        pack_linears(model)
    return loaded


def before_probe(info: ModelInfo, model: PreTrainedModel, device: torch.device) -> LoadedModel:
    """A model of which is known what `info` says."""
    parameters = python_inspect.signature(model.forward).parameters
    needs = AttentionNeeds(device.type, info.dtype, 0, info.kv_heads, info.head_dim, 0)
    return LoadedModel(info, model, device, "logits_to_keep" in parameters, needs, range(info.layers))


@contextlib.contextmanager
def _telling(progress: Progress) -> Iterator[None]:
    """Call `progress` after each tensor that transformers loads: where it would move its bar."""

    def in_place_of_bar(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _counted(args[0], progress) if kwargs.get("desc") == "Loading weights" else make(*args, **kwargs)

    before = transformers_logging.set_tqdm_hook(in_place_of_bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _counted(items: Collection[Any], progress: Progress) -> Iterator[Any]:
    for number, item in enumerate(items, 1):
        yield item
        progress(number, len(items))


def _from_pretrained(info: ModelInfo, trust_remote_code: bool) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    with naming_weights(info.path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            info.path,
            dtype=getattr(torch, info.dtype),
            attn_implementation=attention.SERVING,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name
        )
    model, report = loaded
    for kind, meaning in (("missing_keys", "lacks"), ("mismatched_keys", "has different shapes for")):
        names = sorted(_tensor(entry) for entry in report.get(kind) or ())
        if names:
            raise ModelError(f"the checkpoint {info.path} {meaning} {len(names)} tensors: {', '.join(names[:5])}")
    unexpected = sorted(report.get("unexpected_keys") or ())
    if unexpected:
        log.warning("%s has %d tensors that the model does not use: %s", info.path, len(unexpected), unexpected[:5])
    assert isinstance(model, PreTrainedModel)
    return model


@contextlib.contextmanager
def naming_weights(path: str) -> Iterator[None]:
    """Raises ModelError, with the folder `path`, for any other error."""
    try:
        yield
    except (AlignedServeError, MemoryError):
        raise
    except Exception as error:  # many types of errors from safetensors, json, the OS and transformers
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"cannot load the weights of {path}: {reason}") from error


def _tensor(entry: Any) -> str:
    """A tensor's name; for a mismatch (name, shape in the checkpoint, shape in the model) with both shapes."""
    if isinstance(entry, str):
        return entry
    name, *shapes = entry
    return f"{name} ({' but in the model '.join(str(list(shape)) for shape in shapes)})"
