"""The group `tokens` in bf16, a separate group so that both run in parallel."""

from __future__ import annotations

import torch

from gpu_suite.cases import tokens
from gpu_suite.record import Context


def run(context: Context) -> None:
    tokens.run_dtype(context, torch.bfloat16)
