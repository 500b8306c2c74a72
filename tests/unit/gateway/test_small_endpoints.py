"""Endpoints besides generation that clients of other servers call: tokens, models, load, request ids, CORS."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve import __version__
from alignedserve.config import Config, GatewayConfig, ModelConfig
from alignedserve.errors import ConfigError
from alignedserve.text import ChatTemplate, Tokenizer
from support.fake_cluster import FakeCluster, silent_script
from support.gateway import RunningGateway, running_gateway
from support.gateway_front import CHAT, COMPLETIONS, HI, TINY, Front

FOUND = Tokenizer.from_folder(TINY)
assert FOUND is not None
TOKENIZER: Tokenizer = FOUND
PAGE = "https://page.example"


async def post(front: Front, path: str, **body: Any) -> dict[str, Any]:
    answer = await front.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


# ---- tokens


@pytest.mark.parametrize("text", ["", "Return the list", "a <|end|> b", "naïve 😀 " * 900])
async def test_a_prompt_has_the_tokens_that_a_completion_computes(front: Front, text: str) -> None:
    answer = await post(front, "/tokenize", prompt=text, model="tiny", return_token_strs=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert answer["token_strs"] == [TOKENIZER.backend.id_to_token(token) for token in answer["tokens"]]
    if 0 < answer["count"] < 500:
        (spec,) = await front.submit(COMPLETIONS, {"prompt": text})
        assert answer["tokens"] == spec.prompt_token_ids
    back = await post(front, "/detokenize", tokens=answer["tokens"])
    assert back == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [7]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": HI}),
    ],
)
async def test_a_field_that_is_not_read_is_named(front: Front, path: str, body: dict[str, Any]) -> None:
    answer = await front.client.post(path, json={**body, "color": "red"})
    assert answer.status_code == 200
    assert answer.headers["x-alignedserve-ignored-fields"] == "color"


async def test_special_tokens_are_text_unless_they_are_allowed_and_come_back_by_name(front: Front) -> None:
    plain = await post(front, "/tokenize", prompt="a<|end|>b")
    special = await post(front, "/tokenize", prompt="a<|end|>b", allow_special_tokens=True)
    end = TOKENIZER.backend.token_to_id("<|end|>")
    assert end in special["tokens"]
    assert end not in plain["tokens"]
    assert special["token_strs"] is None
    assert (await post(front, "/detokenize", tokens=special["tokens"]))["prompt"] == "a<|end|>b"


async def test_a_conversation_has_the_tokens_that_a_chat_computes(front: Front) -> None:
    (spec,) = await front.submit(CHAT, {"messages": HI})
    answer = await post(front, "/tokenize", messages=HI)
    assert answer["tokens"] == spec.prompt_token_ids
    template = ChatTemplate.from_folder(TINY, TOKENIZER.special_tokens)
    assert template is not None
    without = await post(front, "/tokenize", messages=HI, add_generation_prompt=False)
    written = await post(front, "/detokenize", tokens=without["tokens"])
    assert written["prompt"] == template.render(HI, add_generation_prompt=False)
    assert answer["tokens"][: without["count"]] == without["tokens"]
    assert answer["count"] > without["count"]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": 5}, "prompt", "invalid_type"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        (
            "/tokenize",
            {"messages": HI, "continue_final_message": True},
            "continue_final_message",
            "invalid_value",
        ),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": ["a"]}, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [2048]}, "tokens", "invalid_value"),
        ("/tokenize", b"{", None, "invalid_json"),
    ],
)
async def test_what_cannot_be_tokenised_is_named(front: Front, path: str, body: Any, param: str, code: str) -> None:
    error = await front.error(path, body)
    assert (error["param"], error["code"]) == (param, code)


async def test_another_model_and_a_model_without_tokenizer(front: Front) -> None:
    assert (await front.error("/tokenize", {"prompt": "a", "model": "x"}, 404))["code"] == "model_not_found"
    assert "no tokenizer" in (await Front(tokenizer=None, template=None).error("/tokenize", {"prompt": "a"}))["message"]
    assert "--chat-template" in (await Front(template=None).error("/tokenize", {"messages": HI}))["message"]


# ---- models, version, ping, load, embeddings


async def test_a_model_has_what_clients_read() -> None:
    front = Front(root="org/tiny")
    (model,) = (await front.client.get("/v1/models")).json()["data"]
    assert (model["root"], model["parent"], model["max_model_len"]) == ("org/tiny", None, 512)
    (permission,) = model["permission"]
    assert (permission["object"], permission["allow_sampling"]) == ("model_permission", True)


@pytest.mark.parametrize(
    ("path", "root"), [("tiny", "tiny"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("/srv/models/mine", "mine")]
)
def test_a_models_root_is_its_name_on_a_hub_and_shows_no_folder(path: str, root: str) -> None:
    assert Config(model=ModelConfig(path=path, served_name="x")).model_root == root


async def test_the_version(front: Front) -> None:
    assert (await front.client.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_tells_whether_the_cluster_can_serve(
    gateway: RunningGateway, cluster: FakeCluster, http: httpx.AsyncClient, method: str
) -> None:
    answer = await http.request(method, "/ping")
    assert (answer.status_code, answer.content) == (200, b"")
    cluster.set_state("decode", "")
    async with asyncio.timeout(5.0):
        while (await http.request(method, "/ping")).status_code != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_the_load_is_the_number_of_open_requests(
    gateway: RunningGateway, cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/load")).json() == {"server_load": 0}
    cluster.script = silent_script
    asked = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "a", "n": 3}))
    await cluster.wait_for(lambda: len(cluster.submitted) == 3)
    assert (await http.get("/load")).json() == {"server_load": 3}
    asked.cancel()


async def test_embeddings_are_refused_by_name(front: Front) -> None:
    error = await front.error("/v1/embeddings", {"model": "tiny", "input": "a"})
    assert error["code"] == "unsupported_parameter"
    assert "no embeddings" in error["message"]


# ---- request ids


async def test_a_request_id_comes_back_and_is_recorded(cluster: FakeCluster, tmp_path: Path) -> None:
    log = tmp_path / "requests"
    async with (
        running_gateway(cluster, request_log=str(log)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as http,
    ):
        body = {"prompt": "a", "max_tokens": 2}
        for headers in ({"X-Request-Id": "mine-7"}, {"X-Request-Id": "mine-7"}, {}):  # a client's retry has the same
            answer = await http.post(COMPLETIONS, json=body, headers=headers)
            assert answer.status_code == 200
            assert answer.headers.get("x-request-id") == headers.get("X-Request-Id")
            assert answer.json()["id"].startswith("cmpl-")
        refused = await http.post(COMPLETIONS, json={"prompt": 5}, headers={"X-Request-Id": "mine-8"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine-8")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry.get("x_request_id") for entry in entries] == ["mine-7", "mine-7", None]
    assert len({entry["request_id"] for entry in entries}) == 3


# ---- CORS


async def preflight(http: httpx.AsyncClient, origin: str, method: str = "POST") -> httpx.Response:
    asked = {"Origin": origin, "Access-Control-Request-Method": method}
    return await http.options(COMPLETIONS, headers={**asked, "Access-Control-Request-Headers": "content-type"})


async def test_no_page_may_call_unless_it_is_named(http: httpx.AsyncClient) -> None:
    assert (await preflight(http, PAGE)).status_code == 405
    answer = await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, headers={"Origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_named_page_may_call(cluster: FakeCluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k" * 32 + "\n")
    keys.chmod(0o600)
    async with (
        running_gateway(cluster, cors_origins=f"https://other.example, {PAGE}", api_key_file=str(keys)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as http,
    ):
        allowed = await preflight(http, PAGE)  # needs no key: a browser sends none with it
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
        assert (await preflight(http, "https://evil.example")).status_code == 400
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        sdk = {**asked, "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os,anthropic-version"}
        assert (await http.options(COMPLETIONS, headers=sdk)).status_code == 200
        assert (await preflight(http, PAGE, "DELETE")).status_code == 400
        body = {"prompt": "a", "max_tokens": 1}
        refused = await http.post(COMPLETIONS, json=body, headers={"Origin": PAGE})
        assert refused.status_code == 401
        headers = {"Origin": PAGE, "Authorization": "Bearer " + "k" * 32}
        answer = await http.post(COMPLETIONS, json=body, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        assert "access-control-allow-credentials" not in answer.headers
        form: Any = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        assert (await http.post("/v1/files", headers=headers, **form)).status_code != 415
        text = {**headers, "Content-Type": "text/plain"}
        assert (await http.post(COMPLETIONS, headers=text, content=b"{}")).status_code == 415
        evil = {**headers, "Origin": "https://evil.example"}
        assert (await http.post("/v1/files", headers=evil, **form)).status_code == 415


def test_cookies_need_pages_by_name() -> None:
    with pytest.raises(ConfigError, match="by name"):
        Config(gateway=GatewayConfig(cors_origins="*", cors_credentials=True))
    assert Config(gateway=GatewayConfig(cors_origins=PAGE, cors_credentials=True)).gateway.cors_credentials
