"""Selectors of requests by outcome."""

from __future__ import annotations

from alignedserve.errors import OverloadedError
from alignedserve.gateway.failures import FAULT_CODES

FAILED = f'{{outcome=~"{"|".join(FAULT_CODES)}"}}'
REFUSED = f'{{outcome="{OverloadedError.code}"}}'
