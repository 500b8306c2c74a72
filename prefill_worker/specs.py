"""Reads prompts from their gateways. The scheduler keeps only the keys of the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from alignedserve.cancellation import end_tasks
from alignedserve.control.convert import key_from_proto, keys_to_proto
from alignedserve.control.rpc import TokenChannel, open_channel, whole_answer
from alignedserve.errors import UnavailableError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import gateway_pb2_grpc as gw_grpc
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey

Specs = dict[RequestKey, pb.RequestSpec]

PATIENCE_S = 3.0  # the scheduler learns earlier that a gateway has ended
RETRY_S = 0.05
ANSWER_S = 10.0  # for a whole reply


def sent_specs(group: pw.PrefillGroup) -> Specs:
    """The requests that the gateway sent with the submission; {} if the prompt has to be read."""
    try:
        return _by_key([gw.RequestSpecs.FromString(group.specs)])
    except DecodeError:
        return {}


def _by_key(parts: Iterable[gw.RequestSpecs]) -> Specs:
    return {key_from_proto(spec.key): spec for part in parts for spec in part.requests}


class SpecReader:
    """Makes one call at a time to each gateway; reads that come meanwhile share the next call. For one event loop."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._channels: dict[str, TokenChannel] = {}  # by address
        self._wanted: dict[str, list[tuple[Sequence[RequestKey], asyncio.Future[Specs]]]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def on_view(self, view: sv.ClusterView) -> None:
        """Close the channels to gateways that are no longer in the cluster."""
        living = {peer.address for peer in view.peers}
        for address in self._channels.keys() - living - self._asking.keys():
            await self._channels.pop(address).close()

    async def read(self, address: str, keys: Sequence[RequestKey]) -> Specs:
        """The requests of a group that are open at the gateway at `address`. Only the first has the prompt.

        Raises UnavailableError if the gateway does not reply for `PATIENCE_S` seconds.
        """
        answer: asyncio.Future[Specs] = asyncio.get_running_loop().create_future()
        self._wanted.setdefault(address, []).append((keys, answer))
        if address not in self._asking:
            self._asking[address] = asyncio.get_running_loop().create_task(self._ask_all(address))
        return await answer

    async def close(self) -> None:
        await end_tasks(self._asking.values())
        while self._channels:
            await self._channels.popitem()[1].close()

    async def _ask_all(self, address: str) -> None:
        try:
            while groups := self._wanted.pop(address, None):
                await self._ask(address, groups)
        finally:
            del self._asking[address]

    async def _ask(self, address: str, groups: list[tuple[Sequence[RequestKey], asyncio.Future[Specs]]]) -> None:
        try:
            found = await self._find(address, [key for keys, _ in groups for key in keys])
        except BaseException as error:
            for _, answer in groups:
                if isinstance(error, UnavailableError) and not answer.done():
                    answer.set_exception(error)
                answer.cancel()
            if not isinstance(error, UnavailableError):
                raise
            return
        for keys, answer in groups:
            if not answer.done():
                answer.set_result({key: found[key] for key in keys if key in found})

    async def _find(self, address: str, keys: Iterable[RequestKey]) -> Specs:
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._token)
        stub, wanted = gw_grpc.SpecSourceStub(self._channels[address]), keys_to_proto(keys)
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + PATIENCE_S
        while True:
            try:
                answer = await whole_answer(stub.ReadSpecs(wanted, timeout=ANSWER_S))
            except UnavailableError as error:
                if loop.time() > give_up_s:
                    raise UnavailableError(f"the gateway at {address} does not send its prompts: {error}") from error
                await asyncio.sleep(RETRY_S)
            else:
                return _by_key(answer)
