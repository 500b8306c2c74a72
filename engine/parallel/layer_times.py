"""Times the parts of a model that has no weights yet, so that stages of a pipeline can be divided by them.

One layer of each kind, what comes before the layers and what comes after them are computed on the rank's own device,
with noise for weights: the rank's part of them, one layer at a time. Passes go through the model's own code, in which
all other layers pass on what they get. Sums over tensor parallel ranks are not counted.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from alignedserve.engine import attention
from alignedserve.engine.attention import ActiveForward, Place
from alignedserve.engine.backends.base import AttentionBackend, AttentionOptions
from alignedserve.engine.backends.torch_backend import TorchBackend
from alignedserve.engine.batch import ForwardItem, PackedBatch, build_batch
from alignedserve.engine.model.cpu_linear import Faster, pack_faster
from alignedserve.engine.model.loader import before_probe
from alignedserve.engine.parallel.division import Costs
from alignedserve.engine.parallel.stages import Elsewhere, said_by
from alignedserve.errors import UnsupportedModelError
from alignedserve.geometry import DTYPE_BYTES, StoreSlice
from alignedserve.model import ModelInfo

BUDGET_S = 0.3  # of the timed passes of a kind of layer; one is timed in any case
REPEATS = 5
MOST_KINDS = 8  # of layers: more would take too long
MOST_KV_BYTES = 256 << 20  # of the layer that is timed
MOST_FLOP = 2e10  # of a layer on a CPU, in a pass
COLD_BYTES = 128 << 20  # more than the caches of a processor; those of a GPU are smaller
NOISE = 1 << 20  # values, which weights repeat
BLOCK = 16
KINDS = ("attention_type", "is_sliding", "sliding_window", "use_rope")  # what may differ between layers of one shape


@dataclass(frozen=True, slots=True)
class TimedPass:
    """`rows` requests of `new` tokens each, after `cached` ones."""

    rows: int
    new: int
    cached: int


DECODE = TimedPass(rows=16, new=1, cached=1023)
PREFILL = TimedPass(rows=1, new=256, cached=0)


@torch.inference_mode()
def measured_costs(
    model: PreTrainedModel,
    path: str,
    info: ModelInfo,
    heads: tuple[int, int],
    device: torch.device,
    timed: TimedPass,
    faster: Faster,
) -> Costs:
    """Seconds of each layer, of the embedding (`begin`), of what else comes before all layers (`each`), and of what
    comes after them (`end`): the least of a few passes, which other work on the machine disturbs least.

    `model`: with a rank's part of the weights, on the meta device; it is not changed. `path`: of its list of layers.
    `heads`: the first KV head of the rank, and the one after its last. `faster`: as for `pack_linears`.

    Raises UnsupportedModelError for more than MOST_KINDS kinds of layers, and what the model's code raises.
    """
    layers: Any = model.get_submodule(path)
    if (kinds := len({_kind(layer) for layer in layers})) > MOST_KINDS:
        raise UnsupportedModelError(f"it has {kinds} kinds of layers")
    timed = _bounded(timed, layers[0], info, heads, device)
    generator = torch.Generator(device).manual_seed(0)
    noise = torch.randn(NOISE, generator=generator, device=device).mul_(0.02).to(model.dtype)
    shell = _shell(model, path, noise, faster)
    shell_layers: Any = shell.get_submodule(path)
    stage_bytes = sum(each.nbytes for each in layers.parameters()) // 2
    cold = torch.zeros(min(COLD_BYTES, max(stage_bytes, 1 << 20)) // 4, device=device)
    found: dict[object, float] = {}
    ends: list[_Sample] = []
    for number, layer in enumerate(layers):
        if (kind := _kind(layer)) in found:
            continue
        passed_on = shell_layers[number]
        clock, bench = _Clock(device), _Bench(shell, info, number, heads, device, timed)
        shell_layers[number] = _Timed(_with_noise(layer, noise, {}, faster), clock, cold)
        clock.follow(shell, shell_layers)
        try:
            samples = _samples(bench, clock, cold)
        finally:
            clock.close()
            shell_layers[number] = passed_on
        found[kind] = min(sample.layer_s for sample in samples)
        found[kind] += bench.unread_s(_bytes_per_s(cold)) if device.type == "cuda" else 0.0
        ends += samples
    return Costs(
        [found[_kind(layer)] for layer in layers],
        min(sample.embedding_s for sample in ends),
        min(sample.behind_s for sample in ends),
        min(sample.before_s for sample in ends),
        measured=True,
    )


def _kind(layer: nn.Module) -> object:
    """Equal for layers that cost as much."""
    shapes = tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())
    said = tuple(repr(getattr(module, name, None)) for module in layer.modules() for name in KINDS)
    return type(layer), shapes, said


def _bounded(
    timed: TimedPass, layer: nn.Module, info: ModelInfo, heads: tuple[int, int], device: torch.device
) -> TimedPass:
    """The pass with fewer tokens if it would exceed MOST_KV_BYTES, the model's positions, or MOST_FLOP on a CPU."""
    size = _token_bytes(info, heads)
    longest = min(info.max_positions or timed.cached + timed.new, MOST_KV_BYTES // (size * timed.rows))
    new, rows = timed.new, timed.rows
    if device.type == "cpu":
        tokens = max(1, int(MOST_FLOP / (2 * max(1, sum(each.numel() for each in layer.parameters())))))
        rows = min(rows, tokens)
        new = min(new, max(1, tokens // rows))
    new = max(1, min(new, longest))
    return TimedPass(rows, new, max(0, min(timed.cached, longest - new)))


def _token_bytes(info: ModelInfo, heads: tuple[int, int]) -> int:
    """Of a token's keys and values in a layer, of these KV heads."""
    return 2 * (heads[1] - heads[0]) * info.head_dim * DTYPE_BYTES[info.dtype]


def _with_noise(module: nn.Module, noise: torch.Tensor, memo: dict[int, Any], faster: Faster) -> nn.Module:
    """A copy of a module on the meta device with noise for weights, packed like those that are loaded."""
    for each in module.modules():
        if (config := getattr(each, "config", None)) is not None:
            memo[id(config)] = config
    copied = copy.deepcopy(module, memo)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for each in copied.modules():
        for name, parameter in each._parameters.items():
            if parameter is None:
                continue
            if parameter not in filled:
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=noise.device)
                for part in values.view(-1).split(len(noise)):
                    part.copy_(noise[: len(part)])
                filled[parameter] = nn.Parameter(values, requires_grad=False)
            each._parameters[name] = filled[parameter]
    if noise.device.type == "cpu":
        pack_faster(copied, faster)
    return copied


def _shell(model: PreTrainedModel, path: str, noise: torch.Tensor, faster: Faster) -> Any:
    """A copy of the model with noise for weights, in which all layers pass on what they get."""
    layers: Any = model.get_submodule(path)
    passing = nn.ModuleList(Elsewhere(layer) for layer in layers)
    return _with_noise(model, noise, {id(layers): passing}, faster).eval()


@dataclass(frozen=True, slots=True)
class _Sample:
    """Seconds of the parts of a pass. `before_s`: before the layers, without the embedding."""

    embedding_s: float
    before_s: float
    layer_s: float
    behind_s: float


class _Clock:
    """The times at which a pass begins and ends its embedding, one layer, and all layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times: dict[str, float] = {}
        self._hooks: list[Any] = []

    def follow(self, model: Any, layers: Sequence[nn.Module]) -> None:
        embedding = model.get_input_embeddings()
        self._hooks = [
            embedding.register_forward_pre_hook(lambda *_: self.note("embed")),
            embedding.register_forward_hook(lambda *_: self.note("embedded")),
            layers[0].register_forward_pre_hook(lambda *_: self.note("first")),
            layers[-1].register_forward_hook(lambda *_: self.note("last")),
        ]

    def sample(self) -> _Sample:
        at = self.times
        embedding_s = at["embedded"] - at["embed"]
        before_s = at["first"] - at["start"] - embedding_s
        return _Sample(embedding_s, before_s, at["end"] - at["begin"], at["stop"] - at["last"])

    def note(self, name: str) -> None:
        self.times[name] = _now_s(self._device)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _Timed(nn.Module):
    """A layer that is computed twice: the first in a pass also computes what the others use again.

    Between two uses of a layer the others' weights go through the caches, so they are emptied.
    """

    def __init__(self, layer: nn.Module, clock: _Clock, cold: torch.Tensor) -> None:
        super().__init__()
        self.__dict__.update(said_by(layer))
        self.layer, self._clock, self._cold = layer, clock, cold

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.layer(*args, **kwargs)
        self._cold.sum()
        self._clock.note("begin")
        output = self.layer(*args, **kwargs)
        self._clock.note("end")
        return output


@dataclass
class _Bench:
    """Runs one layer over KV of its own."""

    model: Any
    info: ModelInfo
    layer: int
    heads: tuple[int, int]
    device: torch.device
    timed: TimedPass
    windows: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        each = -(-(self.timed.cached + self.timed.new) // BLOCK)
        count, dtype = self.timed.rows, getattr(torch, self.info.dtype)
        kv_heads = self.heads[1] - self.heads[0]
        on_gpu = self.device.type == "cuda"
        shape = (1 if on_gpu else each * count, 1, kv_heads, 2, BLOCK, self.info.head_dim)
        cache = torch.full(shape, 0.01, dtype=dtype, device=self.device)
        self.backend: AttentionBackend = _Unread(cache, self.windows) if on_gpu else TorchBackend(cache)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]  # the rank's part of it
        items = [
            ForwardItem(
                # Different tokens, so that a mixture's rows choose different experts.
                [(number * 7919 + at * 31) % vocabulary for at in range(self.timed.new)],
                self.timed.cached,
                list(range(number * each, (number + 1) * each)),
            )
            for number in range(count)
        ]
        self._batch: PackedBatch = build_batch(items, BLOCK, each * count, self.device)
        self._place = Place(held=StoreSlice(self.layer, self.layer + 1, *self.heads))
        keeps = before_probe(self.info, self.model, self.device).keeps_logits
        self._options = {"logits_to_keep": self._batch.logit_rows} if keeps else {}

    def run(self) -> None:
        batch = self._batch
        self.backend.begin(batch)
        with attention.active(ActiveForward(self.backend, place=self._place)):
            output = self.model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **self._options
            )
        output.logits.float()

    def unread_s(self, bytes_per_s: float) -> float:
        """The time of reading the cached KV."""
        window = self.windows[-1] if self.windows else None
        seen = self.timed.cached if window is None else min(self.timed.cached, window)
        return self.timed.rows * seen * _token_bytes(self.info, self.heads) / bytes_per_s


class _Unread(AttentionBackend):
    """On a GPU, whose backend is chosen later: attention to cached KV is bound by reading it, which is added."""

    def __init__(self, cache: torch.Tensor, windows: list[int | None]) -> None:
        super().__init__(cache)
        self._windows = windows

    def begin(self, batch: PackedBatch) -> None:
        pass

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self._windows.append(options.sliding_window)
        return query.contiguous()


def _samples(bench: _Bench, clock: _Clock, cold: torch.Tensor) -> list[_Sample]:
    """Of each pass."""

    def once() -> _Sample:
        cold.sum()
        clock.note("start")
        bench.run()
        clock.note("stop")
        return clock.sample()

    once()  # the first one is slower
    begun_s = time.perf_counter()
    samples = [once()]
    while len(samples) < REPEATS and time.perf_counter() - begun_s < BUDGET_S:
        samples.append(once())
    return samples


def _now_s(device: torch.device) -> float:
    """On a CPU, of the time in which this thread computes: other instances start at the same time on its cores. Where
    several threads share a product it computes as long as the others.
    """
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _bytes_per_s(cold: torch.Tensor) -> float:
    """At which the device reads its memory."""
    begun_s = _now_s(cold.device)
    for _ in range(REPEATS):
        cold.sum()
    return float(REPEATS) * cold.nbytes / (_now_s(cold.device) - begun_s)
