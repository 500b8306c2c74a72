"""Hooks of mkdocs: pages generated from code, patterns in the nav, links to files outside docs/."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import command_line
import configuration
import fields
import grpc_api
import http_api
import python_api
import sizing_examples
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {
    "reference/configuration.md": configuration.page,
    "reference/command-line.md": command_line.page,
    "reference/http.md": http_api.page,
    "reference/fields.md": fields.page,
    "reference/openapi.json": http_api.document,
    "reference/grpc.md": grpc_api.page,
}
LINK_OUT = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]+)(#[^)\s]*)?\)")
MADE_HERE = {
    "sizing gpus": sizing_examples.gpus,
    "sizing cpu": sizing_examples.cpu,
    "sizing ranks": sizing_examples.ranks,
    "the client's names": python_api.client_names,
}
PLACE = re.compile(rf"^\{{\{{ (?P<name>{'|'.join(MADE_HERE)}) \}}\}}$", re.MULTILINE)
DIAGRAM = re.compile(r'<p><img alt="[^"]*" src="[^"]*images/(?P<name>[a-z0-9-]+\.svg)" /></p>')
PATH = re.compile(r"(?<=<code>)[\w.-]+(?:/[\w.-]+)+(?=</code>)")
KEY = re.compile(r"<code>(?P<key>[a-z_]+\.[a-z_0-9]+)</code>")

logger = logging.getLogger("mkdocs.hooks.alignedserve")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    docs = Path(config.docs_dir)
    written: set[str] = set()
    _collect(config.nav or [], written)
    config.nav = [part for entry in config.nav or [] for part in _as_list(_expand(entry, docs, written))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    _look_for_lists_without_a_blank_line(markdown, page)
    markdown = PLACE.sub(lambda place: MADE_HERE[place["name"]](), markdown)
    return LINK_OUT.sub(lambda link: _link_out(link, page, config), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Embeds diagrams in the page, and links configuration keys to the configuration page."""
    html = DIAGRAM.sub(lambda image: _in_page(image, config), html)
    html = PATH.sub(lambda path: path.group().replace("/", "/<wbr>"), html)  # allows a line break there
    if page.file.src_uri == "reference/configuration.md":
        return html
    target = files.get_file_from_path("reference/configuration.md")
    assert target is not None
    known = configuration.described()

    def linked(match: re.Match[str]) -> str:
        key = match["key"]
        if key not in known:
            return match.group()
        return f'<a href="{target.url_relative_to(page.file)}#{key}">{match.group()}</a>'

    return "".join(
        part if part.startswith(("<a ", "<h")) else KEY.sub(linked, part)
        for part in re.split(r"(<a .*?</a>|<h\d.*?</h\d>)", html, flags=re.DOTALL)
    )


def _in_page(image: re.Match[str], config: MkDocsConfig) -> str:
    svg = (Path(config.docs_dir) / "images" / image["name"]).read_text(encoding="utf-8")
    return f'<figure class="diagram">{svg}</figure>'


def _collect(nav: list[Any], written: set[str]) -> None:
    """Collect the pages that the nav names explicitly. Patterns do not repeat them."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            if isinstance(value, list):
                _collect(value, written)
            elif "*" not in value:
                written.add(value)


def _expand(entry: Any, docs: Path, written: set[str]) -> Any:
    """Replace a pattern by the pages that it matches, index or README first."""
    if not isinstance(entry, dict):
        return _pages(entry, docs, written) if "*" in entry else entry
    ((title, value),) = entry.items()
    if isinstance(value, list):
        return {title: [part for one in value for part in _as_list(_expand(one, docs, written))]}
    return {title: _pages(value, docs, written) if "*" in value else value}


def _as_list(entry: Any) -> list[Any]:
    return entry if isinstance(entry, list) else [entry]


def _pages(pattern: str, docs: Path, written: set[str]) -> list[str]:
    found = {path.relative_to(docs).as_posix() for path in docs.glob(pattern)} - written
    return sorted(found, key=lambda name: (not name.endswith(("index.md", "README.md")), name))


def _link_out(link: re.Match[str], page: Page, config: MkDocsConfig) -> str:
    """Replace a link to a file outside docs/ by the file's name, because the site does not contain the file."""
    docs = Path(config.docs_dir)
    target = (docs / page.file.src_uri).parent.joinpath(link["target"]).resolve()
    if target.is_relative_to(docs):
        return link.group()
    if not target.exists():
        logger.warning("%s: no such file in the repository: %s", page.file.src_uri, link["target"])
    name = target.relative_to(ROOT).as_posix()
    text = link["text"].strip("`")
    return f"`{name}`" if text in (name, target.name) else f"{link['text']} (`{name}`)"


def _look_for_lists_without_a_blank_line(markdown: str, page: Page) -> None:
    """Warn about lists that Python's Markdown would render as part of the paragraph above."""
    before, fenced = "", False
    for number, line in enumerate(markdown.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        starts = re.match(r"([-*]|1\.) ", line) is not None
        if starts and not fenced and before.strip() and not re.match(r"\s*([-*]|\d+\.) |\s+|#", before):
            logger.warning("%s:%d: a list needs an empty line before it", page.file.src_uri, number)
        before = line
