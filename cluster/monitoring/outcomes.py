"""Which outcomes of requests are the cluster's doing. Other outcomes are answers, and errors for the client to mend."""

from __future__ import annotations

from alignedserve import errors
from alignedserve.request import FinishReason

_FAULTS: tuple[type[errors.AlignedServeError], ...] = (
    errors.AlignedServeError,
    errors.ModelError,
    errors.TransferError,
    errors.ChecksumError,
    errors.GeometryMismatchError,
    errors.NumericsError,
    errors.AccountingError,
    errors.StaleError,
    errors.UnavailableError,
)
FAILED = f'{{outcome=~"{"|".join([FinishReason.ERROR.value, *(fault.code for fault in _FAULTS)])}"}}'
REFUSED = f'{{outcome="{errors.OverloadedError.code}"}}'
