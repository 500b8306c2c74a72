"""The process of a rank other than 0: loads its part of the model, and computes what rank 0 computes.

`python -m alignedserve.engine.parallel.rank_main DESCRIPTOR`: of the socket to rank 0's process.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading

import torch

from alignedserve.engine.parallel.load import load_part
from alignedserve.engine.parallel.processes import MESSAGE_BYTES, RankOrder, StoreOrder, runner_of
from alignedserve.engine.runner import allocate_cache
from alignedserve.errors import AlignedServeError, RankLostError
from alignedserve.model import ModelInfo
from alignedserve.ranks.forks import bind_to_parent


def main() -> None:
    bind_to_parent()
    compute(socket.socket(fileno=int(sys.argv[1])))


def compute(channel: socket.socket) -> None:
    """Load the part that the channel's other end orders, and compute until it ends."""
    written = channel.recv(MESSAGE_BYTES)
    if not written:  # rank 0 has ended before the call above
        return
    order = RankOrder(**json.loads(written))
    torch.set_num_threads(order.threads)
    info, groups = ModelInfo.from_json(order.info), order.groups()
    try:
        loaded = load_part(info, order.place, groups, "cpu", order.trust_remote_code)
        groups.waits.meet()
    except RankLostError:  # by the error of another
        raise
    except AlignedServeError as error:
        channel.send(json.dumps({"code": error.code, "message": error.message}).encode())
        raise
    message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
    if not message:
        return
    threading.Thread(target=_end_with, args=(channel,), name="end", daemon=True).start()
    shape = StoreOrder(**json.loads(message))
    memory = mmap.mmap(descriptors[0], 0)
    cache = allocate_cache(info.geometry(shape.block_size), shape.blocks, "cpu", memoryview(memory))
    try:
        runner_of(loaded, cache, order.place, groups, order.backend).follow()
    except RankLostError as error:
        print(f"rank {order.rank} ends: {error.message}", file=sys.stderr, flush=True)
        os._exit(1)


def _end_with(channel: socket.socket) -> None:
    """Ends this process when rank 0 closes the channel, wherever this process waits then."""
    channel.recv(1)
    os._exit(0)


if __name__ == "__main__":
    main()
