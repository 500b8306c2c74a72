"""Loads a rank's part of a model, and verifies it together with the other ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from alignedserve.engine.model.cpu_linear import pack_linears
from alignedserve.engine.model.loader import LoadedModel, before_probe, naming_weights
from alignedserve.engine.model.probe import probe
from alignedserve.engine.parallel.group import Groups
from alignedserve.engine.parallel.sharded import ShardedModel
from alignedserve.engine.step_progress import Progress
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import RankPlace


def load_part(
    info: ModelInfo,
    place: RankPlace,
    groups: Groups,
    device: str | torch.device,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, count: None,
) -> LoadedModel:
    """The part of the model of `info` of the rank at `place`, which computes with the others. All ranks call it.

    Raises what `ShardedModel` and `load_model` raise.
    """
    target = torch.device(device)
    with naming_weights(info.path):
        part = ShardedModel(info, place, target, trust_remote_code, progress)
    model = part.model
    if target.type == "cpu":
        pack_linears(model)
    groups.waits.meet()  # others may read their weights for longer
    part.install(groups)
    own = before_probe(replace(info, kv_heads=part.ranks.kv_heads, heads=part.ranks.heads), model, target)
    own = replace(own, layers=part.layers)
    return replace(own, info=info, needs=probe(own))
