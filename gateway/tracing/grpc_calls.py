"""Traces of calls over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from alignedserve.gateway.failures import as_error, grpc_status

if TYPE_CHECKING:
    from alignedserve.gateway.tracing.tracing import Tracing

_SERVICE = "alignedserve.v1.Inference"


@contextlib.asynccontextmanager
async def traced(tracing: Tracing | None, method: str, context: Any) -> AsyncIterator[None]:
    """Encloses the handling of a call. `context`: the call's, of grpc.aio or of Ray Serve.

    A sampled one has `traceparent` in its initial metadata; in the trailing ones where Serve has no others.
    """
    if tracing is None:
        yield
        return
    attributes = {"rpc.system.name": "grpc", "rpc.method": f"{_SERVICE}/{method}"}
    with tracing.call("text_completion", context.invocation_metadata() or (), attributes) as trace:
        if trace is None:
            yield
            return
        status = "CANCELLED"
        try:
            if hasattr(context, "send_initial_metadata"):
                await context.send_initial_metadata((("traceparent", trace.header),))
            else:
                context.set_trailing_metadata([("traceparent", trace.header)])
            yield
            status = "OK"
        except Exception as error:
            status = grpc_status(as_error(error))[0].name
            raise
        finally:
            trace.span.set_attribute("rpc.response.status_code", status)
