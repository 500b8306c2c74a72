"""The operator's client of the supervisor: it follows the supervisor's address, and reports when none answers.

Orders, and refusals of them, are tested through a gateway's endpoints (tests/unit/gateway/test_end.py).
"""

from __future__ import annotations

import pytest

from alignedserve.control.supervisor_client import ORDERS, SupervisorClient
from alignedserve.errors import InvalidRequestError, UnavailableError
from alignedserve.proto import supervisor_pb2 as sv
from support.fake_cluster import TOKEN, FakeCluster


async def test_it_goes_to_where_the_supervisor_is_now() -> None:
    async with FakeCluster() as first, FakeCluster() as second:
        where = first.address
        client = SupervisorClient(TOKEN, lambda: where)
        await client.restart(["decode"])
        where = second.address
        await client.scale(decode=2)
        await client.close()
    assert first.orders == [sv.RestartRequest(roles=["decode"])]
    assert second.orders == [sv.ScaleRequest(decode=2)]


async def test_where_none_answers_every_call_says_so() -> None:
    async with FakeCluster() as cluster:
        address = cluster.address
    client = SupervisorClient(TOKEN, lambda: address)
    for call in (client.status, client.check_integrity, client.scale, client.restart, client.stop):
        with pytest.raises(UnavailableError, match="the supervisor cannot be reached: UNAVAILABLE"):
            await call()
    await client.close()


async def test_an_order_that_makes_no_sense_names_what_it_may_hold() -> None:
    client = SupervisorClient(TOKEN, lambda: "127.0.0.1:1")
    with pytest.raises(InvalidRequestError, match="'replicas' is not known here; known fields: prefill and decode"):
        await ORDERS["scale"].carry_out(client, {"replicas": 2})
    with pytest.raises(InvalidRequestError, match="'role' is not known here; known fields: roles"):
        await ORDERS["restart"].carry_out(client, {"role": "decode"})
