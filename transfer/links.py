"""Chooses the channel for a pair of stores, by their places, when they are attached; it never changes silently."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any, cast

from alignedserve.errors import ConfigError, TransferError
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.handles import CUDA, HOST, StoreHandle
from alignedserve.transfer.host_channel import HostChannel
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.parted import PartedChannel, PartedStore
from alignedserve.transfer.topology import (
    CUDA_IPC,
    CUDA_STAGED,
    SHARED_MEMORY,
    ChannelChoice,
    PeerAccess,
    Place,
    channel_between,
)

logger = logging.getLogger(__name__)

WRAPPER_VARIABLE = "ALIGNEDSERVE_TEST_CHANNEL_WRAPPER"
"""For tests: `module:function` that takes each new channel and returns the one to use instead (injecting faults)."""


def choose_channel(
    source: StoreHandle, destination: StoreHandle, *, allow_slow: bool = False, peer_access: PeerAccess | None = None
) -> ChannelChoice:
    """The channel for a pair of stores.

    `allow_slow` lets two devices without peer access copy blocks through host memory. `peer_access` defaults to asking
    the CUDA driver. Raises GeometryMismatchError for stores of different models, TransferError for a pair without a
    channel.
    """
    source.geometry.require_same(destination.geometry)
    pair = f"stores {source.store_id} and {destination.store_id}"
    if not {source.kind, destination.kind} <= {HOST, CUDA}:
        raise TransferError(f"{pair} are of kinds {source.kind!r} and {destination.kind!r}: no channel supports these")
    places = place_of(source), place_of(destination)
    kind = channel_between(*places, peer_access or ask_driver)
    if kind is None:
        raise TransferError(
            f"{pair} are on different nodes ({source.node_id}, {destination.node_id}): no process reaches both, so "
            "both processes must take part in a copy (transfer/paired)",
            source=source.store_id,
            destination=destination.store_id,
        )
    devices = [place.device for place in places if place.on_device]
    both = " and ".join(devices)
    if kind == CUDA_STAGED and not allow_slow:
        raise TransferError(
            f"{pair}: {both} cannot access each other's memory (no NVLink or peer-to-peer access); "
            "set cluster.allow_slow_channel to copy through host memory"
        )
    if kind == CUDA_IPC:
        same = source.device == destination.device
        return ChannelChoice(kind, f"both on {source.device}" if same else f"{both} can access each other's memory")
    if kind == CUDA_STAGED:
        return ChannelChoice(kind, f"{both} copy through host memory, as allowed", slow=True)
    if kind == SHARED_MEMORY:
        return ChannelChoice(kind, "both in host memory of this node")
    return ChannelChoice(kind, f"between host memory and {both} of this node")


def connect(source: BlockStore, destination: BlockStore, *, allow_slow: bool = False, computed: bool = True) -> Channel:
    """A channel between two stores, each pair of their parts by its places. A store of another process that takes part
    in copies is reached by its own pair.

    Raises the errors of `choose_channel`.

    `computed`: whether computation of this process on a GPU touches either store, so that copies must wait for it.
    Tests wrap every channel of a process through `WRAPPER_VARIABLE` in its environment.
    """
    if isinstance(source, PartedStore) or isinstance(destination, PartedStore):
        return PartedChannel(source, destination, functools.partial(connect, allow_slow=allow_slow, computed=computed))
    if isinstance(source, RemoteBlockStore) or isinstance(destination, RemoteBlockStore):
        from alignedserve.transfer.paired.channel import paired_channel  # imports torch

        return wrapped(paired_channel(source, destination))
    choice = choose_channel(source.handle(), destination.handle(), allow_slow=allow_slow)
    log = logger.warning if choice.slow else logger.info
    log("%s to %s: channel %s, %s", source.store_id, destination.store_id, choice.name, choice.reason)
    if isinstance(source, HostBlockStore) and isinstance(destination, HostBlockStore):
        return wrapped(HostChannel(source, destination))
    from alignedserve.transfer.device import DeviceChannel  # imports torch

    return wrapped(DeviceChannel(source, destination, choice.name, allow_pageable=allow_slow, computed=computed))


def wrapped(channel: Channel) -> Channel:
    """The channel, or its wrapper from `WRAPPER_VARIABLE`."""
    return _wrapper()(channel)


@functools.cache
def _wrapper() -> Callable[[Channel], Channel]:
    """The wrapper of each channel of this process. Raises ConfigError if it cannot be imported."""
    target = os.environ.get(WRAPPER_VARIABLE)
    if not target:
        return lambda channel: channel
    module, _, name = target.partition(":")
    try:
        wrapper: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{WRAPPER_VARIABLE} is {target!r}, which cannot be imported: {error}") from error
    logger.warning("every channel is wrapped by %s, as set in %s: for tests only", target, WRAPPER_VARIABLE)
    return lambda channel: cast(Channel, wrapper(channel))


def place_of(store: StoreHandle) -> Place:
    """The place of its memory."""
    return Place(store.node_id, store.device) if store.kind == CUDA else Place(store.node_id)


def ask_driver(source: str, destination: str) -> bool:
    """Whether the first device can access the second's memory, according to the CUDA driver."""
    from alignedserve.transfer.device import peer_access  # imports torch

    return peer_access(source, destination)
