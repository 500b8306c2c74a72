"""TLS between roles: without a certificate of the cluster's authority, no peer gets to the check of the token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization

from alignedserve.control.rpc import RpcServer, TokenChannel, open_channel
from alignedserve.control.tls import AUTHORITY, CERTIFICATE, KEY, SWITCH, tls_files
from alignedserve.errors import ConfigError
from support.certificates import Authority

TOKEN = "the cluster's"
METHOD = "/test.Echo/Echo"


async def echo(request: bytes, context: Any) -> bytes:
    return request


def register(servicer: Any, server: Any) -> None:
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(servicer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))


class Served:
    """An echo server with the environment at its start."""

    async def __aenter__(self) -> str:
        self._server = RpcServer(TOKEN)
        self._server.add(register, echo)
        return await self._server.start()

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop()


async def ask(channel: TokenChannel) -> bytes:
    try:
        answer: bytes = await channel.unary_unary(METHOD)(b"hello", timeout=5.0)
    finally:
        await channel.close()
    return answer


async def refused(channel: TokenChannel) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(channel)
    return error.value.code()


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


async def test_both_ends_show_certificates_and_the_token_is_asked_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    use(monkeypatch, authority.environment("node"))
    async with Served() as address:
        assert await ask(open_channel(address, TOKEN)) == b"hello"
        assert await refused(open_channel(address, "another")) is grpc.StatusCode.UNAUTHENTICATED

        in_the_clear = TokenChannel(grpc.aio.insecure_channel(address), TOKEN)
        assert await refused(in_the_clear) is grpc.StatusCode.UNAVAILABLE
        without_certificate = grpc.ssl_channel_credentials(authority.file.read_bytes())
        assert await refused(TokenChannel(grpc.aio.secure_channel(address, without_certificate), TOKEN)) is (
            grpc.StatusCode.UNAVAILABLE
        )
        use(monkeypatch, Authority(tmp_path / "other").environment("node"))
        monkeypatch.setenv(AUTHORITY, str(authority.file))  # it trusts the server, but the server does not trust it
        assert await refused(open_channel(address, TOKEN)) is grpc.StatusCode.UNAVAILABLE


async def test_a_server_whose_certificate_does_not_name_its_address_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Authority(tmp_path).environment("node", ["10.1.2.3"]))
    async with Served() as address:
        assert await refused(open_channel(address, TOKEN)) is grpc.StatusCode.UNAVAILABLE


async def test_a_server_without_tls_hears_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Served() as address:
        assert await ask(open_channel(address, TOKEN)) == b"hello"
        use(monkeypatch, Authority(tmp_path).environment("node"))
        assert await refused(open_channel(address, TOKEN)) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("off", ["0", "false", "no", ""])
def test_it_is_on_where_ray_says_so(off: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Authority(tmp_path).environment("node"))
    assert tls_files() is not None
    monkeypatch.setenv(SWITCH, "True")
    assert tls_files() is not None
    monkeypatch.setenv(SWITCH, off)
    assert tls_files() is None


@pytest.mark.parametrize("name", [CERTIFICATE, KEY, AUTHORITY])
async def test_what_is_wrong_with_a_file_is_said_with_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Authority(tmp_path).environment("node"))
    server = RpcServer(TOKEN)

    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=f"{SWITCH} is on, but {name} is not set"):
        await server.start()
    monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=f"{name}=.*/nowhere cannot be read: No such file"):
        await server.start()
    (tmp_path / "nowhere").write_text("no certificate")
    with pytest.raises(ConfigError, match=f"{name}=.*/nowhere"):
        open_channel("127.0.0.1:1", TOKEN)


def test_a_key_of_another_certificate_or_with_a_password_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    use(monkeypatch, authority.environment("node"))
    own = Path(authority.environment("node")[KEY])
    monkeypatch.setenv(KEY, authority.environment("other")[KEY])
    with pytest.raises(ConfigError, match="are not a PEM certificate and its key"):
        tls_files()

    key = serialization.load_pem_private_key(own.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"password")
    own.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    monkeypatch.setenv(KEY, str(own))
    with pytest.raises(ConfigError, match="without a password: the key is encrypted"):
        tls_files()
