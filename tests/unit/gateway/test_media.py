"""Posted bodies: encoded ones are refused, and a web page may send only types that need a preflight."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.gateway_front import CHAT, COMPLETIONS, HI, Front

ORIGIN = {"origin": "http://evil.example"}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 0, "echo": True},
    CHAT: {"messages": HI, "max_tokens": 1},
}


async def posts(front: Front) -> list[str]:
    paths = (await front.client.get("/openapi.json")).json()["paths"]
    return [path.replace("{request_id}", "cmpl-1") for path, item in paths.items() if "post" in item]


def refusal(path: str, answer: httpx.Response) -> dict[str, str | None]:
    """The error of an answer, in the shape of the API at the path."""
    body: dict[str, Any] = answer.json()
    error: dict[str, str | None] = body["error"]
    assert error["type"] == "invalid_request_error"
    if path.startswith("/v1/messages"):  # Anthropic's
        assert (body["type"], error.keys()) == ("error", {"type", "message"})
    else:
        assert (error["code"], error["param"]) == ("unsupported_media_type", None)
    return error


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "x-nonsense", "identity, gzip", "GZIP"])
async def test_an_encoded_body_is_415_wherever_it_is_posted(front: Front, encoding: str) -> None:
    for path in await posts(front):
        answer = await front.client.post(path, content=b"{}", headers={"content-encoding": encoding})
        assert answer.status_code == 415, path
        assert answer.headers["accept-encoding"] == "identity"
        error = refusal(path, answer)
        assert repr(encoding.removeprefix("identity, ")) in error["message"]
    assert not front.port.submitted


@pytest.mark.parametrize("encoding", ["identity", "Identity", "", "identity, identity"])
async def test_an_encoding_that_changes_nothing_is_taken(front: Front, encoding: str) -> None:
    answer = await front.client.post(COMPLETIONS, json=BODIES[COMPLETIONS], headers={"content-encoding": encoding})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "text/plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
        "application/jsonx",
        "application/json, text/plain",
    ],
)
@pytest.mark.parametrize("page", [ORIGIN, {"origin": "null"}, {"sec-fetch-site": "cross-site"}])
async def test_a_page_that_its_browser_does_not_ask_for_is_415(
    front: Front, page: dict[str, str], kind: str | None
) -> None:
    headers = page if kind is None else {**page, "content-type": kind}
    for path in await posts(front):
        answer = await front.client.post(path, content=b"{}", headers=headers)
        assert answer.status_code == 415, path
        refusal(path, answer)
    assert not front.port.submitted


async def test_two_kinds_are_none(front: Front) -> None:
    headers = [("origin", "http://a"), ("content-type", "application/json"), ("content-type", "text/plain")]
    answer = await front.client.post(COMPLETIONS, content=b"{}", headers=headers)
    assert answer.status_code == 415


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json; charset=utf-8"])
async def test_a_page_that_says_json_is_answered(front: Front, kind: str) -> None:
    answer = await front.client.post(COMPLETIONS, json=BODIES[COMPLETIONS], headers={**ORIGIN, "content-type": kind})
    assert answer.status_code == 200


async def test_a_preflight_gets_no_leave(front: Front) -> None:
    asked = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    for path in await posts(front):
        answer = await front.client.options(path, headers=asked)
        assert answer.status_code == 405, path
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_without_an_origin_any_kind_is_read_as_json(front: Front, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = b'{"prompt": "hi", "max_tokens": 0, "echo": true}'
    assert (await front.client.post(COMPLETIONS, content=body, headers=headers)).status_code == 200


async def test_a_slash_too_many_is_not_found_and_leads_nowhere(front: Front) -> None:
    for path in ("/v1/completions/", "/health/"):
        answer = await front.client.get(path, headers={"Host": "elsewhere.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
