"""Names of the attention backends."""

from __future__ import annotations

from alignedserve.engine.backends.base import AttentionBackend
from alignedserve.registry import Registry

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "torch": "alignedserve.engine.backends.torch_backend:TorchBackend",
        "triton": "alignedserve.engine.backends.triton_backend:TritonBackend",
        "triton_no_split": "alignedserve.engine.backends.triton_backend:TritonNoSplitBackend",
        "flash_attn": "alignedserve.engine.backends.flash_attn_backend:FlashAttnBackend",
        "varlen": "alignedserve.engine.backends.varlen_backend:VarlenBackend",
    },
)
