"""Loads a rank's part of a model, and verifies it together with the other ranks."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

import torch

from alignedserve.device_memory import most_layers
from alignedserve.engine.model.cpu_linear import pack_linears
from alignedserve.engine.model.loader import LoadedModel, before_probe, naming_weights
from alignedserve.engine.model.probe import probe
from alignedserve.engine.parallel.division import Division
from alignedserve.engine.parallel.group import Groups
from alignedserve.engine.parallel.layer_times import DECODE, TimedPass, measured_costs
from alignedserve.engine.parallel.sharded import ShardedModel, by_weights
from alignedserve.engine.step_progress import Progress
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import RankPlace

log = logging.getLogger(__name__)


def load_part(
    info: ModelInfo,
    place: RankPlace,
    groups: Groups,
    device: str | torch.device,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, count: None,
    timed: TimedPass | None = DECODE,
) -> LoadedModel:
    """The part of the model of `info` of the rank at `place`, which computes with the others. All ranks call it.

    `timed`: the pass by whose times rank 0 divides the layers into stages; None: by weights.
    Raises what `ShardedModel` and `load_model` raise.
    """
    target = torch.device(device)
    with naming_weights(info.path):
        part = ShardedModel(info, place, target, trust_remote_code, progress, partial(_agreed, groups, timed))
    model = part.model
    if target.type == "cpu":
        pack_linears(model, part.faster, part.shared)  # whose results must be the same in all ranks, to the last bit
    groups.waits.meet()  # others may read their weights for longer
    pipe = part.install(groups)
    own = before_probe(replace(info, kv_heads=part.ranks.kv_heads, heads=part.ranks.heads), model, target)
    own = replace(own, layers=part.layers, stages=part.stages, pipe=pipe)
    return replace(own, info=info, needs=probe(own))


def _agreed(groups: Groups, timed: TimedPass | None, part: ShardedModel) -> Division:
    """What rank 0 decides."""
    if part.place.rank:
        return Division.told(groups.waits)
    division = by_weights(part) if timed is None else _by_times(part, timed)
    division.tell(groups.waits)
    log.info("stages of %s: %s", part.info.name, division.description)
    return division


def _by_times(part: ShardedModel, timed: TimedPass) -> Division:
    """By measured times; by weights if a layer cannot be measured alone."""
    begun_s = time.perf_counter()
    degrees = part.place.degrees
    try:
        costs = measured_costs(
            part.model, part.stage.path, part.info, part.ranks.kv_range, part.device, timed, part.faster
        )
    except Exception as error:  # foreign model code, on layers that it has not made
        reason = " ".join(str(error).split())[:200]
        log.warning("stages of %s are divided by weights: its layers cannot be timed: %s", part.info.name, reason)
        return by_weights(part, "layers cannot be timed")
    finally:
        if part.device.type == "cuda":
            torch.cuda.empty_cache()  # weights need the room
    log.info("the layers of %s are timed in %.2f s", part.info.name, time.perf_counter() - begun_s)
    return Division.by(costs, degrees.stages, most_layers(part.info, degrees))
