"""Keeps gRPC's poller thread for asyncio until the process ends."""

from __future__ import annotations

import functools

import grpc


@functools.cache
def keep_poller() -> None:
    """Call it before a channel or server of `grpc.aio` is made.

    gRPC ends the thread with the last of these, in whatever thread frees it, and waits there. In an event loop's thread
    it may wait for ever (grpc/grpc#40989).
    """
    grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # not in the stubs
