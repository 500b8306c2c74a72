"""TLS, hanging connections, and invalid settings of a client; sync and async."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from alignedserve.client import AsyncClient, Client, ConfigError, UnavailableError
from support.breaking_inference import BreakingInference, serve
from support.certificates import Authority
from support.fake_cluster import FakeCluster, silent_script
from support.forwarder import Forwarder
from support.gateway import RunningGateway
from support.inference import ask_async, ask_sync

BOTH = pytest.mark.parametrize("ask", [ask_sync, ask_async], ids=["sync", "async"])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(authority: Authority) -> Iterator[str]:
    """A server with a certificate for `front.test` and 127.0.0.1."""
    pair = authority.pair("front", ("front.test", "127.0.0.1"))
    server, address = serve(BreakingInference([1, 2]), grpc.ssl_server_credentials([pair]))
    yield address
    server.stop(0).wait()


@BOTH
def test_a_server_is_checked_by_its_certificate(ask: Callable[..., Any], secure: str, authority: Authority) -> None:
    path = authority.file
    roots = path.read_bytes()
    localhost = secure.replace("127.0.0.1", "localhost")
    for address, settings in (
        (secure, {"root_certificates": roots}),
        (secure, {"root_certificates": path, "tls": True}),
        (secure, {"root_certificates": str(path)}),
        (localhost, {"root_certificates": roots, "server_name": "front.test"}),
        (secure, {"tls": grpc.ssl_channel_credentials(roots)}),
    ):
        assert ask(address, settings, "generate", "go").text == "<0><1><2>"
        assert ask(address, settings, "stream", "go")[-1].usage.completion_tokens == 3


@BOTH
def test_a_server_that_cannot_prove_itself_is_unavailable(
    ask: Callable[..., Any], secure: str, authority: Authority
) -> None:
    for settings in ({"tls": True}, {}, {"root_certificates": authority.file, "server_name": "other.test"}):
        with pytest.raises(UnavailableError):
            ask(secure, {**settings, "max_retries": 0, "resume_s": 0}, "generate", "go")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"root_certificates": "/nowhere/roots.pem"}, "root_certificates cannot be read"),
        ({"root_certificates": b"x", "tls": grpc.ssl_channel_credentials()}, "not both"),
        ({"server_name": "front.test"}, "requires TLS"),
        ({"connect_timeout_s": 0}, "connect_timeout_s"),
        ({"keepalive_s": -1}, "keepalive_s"),
        ({"resume_s": -1}, "resume_s"),
        ({"resume_s": float("nan")}, "resume_s"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"max_retries": -1}, "max_retries"),
        ({"application": "größe"}, "application must be printable ASCII"),
        ({"application": "a\nb"}, "application must be printable ASCII"),
    ],
)
def test_a_client_that_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=words):
            kind("a:1", **settings)


@BOTH
def test_a_server_that_takes_connections_and_says_nothing_is_given_up(ask: Callable[..., Any]) -> None:
    server, address = serve(BreakingInference([1, 2]))
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            hung = f"127.0.0.1:{silent.getsockname()[1]}"
            began_s = time.monotonic()
            settings = {"connect_timeout_s": 0.3, "max_retries": 0}
            with pytest.raises(UnavailableError):
                ask(hung, settings, "generate", "go")
            assert 0.25 < time.monotonic() - began_s < 4
            assert ask([hung, address], settings, "generate", "go").text == "<0><1><2>"
    finally:
        server.stop(0).wait()


async def test_a_connection_that_falls_silent_is_replaced_where_it_is_asked_for_signs_of_life(
    cluster: FakeCluster, gateway: RunningGateway
) -> None:
    """An unreachable node sends neither tokens nor an end. The stream continues through another connection."""
    cluster.script = silent_script
    async with (
        Forwarder([gateway.grpc_address]) as forwarder,
        AsyncClient([forwarder.address, gateway.grpc_address], keepalive_s=0.3) as client,
    ):
        stream = client.stream("a", max_tokens=4)
        waiting = asyncio.ensure_future(anext(stream))
        await cluster.wait_for(lambda: cluster.submitted)
        forwarder.freeze()
        await cluster.wait_for(lambda: len(cluster.submitted) == 2, timeout_s=10.0)
        spec = cluster.submitted[-1]
        cluster.emit(spec, [101])
        assert (await waiting).token_ids == (101,)
        assert stream.client_timings.attempts == 2
        await stream.close()
