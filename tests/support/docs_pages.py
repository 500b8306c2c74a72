"""The documentation's pages, their blocks of code and their commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
# Decisions and measurements are dated: what they name may have gone since.
LASTING = [page for page in PAGES if page.parent.name not in ("adr", "measurements")]
SHELLS = ("bash", "sh", "shell", "console")
BETWEEN = {"|", "||", "&&", "&", ";", "(", ")", "--"}  # the last one: of `kubectl exec`


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """`(language, text)` of each fenced block."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```([a-z]*)[^\n]*\n(.*?)^\1```", text, flags=re.DOTALL | re.MULTILINE):
        yield match[2], match[3]


def inline(page: Path) -> list[str]:
    """Every inline `code` of a page."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text)]


def shell_lines(page: Path) -> Iterator[str]:
    """Every command line of a page's shell blocks, without comments and with continued lines joined."""
    for language, text in blocks(page):
        if language in SHELLS:
            for line in text.replace("\\\n", " ").splitlines():
                yield line.removeprefix("$ ")


def words(line: str) -> list[list[str]]:
    """The commands of a line, each split into words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if word in BETWEEN:
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def commands(page: Path) -> Iterator[str]:
    """Every whole command of a page's shell blocks, also of many lines: continued ones, loops and quotations."""
    for language, text in blocks(page):
        if language not in SHELLS:
            continue
        command = ""
        for line in text.splitlines():
            command += line.removeprefix("$ ") + "\n"
            if not line.endswith("\\") and _is_whole(command):
                if shlex.split(command, comments=True):
                    yield command.strip()
                command = ""
        assert not command, f"{name_of(page)}: a command without an end: {command}"


def _is_whole(command: str) -> bool:
    try:
        found = shlex.split(command, comments=True)
    except ValueError:  # an open quotation
        return False
    return found.count("do") == found.count("done")
