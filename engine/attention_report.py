"""`alignedserve doctor`: the attention backends for the configured model on this machine, and their speed."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoConfig

from alignedserve.config import Config
from alignedserve.engine.backends.base import AttentionNeeds
from alignedserve.engine.backends.choice import BackendCandidate, measure, refusals
from alignedserve.engine.backends.trial import Trial
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.refusal import has_sinks
from alignedserve.engine.runner import allocate_cache
from alignedserve.model import resolve_model

MOST_BLOCK_TOKENS = 1 << 17  # of the store in which backends are timed
FREE_SHARE = 4  # the store takes at most 1/FREE_SHARE of the device's free memory


def attention_report(config: Config, device: str) -> list[BackendCandidate]:
    """Every backend. On a GPU, those that can serve the model are tested and timed over a store of one layer.

    Raises ModelError if the model cannot be read.
    """
    folder = resolve_model(config.model.path, config.model.trust_remote_code)
    trusted = config.model.trust_remote_code
    info = inspect_model(config.served_model_name, folder, config.model.dtype, device, trusted)
    whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
    text = whole.get_text_config(decoder=True)
    needs = AttentionNeeds(
        device=torch.device(device).type,
        dtype=info.dtype,
        heads=int(text.num_attention_heads),
        kv_heads=info.kv_heads,
        head_dim=info.head_dim,
        block_size=config.kv_pool.block_size,
        sliding_window=getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True),
        softcap=getattr(text, "attn_logit_softcapping", None) is not None,
        sinks=has_sinks(whole, trusted),
    )
    found = refusals(needs)
    if needs.device == "cpu":
        return found
    geometry = replace(info.geometry(needs.block_size), layers=1)
    room = torch.cuda.mem_get_info()[0] // FREE_SHARE // geometry.block_bytes
    blocks = min(room, MOST_BLOCK_TOKENS // needs.block_size)
    with Trial(allocate_cache(geometry, blocks, device), needs) as trial:
        return [c if c.refusal is not None else measure(c.name, trial) for c in found]
