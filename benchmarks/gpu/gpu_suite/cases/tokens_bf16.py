"""`tokens` in bf16: a group of its own, beside the other."""

from __future__ import annotations

import torch

from gpu_suite.cases import tokens
from gpu_suite.record import Context


def run(context: Context) -> None:
    tokens.run_dtype(context, torch.bfloat16)
