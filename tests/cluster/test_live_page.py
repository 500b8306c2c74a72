"""The live page in a browser, in front of a cluster under load: figures, a kill, accessibility, keyboard, pictures.

With PICTURES=1 in the environment the pictures of docs/images are made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.control.samples import value
from alignedserve.gateway.live import feed as live_feed
from alignedserve.model import resolve_model
from support.browser import NO_AXE, NO_BROWSER, Page, browser_page
from support.fake_cluster import FakeCluster, counting_script, silent_script
from support.gateway import running_gateway
from support.requirements import need, needs

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    needs(NO_BROWSER),
]

PICTURES = Path(__file__).parents[2] / "docs/images"
CLIENTS = 24
LENGTHS = (20, 30, 45, 60, 90, 140, 200, 300)
NEW_TOKENS = 100
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
WAITING = "alignedserve_requests_waiting_in_pool"
OUTPUT = "alignedserve_gateway_output_tokens_total"
KILL_SHOWN_S = 2.0
LIVE = "document.getElementById('feed')?.dataset.state === 'live'"
FOCUSABLE = (
    "[...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]')].filter(one =>"
    " one.tabIndex >= 0 && !one.disabled && one.checkVisibility({visibilityProperty: true})"
    " && !(one.type === 'radio' && !one.checked) && !one.closest('details:not([open]) > :not(summary)'))"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    small = ("--set", "decode.cache_blocks=120", "--set", "scheduler.max_batch_blocks=40")
    with ServeProcess("--model", "tiny", "--cost-model", "rtxpro6000-llama-3.1-8b", *small) as running:
        yield running


@contextlib.contextmanager
def load(server: ServeProcess) -> Iterator[None]:
    """CLIENTS ask one prompt after the other, of many lengths; more than the decode instance can run at once."""
    ended = threading.Event()

    def ask(number: int) -> None:
        draw = random.Random(number)
        while not ended.is_set():
            prompt = [draw.randrange(10, 400) for _ in range(draw.choice(LENGTHS))]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True}
            with contextlib.suppress(Exception):  # a killed worker costs no request, but the server may be ending
                server.post("/v1/completions", body)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)


@contextlib.asynccontextmanager
async def page_of(
    server: ServeProcess, size: str = "desktop", *, dark: bool = False, view: str = ""
) -> AsyncIterator[Page]:
    """The page once it is live. At the end it must not have complained, or asked another host."""
    width, height = SIZES[size]
    async with browser_page() as page:
        await page.open(f"{server.url}/{view}", width=width, height=height, dark=dark)
        await page.wait_for(LIVE)
        yield page
        assert page.complaints == []
        assert page.hosts == {urlsplit(server.url).netloc}


async def numbers(page: Page, **expressions: str) -> dict[str, Any]:
    """Several values of one moment."""
    fields = ", ".join(f"{name}: {expression}" for name, expression in expressions.items())
    return dict(await page.evaluate(f"({{{fields}}})"))


async def metrics(server: ServeProcess) -> str:
    return await asyncio.to_thread(server.metrics)


async def test_its_figures_are_those_of_the_metrics(server: ServeProcess) -> None:
    with load(server):
        async with page_of(server) as page:
            await page.wait_for("Number(document.getElementById('waiting-histogram').dataset.total) > 3")
            await asyncio.sleep(11)  # rates are those of ten seconds
            seen, before, begun_s = [], value(await metrics(server), OUTPUT), time.monotonic()
            for _ in range(20):
                seen.append(value(await metrics(server), WAITING))
                shown = await numbers(
                    page,
                    histogram="Number(document.getElementById('waiting-histogram').dataset.total)",
                    rows="[...document.querySelectorAll('#waiting-buckets tr')].reduce((sum, row) =>"
                    " sum + Number(row.dataset.count), 0)",
                    stage="Number(document.querySelector('#stages [data-state=waiting_in_pool]').dataset.count)",
                    tokens="Number(document.getElementById('tokens-per-s').dataset.value)",
                    running="Number(document.querySelector('[data-decode=decode-0]').dataset.running)",
                )
                assert shown["histogram"] == shown["rows"] == shown["stage"], "one moment, counted in three ways"
                await asyncio.sleep(0.5)
            rate = (value(await metrics(server), OUTPUT) - before) / (time.monotonic() - begun_s)
    assert min(seen) <= shown["histogram"] <= max(seen)
    assert shown["tokens"] == pytest.approx(rate, rel=0.25)
    assert shown["running"] > 0


async def test_what_is_not_known_is_not_shown_as_zero() -> None:
    """No supervisor answers, so there is nothing to show."""
    async with FakeCluster() as cluster, running_gateway(cluster) as gateway, browser_page() as page:
        cluster.no_live = True
        await page.open(f"{gateway.url}/")
        await page.wait_for("document.getElementById('feed')?.dataset.state === 'stale'")
        await page.wait_for("document.querySelector('#stages [data-state=queued]') !== null")
        shown = await numbers(
            page,
            queued="document.querySelector('#stages [data-state=queued] strong').textContent",
            waiting="document.getElementById('waiting-total').textContent",
            empty="document.getElementById('waiting-empty').checkVisibility()",
            words="document.getElementById('waiting-words').textContent",
        )
        assert page.complaints == []
    words = "It is not known what waits: the scheduler tells nothing."
    assert shown == {"queued": "–", "waiting": "–", "empty": False, "words": words}


async def test_the_playground_offers_no_chat_to_a_model_without_a_chat_template(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny"), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    async with (
        FakeCluster(counting_script) as cluster,
        running_gateway(cluster, model_path=folder) as gateway,
        browser_page() as page,
    ):
        await page.open(f"{gateway.url}/#playground")
        await page.wait_for("document.getElementById('playground-no-chat')?.checkVisibility()")
        await page.evaluate("document.getElementById('playground-prompt').focus()")
        await page.write("Return a list of")
        await page.press("Enter", control=True)
        await page.wait_for("document.getElementById('playground-state').dataset.state === 'done'")
        assert page.complaints == []


async def test_a_timeline_outlives_a_poll_that_fails() -> None:
    async with (
        FakeCluster(silent_script) as cluster,
        running_gateway(cluster) as gateway,
        browser_page() as page,
        httpx.AsyncClient(base_url=gateway.url, headers={"x-request-id": "slow-one"}) as client,
    ):
        asked = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9}))
        await cluster.wait_for(lambda: len(gateway.server.ledger))
        await page.open(f"{gateway.url}/#request=slow-one")
        shown = "document.getElementById('request-body')?.checkVisibility() === true"
        await page.wait_for(shown)
        failing = "{ok: false, status: 503, json: async () => ({error: {message: 'no gateway'}})}"
        await page.evaluate(f"window.real = window.fetch; window.fetch = async () => ({failing}); 1")
        await page.wait_for(f"!({shown})")
        await page.evaluate("window.fetch = window.real; 1")
        await page.wait_for(shown)
        asked.cancel()
        await asyncio.wait([asked])


async def test_a_hidden_tab_gives_its_connection_back() -> None:
    """A browser has six connections to a server, so hidden tabs would keep others from loading."""
    async with FakeCluster() as cluster, running_gateway(cluster) as gateway, browser_page() as page:
        await page.open(f"{gateway.url}/")
        await page.wait_for(LIVE)
        feed = gateway.server.live_service.feed
        assert feed.viewers == 1
        hide = "Object.defineProperty(document, 'hidden', {{configurable: true, value: {}}});"
        seen = "document.dispatchEvent(new Event('visibilitychange')); 1"
        await page.evaluate(hide.format("true") + seen)
        await cluster.wait_for(lambda: feed.viewers == 0, 20.0)
        await page.evaluate(hide.format("false") + seen)
        await cluster.wait_for(lambda: feed.viewers == 1)


async def test_plots_show_no_stale_figures_and_begin_anew_with_a_clock_that_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = "Number(document.querySelector('#history figure')?.dataset.newest ?? 0)"
    async with FakeCluster() as cluster, running_gateway(cluster) as gateway, browser_page() as page:
        await page.open(f"{gateway.url}/")
        await page.wait_for(f"{newest} > 0")
        cluster.no_live = True
        await page.wait_for("document.getElementById('feed').dataset.state === 'stale'")
        before = await page.evaluate(newest)
        await asyncio.sleep(2.5)
        assert await page.evaluate(newest) == before
        cluster.no_live = False
        await page.wait_for(f"{newest} > {before}")
        clock = SimpleNamespace(time=lambda: time.time() - 30.0, monotonic=time.monotonic)
        monkeypatch.setattr(live_feed, "time", clock)  # as of another gateway
        await page.wait_for(f"{newest} < {before}")
        after = await page.evaluate(newest)
        await page.wait_for(f"{newest} > {after}")
        assert page.complaints == []


async def test_a_process_that_is_killed_is_seen_within_two_seconds(server: ServeProcess) -> None:
    with load(server):
        async with page_of(server) as page:
            await page.wait_for("document.querySelector('[data-decode=decode-0]') !== null")
            roles = server.get("/alignedserve/status")["roles"]
            pid = next(role["pid"] for role in roles if role["id"] == "decode-0")
            entries = await page.evaluate("document.querySelectorAll('#events li').length")
            os.kill(pid, signal.SIGKILL)
            killed_s = time.monotonic()
            await page.wait_for(
                "[...document.querySelectorAll('#events li')].some((entry, place, all) =>"
                f" place < all.length - {entries} && entry.textContent.includes('decode-0'))"
            )
            assert time.monotonic() - killed_s < KILL_SHOWN_S
            await page.wait_for("document.getElementById('health').dataset.state === 'ready'", 60.0)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
async def test_what_it_looks_like_and_that_it_is_accessible(
    server: ServeProcess, size: str, dark: bool, tmp_path: Path
) -> None:
    folder = PICTURES if os.environ.get("PICTURES") else tmp_path
    name = f"live-page-{size}-{'dark' if dark else 'light'}.png"
    with load(server):
        async with page_of(server, size, dark=dark) as page:
            await page.wait_for("Number(document.getElementById('waiting-histogram').dataset.total) > 3")
            await asyncio.sleep(12 if os.environ.get("PICTURES") else 2)  # so that the plots have something to show
            await page.screenshot(folder / name)
            assert (folder / name).stat().st_size > 20_000, "an empty page"
            wide = await numbers(page, whole="document.documentElement.scrollWidth", window="innerWidth")
            assert wide["whole"] <= wide["window"], "it must not scroll sideways"
            need(NO_AXE)
            assert await page.inaccessible() == []
            await page.evaluate("document.getElementById('tab-playground').click()")
            assert await page.inaccessible() == []


async def test_everything_is_reached_by_keyboard_and_the_focus_is_seen(server: ServeProcess) -> None:
    async with page_of(server) as page:
        count = await page.evaluate(f"{FOCUSABLE}.map((one, number) => one.dataset.place = number).length")
        assert count > 10
        reached, unseen = set(), []
        for _ in range(count + 5):
            await page.press("Tab")
            place, ring = await page.evaluate(
                "(one => [one.dataset.place ?? null, getComputedStyle(one).outlineStyle !== 'none'"
                " || getComputedStyle(one).boxShadow !== 'none'])(document.activeElement)"
            )
            if place is not None:
                reached.add(int(place))
                if not ring:
                    unseen.append(await page.evaluate("document.activeElement.outerHTML.slice(0, 120)"))
        missed = [number for number in range(count) if number not in reached]
        told = await page.evaluate(
            f"{missed}.map(number => document.querySelector(`[data-place='${{number}}']`)?.outerHTML.slice(0, 120))"
        )
        assert not missed, told
        assert not unseen


async def test_a_question_of_the_playground_is_answered_and_its_timeline_is_seen(
    server: ServeProcess, tmp_path: Path
) -> None:
    folder = PICTURES if os.environ.get("PICTURES") else tmp_path
    async with page_of(server) as page:
        await page.evaluate("document.getElementById('tab-live').focus()")
        await page.press("ArrowRight")
        await page.evaluate("document.getElementById('playground-prompt').focus()")
        await page.write("Return a list of")
        await page.press("Enter", control=True)
        await page.wait_for("document.getElementById('playground-state').dataset.state === 'done'")
        await page.wait_for("document.getElementById('playground-now').textContent.startsWith('It has ended')")
        shown = await numbers(
            page,
            answer="document.getElementById('playground-answer').textContent",
            stages="document.getElementById('playground-timeline').getAttribute('aria-label')",
            timings="document.getElementById('playground-timings').textContent",
        )
        await page.screenshot(folder / "live-page-playground.png")
    assert shown["answer"].strip()
    assert "decode" in shown["stages"]
    assert "First token after" in shown["timings"]
    assert "decode-0" in shown["timings"]


async def test_the_playground_says_where_a_request_is_before_its_first_token(server: ServeProcess) -> None:
    with load(server):
        async with page_of(server, view="#playground") as page:
            await page.evaluate("document.getElementById('playground-prompt').focus()")
            await page.write("Return a list of " * 100)
            await page.press("Enter", control=True)
            await page.wait_for("document.getElementById('playground-now').textContent.startsWith('Now: ')")
            await page.wait_for("document.getElementById('playground-state').dataset.state === 'done'", 60.0)
            await page.wait_for("document.getElementById('playground-now').textContent.startsWith('It has ended')")


async def test_a_new_user_signs_in_asks_one_question_and_sees_its_timeline_within_a_minute(tmp_path: Path) -> None:
    """From the start of the command: as `make serve` after its setup, with API keys."""
    keys = tmp_path / "keys"
    keys.write_text("sk-of-a-new-user\n")
    keys.chmod(0o600)
    begun_s = time.monotonic()
    with ServeProcess("--model", "tiny", "--api-key-file", str(keys)) as running:
        async with browser_page() as page:
            await page.open(f"{running.url}/")
            await page.wait_for("document.activeElement?.id === 'api-key'")
            need(NO_AXE)
            assert await page.inaccessible() == []
            await page.write("sk-of-a-new-user")
            await page.press("Enter")
            await page.wait_for(LIVE)
            await page.evaluate("document.getElementById('tab-playground').click()")
            await page.evaluate("document.getElementById('playground-prompt').focus()")
            await page.write("Return a list of")
            await page.press("Enter", control=True)
            await page.wait_for("document.getElementById('playground-now').textContent.startsWith('It has ended')")
            stages = await page.evaluate("document.getElementById('playground-timeline').getAttribute('aria-label')")
            took_s = time.monotonic() - begun_s
            await page.evaluate("document.getElementById('sign-out').click()")
            await page.wait_for("document.getElementById('login-form') !== null")
            assert page.complaints == []
            assert page.hosts == {urlsplit(running.url).netloc}
    assert "decode" in stages
    assert took_s < 60.0
