"""Fixtures that several files share. A file's own fixture of the same name takes precedence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # a test that uses none of these fixtures must not import their modules
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
    """The memory of a shard's allocation table."""
    from support.kv_pool import table_memory

    return table_memory()


@pytest.fixture
def pool(memory: memoryview) -> Iterator[KvPool]:
    """At the end its accounting is checked, and that of a shard that continues from its table."""
    from support.kv_pool import open_pool

    pool = open_pool(memory)
    yield pool
    pool.check_integrity()
    open_pool(memory).check_integrity()
