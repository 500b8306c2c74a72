"""The process of a rank other than 0: loads its part of the model, and computes what rank 0 computes."""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
from dataclasses import asdict
from functools import partial

import torch

from alignedserve.engine.parallel.children import MOST_RANKS, RankOrder, StoreOrder
from alignedserve.engine.parallel.load import load_part
from alignedserve.engine.parallel.processes import bytes_of, runner_of
from alignedserve.engine.parallel.rendezvous import MESSAGE_BYTES, AskedValues
from alignedserve.engine.parallel.runner import held_by
from alignedserve.engine.parallel.stores import opened_part
from alignedserve.engine.runner import allocate_cache
from alignedserve.errors import AlignedServeError, RankLostError
from alignedserve.model import ModelInfo
from alignedserve.ranks.now import WaitedFile


def compute(channel: socket.socket) -> None:
    """Load the part that the channel's other end orders, and compute until it ends."""
    written, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
    if not written:  # rank 0 needs no more ranks
        return
    order = RankOrder(**json.loads(written))
    waited = WaitedFile(MOST_RANKS, descriptors[1])
    torch.set_num_threads(order.threads)
    if order.device != "cpu":
        torch.cuda.set_device(order.device)
    info, groups = ModelInfo.from_json(order.info), order.groups(descriptors[0], AskedValues(channel))
    try:
        loaded = load_part(info, order.place, groups, order.device, order.trust_remote_code)
        groups.waits.meet()
    except RankLostError:  # by the error of another
        raise
    except AlignedServeError as error:
        channel.send(json.dumps({"code": error.code, "message": error.message}).encode())
        raise
    held = held_by(loaded, order.place)
    channel.send(json.dumps({"held": asdict(held), "weight_bytes": bytes_of(loaded)}).encode())
    message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
    if not message:
        return
    shape = StoreOrder(**json.loads(message))
    geometry = info.geometry(shape.block_size)
    if shape.handle:
        cache = opened_part(geometry, shape.blocks, held, shape.handle.encode())
    else:
        memory = memoryview(mmap.mmap(descriptors[0], 0))
        cache = allocate_cache(geometry, shape.blocks, "cpu", memory, held if shape.own else None)
    try:
        runner = runner_of(loaded, cache, order.place, groups, order.backend, own=shape.own)
        runner.follow(partial(waited.note, order.rank))
    except RankLostError as error:
        print(f"rank {order.rank} ends: {error.message}", file=sys.stderr, flush=True)
        os._exit(1)
