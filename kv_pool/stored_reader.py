"""Reads the StoredRequests that the shards keep beside the KV of requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from alignedserve.control.convert import key_from_proto, keys_to_proto
from alignedserve.control.rpc import TokenChannel, open_channel, whole_answer
from alignedserve.errors import TransferError, UnavailableError
from alignedserve.kv_pool.writer import PATIENCE_S
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey

logger = logging.getLogger(__name__)

RETRY_S = 0.05
ANSWER_S = 5.0  # then the call is retried, with the successor if there is one


class StoredReader:
    """Keeps one channel to the process of each shard that was read. Used from the event loop.

    Stored requests outlive the shard's process, so a read waits for the successor, but no longer than `patience_s`.
    """

    def __init__(self, token: str, patience_s: float = PATIENCE_S) -> None:
        self._token, self._patience_s = token, patience_s
        self._named: set[str] = set()  # empty: the view names no shards
        self._serving: dict[str, str] = {}  # shard -> the address of its process
        self._channels: dict[str, TokenChannel] = {}  # by address

    async def on_view(self, view: sv.ClusterView) -> None:
        self._named = {shard.pool_id for shard in view.pools}
        ready = (peer for peer in view.peers if peer.process.role == "kv_pool" and peer.state == "ready")
        self._serving = {peer.process.id: peer.address for peer in ready}
        for address in self._channels.keys() - set(self._serving.values()):
            await self._channels.pop(address).close()

    async def read(self, pool_id: str, keys: Iterable[RequestKey]) -> dict[RequestKey, pb.StoredRequest]:
        """The stored requests of those `keys` that the shard has. An empty `pool_id` means the only shard.

        Raises TransferError if the shard was lost with its node, or if it cannot be read for `patience_s` seconds.
        """
        wanted = list(keys)
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._patience_s
        while True:
            if pool_id and self._named and pool_id not in self._named:
                raise TransferError(f"{pool_id} was lost with its node", store_id=pool_id)
            address = self._serving.get(pool_id or next(iter(self._serving), ""))
            if address is not None:
                try:
                    return await self._ask(address, wanted)
                except UnavailableError as error:
                    logger.debug("the stored requests of %s could not be read: %s", pool_id, error)
            if loop.time() > give_up_s:
                raise TransferError(f"{pool_id} could not be read for {self._patience_s:g} s", store_id=pool_id)
            await asyncio.sleep(RETRY_S)

    async def _ask(self, address: str, keys: list[RequestKey]) -> dict[RequestKey, pb.StoredRequest]:
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._token)
        stub = kp_grpc.KvPoolStub(self._channels[address])
        answer = await whole_answer(stub.Read(keys_to_proto(keys), timeout=ANSWER_S))
        stored = [pb.StoredRequest.FromString(data) for part in answer for data in part.requests]
        return {key_from_proto(request.spec.key): request for request in stored}

    async def close(self) -> None:
        while self._channels:
            await self._channels.popitem()[1].close()
