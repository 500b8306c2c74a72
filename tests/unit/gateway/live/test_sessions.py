"""The cookie of a browser: who gets in with it, until when, and from which pages."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from alignedserve.errors import AuthenticationError
from alignedserve.gateway.api_keys import RECHECK_S, ApiKeys
from alignedserve.gateway.live.sessions import LASTS_S, Sessions, cookie_of

KEY, OTHER = "sk-first", "sk-second"


COOKIE = Sessions("cluster").cookie


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def keys_of(folder: Path, clock: Clock | None = None) -> ApiKeys:
    path = folder / "keys"
    path.write_text(f"{KEY}\n{OTHER}\n")
    path.chmod(0o600)
    return ApiKeys(str(path), *([clock] if clock else []), secret="cluster")


def headers(value: str, **more: str) -> list[tuple[bytes, bytes]]:
    found = [(b"cookie", f'theme=dark; x={{"a":1}}; {COOKIE}={value}'.encode())]
    return found + [(name.replace("_", "-").encode(), text.encode()) for name, text in more.items()]


def test_a_session_is_its_keys_owner(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    owner = keys.check([KEY.encode()])
    assert keys.identify(headers(keys.begin_session(KEY)), "GET") == owner
    assert keys.identify(headers(keys.begin_session(KEY), sec_fetch_site="same-origin"), "POST") == owner
    with pytest.raises(AuthenticationError):
        keys.begin_session("sk-unknown")


def test_another_sites_page_gets_nothing(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    for site in ("cross-site", "same-site"):
        with pytest.raises(AuthenticationError):
            keys.identify(headers(keys.begin_session(KEY), sec_fetch_site=site), "GET")


@pytest.mark.parametrize(
    ("site", "mode", "method", "shown"),
    [
        ("same-site", "navigate", "GET", True),
        ("same-site", "navigate", "POST", False),  # a form
        ("same-site", "cors", "GET", False),
        ("cross-site", "navigate", "GET", False),
    ],
)
def test_only_a_link_of_the_same_site_may_lead_here(
    site: str, mode: str, method: str, shown: bool, tmp_path: Path
) -> None:
    keys = keys_of(tmp_path)
    sent = headers(keys.begin_session(KEY), sec_fetch_site=site, sec_fetch_mode=mode)
    with contextlib.nullcontext() if shown else pytest.raises(AuthenticationError):
        assert keys.identify(sent, method) == keys.check([KEY.encode()])


def test_a_key_in_a_header_counts_before_the_cookie(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    both = headers(keys.begin_session(KEY), x_api_key=OTHER)
    assert keys.identify(both, "GET") == keys.check([OTHER.encode()])
    with pytest.raises(AuthenticationError):
        keys.identify(headers(keys.begin_session(KEY), x_api_key="sk-unknown"), "GET")


def test_a_session_ends_with_its_key(tmp_path: Path) -> None:
    clock = Clock()
    keys = keys_of(tmp_path, clock)
    value = keys.begin_session(KEY)
    (tmp_path / "keys").write_text(f"{OTHER}\n")
    clock.now_s += 2 * RECHECK_S
    with pytest.raises(AuthenticationError):
        keys.identify(headers(value), "GET")


def test_a_session_ends_with_its_time() -> None:
    clock = Clock()
    sessions = Sessions("cluster", clock)
    value = sessions.begin(b"hash")
    clock.now_s += LASTS_S - 2
    assert sessions.key_hash(value) == b"hash"
    clock.now_s += 3
    assert sessions.key_hash(value) is None


def test_only_this_cluster_makes_cookies() -> None:
    value = Sessions("cluster").begin(b"hash")
    assert Sessions("cluster").key_hash(value) == b"hash"
    assert Sessions("another").key_hash(value) is None
    for place in range(0, len(value), 7):
        changed = value[:place] + ("A" if value[place] != "A" else "B") + value[place + 1 :]
        assert Sessions("cluster").key_hash(changed) is None
    for nonsense in ("", "x", "é", "A" * 3, "A" * 44, value[:-4]):
        assert Sessions("cluster").key_hash(nonsense) is None


@pytest.mark.parametrize("cookie", [b"", b"=", b"\xff\xfe", b"a=b; c", f"{COOKIE}".encode(), b'"' * 50])
def test_odd_cookies_are_none(cookie: bytes) -> None:
    assert cookie_of([(b"cookie", cookie)], COOKIE) == ""


def test_clusters_on_one_host_do_not_take_each_others_cookies() -> None:
    other = Sessions("another cluster").cookie
    assert other != COOKIE
    both = [(b"cookie", f"{COOKIE}=mine; {other}=its".encode())]
    assert (cookie_of(both, COOKIE), cookie_of(both, other)) == ("mine", "its")
