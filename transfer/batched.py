"""Many copies in one call of the CUDA runtime, through `cuda-bindings`.

torch's `copy_` between host and device creates a temporary and waits for it, unless both sides are contiguous
(`copy_requires_temporaries` in aten/native/cuda/Copy.cu), and one call for each contiguous piece costs more than 128
KiB take on the bus. `cudaMemcpyBatchAsync` takes any number of pieces and uses the copy engines, so that no SM is taken
from the computation. It exists from CUDA 12.8 on; with an older driver copies use torch, one call for each piece.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from alignedserve.errors import TransferError
from alignedserve.transfer.pieces import Pieces

logger = logging.getLogger(__name__)

MAX_BATCH = 2048
"""Pieces of one call. Between two calls a copy checks whether it was cancelled."""

# CallRequiresNewerDriver, InsufficientDriver, SymbolNotFound, NotSupported: nothing was copied, and never will be.
_UNSUPPORTED = frozenset({36, 35, 500, 801})


class BatchedCopies:
    """`runtime`: `cuda.bindings.runtime`, or a substitute."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes = [attributes]
        self.supported = True

    def issue(self, pieces: Pieces, source: int, destination: int, device: int, stream: int) -> bool:
        """Submit copies of `pieces`, in stream order, between the stores at these addresses. False if not supported.

        At most `MAX_BATCH` pieces; host memory must be page-locked, each piece within one registration. `stream`: the
        handle of a stream of `device` that is not the default one. Raises TransferError with CUDA's error.
        """
        if not self.supported or not pieces.sizes.size:
            return self.supported
        # The bindings have their own runtime: it must be set to the device that torch uses in this thread.
        if not self._went_well(self._runtime.cudaSetDevice(device)):
            return False
        answer = self._runtime.cudaMemcpyBatchAsync(
            (pieces.destinations + destination).tolist(),
            (pieces.sources + source).tolist(),
            pieces.sizes.tolist(),
            pieces.sizes.size,
            self._attributes,
            [0],
            1,
            stream,
        )
        return self._went_well(answer)

    def _went_well(self, answer: Any) -> bool:
        """`answer`: the error code first; in CUDA 12 followed by the index of the failed copy."""
        if int(answer[0]) in _UNSUPPORTED:
            logger.warning("many copies in one call need a newer driver (%s); blocks are copied one by one", answer[0])
            self.supported = False
            return False
        if int(answer[0]):
            raise TransferError(f"CUDA refused a copy: {answer}")
        return True


@functools.cache
def batched_copies() -> BatchedCopies | None:
    """This process's batched copies; None if `cuda-bindings` are not installed or too old, which is logged once."""
    try:
        from cuda.bindings import runtime

        return BatchedCopies(runtime)
    except (ImportError, AttributeError) as error:
        logger.warning(
            "cuda-bindings of CUDA 12.8 or later are not installed (%s): blocks are copied one by one", error
        )
        return None
