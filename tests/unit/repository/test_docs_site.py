"""The documentation's site: it builds with warnings as errors, loads nothing from other hosts, and names real files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from alignedserve import client, errors
from alignedserve.cluster.cli.main import make_parser
from alignedserve.config_sources import known_keys
from alignedserve.gateway.body.requests import ChatRequest, CompletionRequest

ROOT = Path(__file__).parents[3]
FETCHES = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh build. Warnings fail it: pages outside the nav, broken links and anchors."""
    # Not --quiet: mkdocs would count no warnings.
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([ROOT / "tools/pkgview.sh"], check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / ".pkgview")}
    built = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_the_site_builds_and_holds_every_page(site: Path) -> None:
    pages = [file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.md")]
    folders = [page.parent if page.stem in ("index", "README") else page.with_suffix("") for page in pages]
    assert [folder for folder in folders if not (site / folder / "index.html").is_file()] == []


class Fetched(HTMLParser):
    """Addresses that a browser fetches on its own to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in FETCHES and "canonical" not in (found.get("rel") or "") and (address := found.get(FETCHES[tag])):
            self.addresses.append(address)


def test_a_page_that_is_viewed_fetches_nothing_from_elsewhere(site: Path) -> None:
    elsewhere = []
    for file in site.rglob("*.html"):
        parser = Fetched()
        parser.feed(text_of(file))
        elsewhere += [f"{file}: {address}" for address in parser.addresses if re.match(r"(https?:)?//", address)]
    for file in site.rglob("*.css"):
        elsewhere += [f"{file}: {found}" for found in re.findall(r"url\(\"?(?:https?:)?//[^)]*", text_of(file))]
    assert elsewhere == []


def test_the_diagrams_are_those_that_the_script_draws() -> None:
    folder = str(ROOT / "tools/docs")
    sys.path.insert(0, folder)
    try:
        from diagrams import DIAGRAMS
    finally:
        sys.path.remove(folder)
    wrong = [name for name, draw in DIAGRAMS.items() if text_of(ROOT / f"docs/images/{name}.svg") != draw().svg()]
    assert wrong == [], "run python tools/docs/diagrams.py"


def test_every_configuration_key_is_described(site: Path) -> None:
    page = text_of(site / "reference/configuration/index.html")
    assert [key for key in known_keys() if f'id="{key}"' not in page] == []


def test_every_command_is_described(site: Path) -> None:
    page = text_of(site / "reference/command-line/index.html")
    _, commands = make_parser()
    assert [name for name in commands if f'<h2 id="{name}">' not in page] == []
    assert "--cost-model NAME|FILE|DIR" in page


def test_every_public_name_of_the_client_is_described(site: Path) -> None:
    page = text_of(site / "reference/python/index.html")
    names = [name if hasattr(errors, name) else f"client.{name}" for name in client.__all__]
    ids = [f"errors.{name}" if "." not in name else name for name in names]
    assert [name for name in ids if f'id="alignedserve.{name}"' not in page] == []


def test_every_field_of_a_request_is_described(site: Path) -> None:
    page = text_of(site / "reference/http/index.html")
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert [name for name in fields if f"<code>{name}</code>" not in page] == []
