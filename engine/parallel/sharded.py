"""A model of which a rank holds its part: built without weights, cut by the plan, filled from a checkpoint's slices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alignedserve.device_memory import most_layers
from alignedserve.engine import attention
from alignedserve.engine.model.cpu_linear import Faster
from alignedserve.engine.parallel.checkpoint import Checkpoint
from alignedserve.engine.parallel.cuts import WHOLE, Cut, Plan, Ranks, Style, cut_of
from alignedserve.engine.parallel.division import Division
from alignedserve.engine.parallel.experts import ExpertShare
from alignedserve.engine.parallel.group import Groups, RankGroup
from alignedserve.engine.parallel.stages import Pipe, Stage, language_model
from alignedserve.engine.step_progress import Progress
from alignedserve.errors import ModelError, ResourceError, UnsupportedModelError
from alignedserve.model import ModelInfo, check_model_folder
from alignedserve.ranks.degrees import RankPlace
from alignedserve.weights.files import weight_files


class ShardedModel:
    """One rank's part of a model. `install` lets it compute with the others; before that it has only its weights."""

    def __init__(
        self,
        info: ModelInfo,
        place: RankPlace,
        device: torch.device,
        trust_remote_code: bool = False,
        progress: Progress = lambda done, count: None,
        divide: Callable[[ShardedModel], Division] | None = None,
    ) -> None:
        """Asks the files for the rank's slice of each tensor.

        `divide`: says which layers each of several stages has, before there are weights; by default weights do.

        Raises ConfigError if the ranks cannot share the model, UnsupportedModelError if there is no plan for it, and
        ModelError for a checkpoint that lacks something.
        """
        attention.register()
        self.info, self.place, self.device = info, place, device
        self.ranks = Ranks(info, place.part, place.degrees.tensor)
        self.ranks.require()
        config = AutoConfig.from_pretrained(info.path, local_files_only=True, trust_remote_code=trust_remote_code)
        dtype = getattr(torch, info.dtype)
        with torch.device("meta"):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.SERVING, trust_remote_code=trust_remote_code
            )
        self.model.eval()
        self._reduced: list[str] = []
        self.faster: Faster = {}
        """The shapes of linear layers whose packed form is known to be faster, or not."""
        self.shared: set[nn.Module] = set()
        """Products that all ranks of a layer compute, such as routers."""
        self._normed: list[tuple[Any, int]] = []
        # What transformers keeps in a precision of its own at a load (`PreTrainedModel._get_dtype_plan`).
        self._precise = {
            re.compile(key.replace("*", ".*")): own for key, own in self.model._get_dtype_plan(dtype).items()
        }
        folder = Path(info.path)
        with Checkpoint(weight_files(folder, check_model_folder(folder)), self.model) as checkpoint:
            tied = self._settle_ties(checkpoint)
            self._experts = ExpertShare(self.model, info.name, place)
            self._plan = Plan(config.get_text_config(decoder=True), language_model(self.model), self.ranks.size)
            self._fill_buffers(checkpoint, device)
            wanted = self._cut()
            self._localise_attention()
            self.stage, self.stages = Stage(self.model, info.layers, place), ""
            if place.degrees.stages > 1:
                division = (divide or by_weights)(self)
                self.stages = division.description
                self._keep(division.stages[place.stage], wanted)
            self.layers = self.stage.layers
            self._load(checkpoint, wanted, tied, device, progress)

    def _settle_ties(self, checkpoint: Checkpoint) -> dict[str, list[str]]:
        """As transformers does at a load: what the checkpoint has with different values is not tied.

        Returns the other names of each tied parameter, under which the checkpoint may have it.
        """
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        tied: dict[str, list[str]] = {}
        for parameter, (first, *others) in names.items():
            for other in others:
                if checkpoint.differ(first, other):
                    owner, _, label = other.rpartition(".")
                    own = nn.Parameter(torch.empty_like(parameter), requires_grad=False)
                    self.model.get_submodule(owner)._parameters[label] = own
                else:
                    tied.setdefault(first, []).append(other)
        return tied

    def _dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """Of a tensor in memory. `own`: as the model was built."""
        return next((dtype for key, dtype in self._precise.items() if key.search(name)), own)

    def _keep(self, layers: range, wanted: dict[nn.Parameter, tuple[str, torch.Size, Cut]]) -> None:
        """Keep these layers and what else the stage computes, and read no more than that."""
        self.stage.keep(layers)
        kept, modules = set(self.model.parameters()), dict(self.model.named_modules())
        for parameter in wanted.keys() - kept:
            del wanted[parameter]
        self._reduced = [name for name in self._reduced if name in modules]

    def _fill_buffers(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """Compute the buffers, such as rotary frequencies, as transformers does at a load, or read them."""
        owners: dict[str, PreTrainedModel] = {}  # what initialises each module: the model, or one within it
        for module_name, module in self.model.named_modules():
            own = isinstance(module, PreTrainedModel)
            owners[module_name] = module if own else owners[module_name.rpartition(".")[0]]
            empty = {name: each for name, each in module._buffers.items() if each is not None and each.is_meta}
            if not empty:
                continue
            unlike = []
            for value in (0, 1):  # a buffer that is not set keeps the value
                filled = {
                    name: torch.full_like(
                        each, value, dtype=self._dtype(f"{module_name}.{name}", each.dtype), device=device
                    )
                    for name, each in empty.items()
                }
                module._buffers.update(filled)
                with torch.no_grad():
                    owners[module_name]._init_weights(module)
                for name in filled.keys() - module._non_persistent_buffers_set:
                    found = checkpoint.read(f"{module_name}.{name}", filled[name].shape, WHOLE)
                    if found is not None:
                        filled[name].copy_(found)
                unlike.append(filled)
            if unset := [name for name in empty if not torch.equal(*(filled[name] for filled in unlike))]:
                raise UnsupportedModelError(
                    f"{type(module).__name__} keeps {', '.join(unset)}, which cannot be computed for a rank"
                )

    def _cut(self) -> dict[nn.Parameter, tuple[str, torch.Size, Cut]]:
        """Give each parameter the shape of the rank's part; returns what to read for each."""
        model, ranks = self.model, self.ranks
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        done: dict[nn.Parameter, nn.Parameter] = {}
        wanted: dict[nn.Parameter, tuple[str, torch.Size, Cut]] = {}
        for module_name, module in model.named_modules():
            style = Style.VOCABULARY if module in ends else self._plan.style(module_name)
            transposed = isinstance(module, Conv1D) or getattr(module, "is_transposed", False)
            interleaved = transposed and not getattr(module, "is_concatenated", False)
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in done:
                    full = f"{module_name}.{name}"
                    own = self._plan.style(full)
                    if own is Style.ROWS and style is not Style.ROWS:
                        raise UnsupportedModelError(f"the plan cuts {full} by rows, and nothing sums {module_name}")
                    cut = cut_of(
                        full,
                        parameter.shape,
                        own if own is not Style.WHOLE else style,
                        ranks,
                        transposed=transposed,
                        interleaved=interleaved,
                    )
                    if cut is WHOLE:
                        cut = self._experts.cut(module_name, parameter.shape) or self._cut_of_norm(
                            module_name, module, parameter.shape
                        )
                    if cut is WHOLE and isinstance(module, nn.Linear | Conv1D) and ranks.size > 1:
                        self.shared.add(module)
                    part = torch.empty(
                        cut.shape(parameter.shape), dtype=self._dtype(full, parameter.dtype), device="meta"
                    )
                    done[parameter] = nn.Parameter(part, requires_grad=False)
                    wanted[done[parameter]] = full, parameter.shape, cut
                module._parameters[name] = done[parameter]
            if style is Style.ROWS:
                self._reduced.append(module_name)
            _tell_shape(module)
        if ranks.size > 1 and not self._reduced:
            raise UnsupportedModelError(
                f"{type(model).__name__} has none of the modules that its plan for tensor parallel ranks names"
            )
        return wanted

    def _cut_of_norm(self, name: str, module: nn.Module, shape: torch.Size) -> Cut:
        """Norms of queries or keys have weights of their heads. Those over all heads are computed together."""
        label = name.rpartition(".")[2]
        if label not in ("q_norm", "k_norm") or not hasattr(module, "variance_epsilon"):
            return WHOLE
        info, ranks = self.info, self.ranks
        heads, begin, own = (
            (info.heads, ranks.head_begin, ranks.heads)
            if label == "q_norm"
            else (info.kv_heads, ranks.kv_begin, ranks.kv_heads)
        )
        if shape == (heads, info.head_dim) and heads > 1:  # of each head by itself
            return Cut(0, ((begin, begin + own),), own)
        if shape != (heads * info.head_dim,) or heads == 1:
            return WHOLE
        self._normed.append((module, own * ranks.size * info.head_dim))
        return Cut(0, ((begin * info.head_dim, (begin + own) * info.head_dim),), own * info.head_dim)

    def _load(
        self,
        checkpoint: Checkpoint,
        wanted: dict[nn.Parameter, tuple[str, torch.Size, Cut]],
        tied: dict[str, list[str]],
        device: torch.device,
        progress: Progress,
    ) -> None:
        loaded: dict[nn.Parameter, nn.Parameter] = {}
        lacking = []
        for number, (empty, (name, whole, cut)) in enumerate(wanted.items(), 1):
            all_names = (name, *tied.get(name, ()))
            found = next((part for each in all_names if (part := checkpoint.read(each, whole, cut)) is not None), None)
            if found is None:
                lacking.append(name)
                continue
            try:
                loaded[empty] = nn.Parameter(
                    found.to(device=device, dtype=empty.dtype).contiguous(), requires_grad=False
                )
            except torch.OutOfMemoryError as error:
                raise ResourceError(f"the part of {self.info.name} of one rank does not fit on {device}") from error
            progress(number, len(wanted))
        if lacking:
            raise ModelError(f"the checkpoint {self.info.path} lacks {len(lacking)} tensors: {', '.join(lacking[:5])}")
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = loaded[parameter]

    def _localise_attention(self) -> None:
        """Attention modules count their rank's heads."""
        ranks = self.ranks
        counts = {
            "num_heads": ranks.heads,
            "num_attention_heads": ranks.heads,
            "num_key_value_heads": ranks.kv_heads,
            "num_key_value_groups": ranks.heads // ranks.kv_heads,
            "split_size": ranks.heads * self.info.head_dim,
        }
        modules: Iterable[Any] = self.model.modules()
        for module in modules:
            if hasattr(module, "layer_idx") and (hasattr(module, "head_dim") or hasattr(module, "head_size")):
                for name, count in counts.items():
                    if hasattr(module, name):
                        setattr(module, name, count)
                if hasattr(module, "kv_dim"):  # it splits queries from keys and values by these
                    module.embed_dim = ranks.heads * self.info.head_dim
                    module.kv_dim = ranks.kv_heads * self.info.head_dim
                if hasattr(module, "qkv_proj"):
                    module.config = _OwnHeads(module.config, ranks)

    def install(self, groups: Groups) -> Pipe | None:
        """From now on the model computes with the other ranks.

        Its head gives the logits of the rank's vocabulary; a stage before the last gives the hidden states behind it.
        Returns what connects several stages.
        """
        if self.ranks.size > 1:
            self._share_layers(groups.sums)
        if groups.pipe is None:
            return None
        if self._experts.size > 1:
            config = self.model.config.get_text_config(decoder=True)
            self._experts.install(groups.pipe, config.hidden_size, self.model.dtype)
            return None
        return self.stage.install(groups.pipe, self.device)

    def _share_layers(self, group: RankGroup) -> None:
        for name in self._reduced:
            self.model.get_submodule(name).register_forward_hook(
                lambda _module, _inputs, output: group.sum(output.contiguous())
            )
        for norm, elements in self._normed:
            norm.forward = _norm_over_ranks(norm, elements, group)
        if not self.stage.embeds:
            return
        embedding: Any = self.model.get_input_embeddings()
        begin, share = self.ranks.rank * self.ranks.vocabulary, self.ranks.vocabulary
        plain = embedding.forward

        def embed(ids: torch.Tensor) -> torch.Tensor:
            own = ids - begin
            foreign = (own < 0) | (own >= share)
            found = plain(own.masked_fill(foreign, 0)).masked_fill(foreign.unsqueeze(-1), 0)
            return group.sum(found.contiguous())

        embedding.forward = embed


def by_weights(part: ShardedModel, why: str = "") -> Division:
    """Stages of equal weights. `why`: the reason if times are not known."""
    stages, info = part.place.degrees.stages, part.info
    return Division.by(part.stage.by_weights(why), stages, most_layers(info, part.place.degrees))


class _OwnHeads:
    """A configuration with the number of a rank's query heads."""

    def __init__(self, config: PretrainedConfig, ranks: Ranks) -> None:
        self._config, self.num_attention_heads = config, ranks.heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _norm_over_ranks(norm: Any, elements: int, group: RankGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """An RMS norm over `elements` values, of which each rank has a part."""

    def forward(states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        total = group.sum(wide.pow(2).sum(-1, keepdim=True))
        scaled: torch.Tensor = norm.weight * (wide * torch.rsqrt(total / elements + norm.variance_epsilon))
        return scaled.to(states.dtype)

    return forward


def _tell_shape(module: nn.Module) -> None:
    """Let a product say what it is now, for whatever packs or prints it."""
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Linear) and weight is not None:
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, Conv1D) and weight is not None:
        module.nx, module.nf = weight.shape
    elif isinstance(module, nn.Embedding) and weight is not None:
        module.num_embeddings = weight.shape[0]
        module.padding_idx = None
