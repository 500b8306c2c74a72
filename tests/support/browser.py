"""Chromium without a window, driven over its DevTools protocol: what a page shows, says, asks for and complains of."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_BROWSER = "" if CHROMIUM else "there is no Chromium (apt: chromium)"
NO_AXE = "" if shutil.which("npm") else "there is no npm, which fetches axe-core"
AXE = "axe-core@4.14.1"
KEPT = Path(__file__).parents[2] / "build/browser"
_STARTED_WITHIN_S = 30.0
_ANSWERED_WITHIN_S = 30.0
_COMPLAINTS = ("error", "warning", "assert")


@cache
def axe_source() -> str:
    """The text of axe-core, which checks a page's accessibility."""
    kept = KEPT / f"{AXE}.js"
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, check=True, timeout=120, capture_output=True)
            (package,) = Path(folder).glob("*.tgz")
            with tarfile.open(package) as archive:
                member = archive.extractfile("package/axe.min.js")
                assert member is not None
                kept.write_bytes(member.read())
    return kept.read_text(encoding="utf-8")


@dataclass
class Page:
    """A page of the browser. `complaints`: errors and warnings of its console. `hosts`: those that it asked."""

    socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    async def listen(self) -> None:
        """Handle what the browser sends, until the connection ends."""
        async for message in self.socket:
            said = json.loads(message.data)
            if (waiting := self._waiting.pop(said.get("id", 0), None)) is not None:
                waiting.set_result(said)
            elif (method := said.get("method")) == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and said["params"]["type"] in _COMPLAINTS:
                self.complaints.append(str(said["params"]["args"]))
            elif method == "Log.entryAdded" and said["params"]["entry"]["level"] in _COMPLAINTS:
                self.complaints.append(str(said["params"]["entry"]))
            elif method == "Network.requestWillBeSent":
                parts = urlsplit(said["params"]["request"]["url"])
                if parts.scheme not in ("data", "blob", "about"):
                    self.hosts.add(parts.netloc)

    async def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command. Raises RuntimeError if the browser refuses it."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        said = await asyncio.wait_for(answer, _ANSWERED_WITHIN_S)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        return said["result"]

    async def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Open a URL, as on a phone if `width` is below 500 pixels."""
        phone = width < 500
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        await self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. Raises RuntimeError if it throws."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def wait_for(self, expression: str, timeout_s: float = 30.0) -> Any:
        """The expression's value once it is true. Raises TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (value := await self.evaluate(expression)):  # noqa: ASYNC110  # the page does not say
                    await asyncio.sleep(0.05)
                return value
        except TimeoutError:
            raise TimeoutError(f"not true within {timeout_s:g} s: {expression}; console: {self.complaints}") from None

    async def press(self, key: str, *, control: bool = False) -> None:
        """Press a key that writes nothing: Tab, Enter, ArrowRight."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 2 if control else 0}
        submits = {"type": "keyDown", "text": "\r"}  # with its character a form is submitted
        kind = submits if key == "Enter" and not control else {"type": "rawKeyDown"}
        await self.call("Input.dispatchKeyEvent", **kind, **event)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def write(self, text: str) -> None:
        """Write where the focus is."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        found = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))

    async def inaccessible(self) -> list[str]:
        """What axe-core finds against WCAG 2.1, levels A and AA: rule, element, and what is wrong with it."""
        await self.evaluate(axe_source() + "; true")
        tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
        found = await self.evaluate(
            f"axe.run({{runOnly: {json.dumps(tags)}}}).then(found => found.violations.flatMap(rule =>"
            " rule.nodes.map(node => [rule.id, node.target.join(' '), node.failureSummary].join(': '))))"
        )
        return list(found)


@contextlib.asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """A new page of a new browser."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    targets = await answer.json()
                address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    try:
                        yield page
                    finally:
                        listening.cancel()
                        await asyncio.gather(listening, return_exceptions=True)
        finally:
            process.terminate()
            await process.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(_STARTED_WITHIN_S):
        while True:
            with contextlib.suppress(OSError, ValueError, IndexError):
                return int((await asyncio.to_thread(file.read_text)).splitlines()[0])
            await asyncio.sleep(0.05)
