"""API keys over HTTP and gRPC: which requests are accepted, the file of keys, and that no output contains a key."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest

from alignedserve.client import AsyncClient, AuthenticationError
from alignedserve.cluster import records
from alignedserve.cluster.cli.main import main
from alignedserve.cluster.launch.preflight import open_door_note
from alignedserve.config import GatewayConfig
from alignedserve.errors import ConfigError
from alignedserve.gateway.api_keys import RECHECK_S, ApiKeys, of_headers
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import inference_pb2 as inf
from alignedserve.proto import inference_pb2_grpc as inf_grpc
from support.fake_cluster import FakeCluster
from support.gateway import RunningGateway, running_gateway

KEY, OTHER = "sk-first-4711", "sk-second-0815"
BODY = {"prompt": "a b c", "max_tokens": 2}
ASKS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/alignedserve/status"),
)


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    path = key_file(tmp_path, f"# the first team\n{KEY}\n\n  {OTHER}  \n")
    async with FakeCluster() as cluster, running_gateway(cluster, api_key_file=str(path)) as gateway:
        yield gateway


# ---- HTTP


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer sk-firs"}, {"authorization": KEY}, {"x-api-key": ""}]
)
async def test_without_a_key_only_probes_are_answered(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    for method, path in ASKS:
        answer = await http.request(method, path, headers=headers, json=BODY if method == "POST" else None)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "authentication_error", None)
    for path in ("/health", "/live", "/metrics", "/openapi.json"):
        assert (await http.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {OTHER}"}, {"X-API-Key": KEY}],
)
async def test_every_key_of_the_file_gets_in(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert (await http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    assert (await http.get("/alignedserve/status", headers=headers)).status_code == 200


async def test_a_path_that_is_written_differently_opens_nothing(http: httpx.AsyncClient) -> None:
    for path in ("//v1/models", "/v1//models", "/health/../v1/models", "/v1/models/", "/v1/models/%2e", "/V1/models"):
        answer = await http.get(httpx.URL(http.base_url, raw_path=path.encode()))
        assert answer.status_code in (401, 404, 307), path
        assert "max_model_len" not in answer.text


async def test_the_answer_comes_before_the_body(gateway: RunningGateway) -> None:
    """The gateway does not wait for a missing body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{")
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 10.0)
    writer.close()


async def test_the_description_says_that_keys_are_wanted(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    assert described["security"] == [{"bearer": []}, {"header": []}]
    assert described["paths"]["/health"]["get"]["security"] == []
    assert "401" in described["paths"]["/alignedserve/status"]["get"]["responses"]


# ---- gRPC


async def test_grpc_asks_for_a_key_too(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncClient(gateway.grpc_address) as client:
        for asked in (client.generate("a", max_tokens=1), client.models(), client.cancel("x")):
            with pytest.raises(AuthenticationError) as refused:
                await asked
            assert refused.value.code == "invalid_api_key"
        with pytest.raises(AuthenticationError):
            await anext(client.stream("a", max_tokens=1))
    async with AsyncClient(gateway.grpc_address, api_key=KEY) as client:
        assert (await client.generate("a", max_tokens=2)).usage.completion_tokens == 2
        assert KEY not in repr(client._planner)
        assert KEY not in repr(client._planner.models(None))
    monkeypatch.setenv("ALIGNEDSERVE_API_KEY", OTHER)
    async with AsyncClient(gateway.grpc_address) as client:
        assert [model.id for model in await client.models()] == ["tiny"]


async def test_grpc_answers_before_a_message_came(gateway: RunningGateway) -> None:
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        call = channel.stream_stream("/alignedserve.v1.Inference/Stream")()
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        stub = inf_grpc.InferenceStub(channel)
        await stub.ListModels(pb.Empty(), metadata=(("authorization", f"Bearer {KEY}"),))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(inf.GenerateRequest(prompt="a"), metadata=(("authorization", "Bearer x"),))


# ---- the file


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        (KEY, 0o644, "chmod 600"),
        (KEY, 0o602, "chmod 600"),
        ("# nothing\n\n", 0o600, "has no keys"),
        (f"{KEY}\ntwo words\n", 0o600, "line 2 .* is not a key"),
        ("schlüssel", 0o600, "line 1 .* is not a key"),
        ("k" * (2 << 20), 0o600, "over .* bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_its_text(
    tmp_path: Path, text: str, mode: int, problem: str
) -> None:
    path = key_file(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=problem) as refused:
        ApiKeys(str(path))
    for word in (KEY, "two words", "schlüssel", "kkkk"):
        assert word not in refused.value.message


def test_no_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ApiKeys(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="is not a file"):
        ApiKeys(str(tmp_path))


def test_a_rotation_counts_within_a_second_and_half_of_one_locks_no_key_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    path = key_file(tmp_path, KEY)
    keys = ApiKeys(str(path), lambda: now[0])

    def lets_in(key: str) -> bool:
        now[0] += RECHECK_S
        try:
            keys.check([key.encode()])
        except AuthenticationError:
            return False
        return True

    with caplog.at_level(logging.INFO):
        assert (lets_in(KEY), lets_in(OTHER)) == (True, False)
        replacement = key_file(tmp_path, OTHER).rename(tmp_path / "new")
        assert lets_in(KEY)  # the file is away for a moment
        os.replace(replacement, path)
        assert (lets_in(KEY), lets_in(OTHER)) == (False, True)
        path.write_text("")
        assert lets_in(OTHER)
        key_file(tmp_path, f"{KEY}\n{OTHER}")
        assert (lets_in(KEY), lets_in(OTHER)) == (True, True)
        path.chmod(0o644)
        assert (lets_in(KEY), lets_in(KEY)) == (True, True)
    assert KEY not in caplog.text
    assert OTHER not in caplog.text
    assert caplog.text.count("stay in force") == 3  # once a trouble, not once a second


def test_the_file_is_not_looked_at_more_often_than_once_a_second(tmp_path: Path) -> None:
    now = [0.0]
    path = key_file(tmp_path, KEY)
    keys = ApiKeys(str(path), lambda: now[0])
    key_file(tmp_path, OTHER)
    keys.check([KEY.encode()])
    now[0] += RECHECK_S
    keys.check([OTHER.encode()])


def test_keys_are_found_in_headers_and_metadata() -> None:
    assert of_headers([(b"Authorization", b"Bearer  k1 "), ("x-api-key", "k2"), (b"authorization", b"Basic k3")]) == [
        b"k1",
        b"k2",
    ]


# ---- the operator's commands


def test_no_command_prints_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = key_file(tmp_path, KEY)
    assert main(["config", "--api-key-file", str(path)]) == 0
    printed = capsys.readouterr()
    assert f"api_key_file: {path}" in printed.out
    assert KEY not in printed.out + printed.err
    path.chmod(0o644)
    assert main(["serve", "--api-key-file", str(path)]) == 2
    assert "chmod 600" in capsys.readouterr().err


async def test_status_of_the_same_user_goes_on_working(
    gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("ALIGNEDSERVE_API_KEY", raising=False)

    async def status(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["status", *arguments])

    assert await status("--url", gateway.url) == 1
    assert "asks for an API key" in capsys.readouterr().err
    assert await status("--url", gateway.url, "--api-key-file", str(tmp_path / "keys")) == 0
    monkeypatch.setenv("ALIGNEDSERVE_API_KEY", OTHER)
    assert await status("--url", gateway.url) == 0
    monkeypatch.delenv("ALIGNEDSERVE_API_KEY")
    record = records.Record("0123abcd", gateway.url, os.getpid(), 1.0, "default", str(tmp_path / "keys"))
    record.write()
    assert await status() == 0
    assert await status("--url", gateway.url) == 0
    assert KEY not in (tmp_path / "run" / "0123abcd.json").read_text()
    record.remove()


@pytest.mark.parametrize(
    ("host", "key_path", "warned"),
    [
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("::1", "", False),
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("", "", True),
        ("192.0.2.7", "", True),
        ("0.0.0.0", "keys", False),
    ],
)
def test_a_door_that_is_open_to_everybody_is_named(host: str, key_path: str, warned: bool) -> None:
    note = open_door_note(GatewayConfig(host=host, api_key_file=key_path))
    assert ("anyone who can reach port 8000 or 9000" in note) is warned
