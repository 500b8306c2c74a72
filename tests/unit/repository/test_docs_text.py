"""What the documentation names exists: commands parse; configuration keys, files, make targets and extras are real."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from alignedserve.cluster.cli.main import make_parser, parse
from alignedserve.config import SECTIONS
from alignedserve.config_sources import known_keys, value_of
from alignedserve.errors import ConfigError
from support.docs_pages import LASTING, PAGES, ROOT, SHELLS, blocks, inline, name_of, shell_lines, words

SUFFIXES = (".py", ".sh", ".md", ".yaml", ".yml", ".toml", ".json", ".proto", ".txt", ".tsv", ".svg", ".j2", ".html")


def command_lines() -> list[tuple[str, list[str]]]:
    """`(page, arguments)` of every `alignedserve` command in the documentation, in blocks and in sentences."""
    found = []
    for page in PAGES:
        # In a sentence, `alignedserve profile` names the command, without its required arguments.
        sentences = (text for text in inline(page) if re.match(r"(?:.* -- )?alignedserve [a-z]+ ", text))
        lines = [*shell_lines(page), *sentences]
        for line in lines:
            if "alignedserve" not in line:
                continue
            for command in words(line.replace("…", "").replace("[ARGS]", "")):
                while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                    command.pop(0)
                if command and command[0].rpartition("/")[2] == "alignedserve":
                    found.append((name_of(page), command[1:]))
    return found


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error of the command's own parser for the arguments; empty if there is none."""
    try:
        options = parse(arguments)
        if options.command in ("serve", "config", "doctor", "profile"):
            for key, _, value in (assignment.partition("=") for assignment in options.set):
                value_of(key, value, "--set")
    except SystemExit as stop:
        return "" if stop.code == 0 else capsys.readouterr().err  # 0: --help
    except ConfigError as error:
        return error.message
    return ""


def test_command_lines_of_the_documentation_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        f"{page}: {' '.join(given)}: {said}" for page, given in command_lines() if (said := complaint(given, capsys))
    ]
    assert wrong == []


def test_commands_that_sentences_name_exist() -> None:
    _, commands = make_parser()
    named = {text.split()[1] for page in PAGES for text in inline(page) if re.match(r"alignedserve [a-z]+( |$)", text)}
    assert named - set(commands) == set()


def test_the_documentation_has_command_lines() -> None:
    assert {arguments[0] for _, arguments in command_lines() if arguments} >= {"serve", "simulate", "scale", "doctor"}


@pytest.mark.parametrize("page", LASTING, ids=name_of)
def test_configuration_keys_that_a_page_names_exist(page: Path) -> None:
    unknown = []
    for text in inline(page):
        match = re.fullmatch(rf"(?:--set )?((?:{'|'.join(SECTIONS)})\.[a-z_0-9]+)(?:[= ].*)?", text)
        if match and not match[1].endswith(tuple(suffix.replace(".", "") for suffix in SUFFIXES)):
            try:
                value_of(match[1], "", name_of(page))
            except ConfigError as error:
                unknown.append(error.message)
    assert unknown == []


def test_keys_of_yaml_examples_and_of_variables_exist() -> None:
    unknown, looked_at = [], 0
    for page in PAGES:
        for language, text in blocks(page):
            found = []
            if language in SHELLS:
                found = [".".join(pair).lower() for pair in re.findall(r"ALIGNEDSERVE_([A-Z_]+?)__([A-Z_]+)=", text)]
            elif language == "yaml":
                sections = yaml.safe_load(text)
                if sections.keys() <= SECTIONS.keys():  # other YAML is for Ray Serve or Kubernetes
                    found = [f"{name}.{key}" for name, keys in sections.items() for key in keys]
            looked_at += len(found)
            unknown += [f"{name_of(page)}: {key}" for key in found if key not in known_keys()]
    assert unknown == []
    assert looked_at >= 10


@pytest.mark.parametrize("page", LASTING, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()}
    missing = []
    for text in [*inline(page), *(word for line in shell_lines(page) for word in line.split())]:
        path = text.split(":")[0].removeprefix("./")
        top = path.partition("/")[0]
        named = top in tops and "/" in path and re.fullmatch(r"[\w./*-]+", path) is not None
        if named and (path.endswith(SUFFIXES) or path.endswith("/")) and not any(ROOT.glob(path.rstrip("/"))):
            missing.append(path)
    assert missing == []


def test_make_targets_and_extras_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wrong = []
    for page in LASTING:
        text = page.read_text(encoding="utf-8")
        called = [
            match[1] for line in (*shell_lines(page), *inline(page)) if (match := re.match(r"make ([a-z-]+)", line))
        ]
        wrong += [f"{name_of(page)}: make {target}" for target in called if target not in targets]
        for found in re.findall(r"(?:alignedserve|\.)\[([a-z0-9,-]+)\]", text):
            wrong += [f"{name_of(page)}: extra {extra}" for extra in found.split(",") if extra not in extras]
    assert wrong == []
