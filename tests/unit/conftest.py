"""Fixtures that several files share. A file's own fixture of the same name goes before the one here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # a test that asks for none of these imports nothing for them
    import httpx

    from alignedserve.kv_pool.pool import KvPool
    from support.fake_cluster import FakeCluster
    from support.gateway import RunningGateway
    from support.gateway_front import Front


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    from support.fake_cluster import FakeCluster

    async with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
async def gateway(cluster: FakeCluster) -> AsyncIterator[RunningGateway]:
    from support.gateway import running_gateway

    async with running_gateway(cluster) as gateway:
        yield gateway


@pytest.fixture
async def http(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    import httpx

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as http:
        yield http


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    from support.gateway_front import Front

    front = Front()
    yield front
    await front.client.aclose()


@pytest.fixture
def memory() -> memoryview:
    """Of a pool's allocation table."""
    from support.kv_pool import table_memory

    return table_memory()


@pytest.fixture
def pool(memory: memoryview) -> Iterator[KvPool]:
    """In the end its books add up, and so do those of a pool that goes on from its table."""
    from support.kv_pool import open_pool

    pool = open_pool(memory)
    yield pool
    pool.check_integrity()
    open_pool(memory).check_integrity()
