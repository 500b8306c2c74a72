"""The page of the command line, from its parser."""

from __future__ import annotations

import argparse

import configuration
from markdown_text import NOTICE, code, plain, table

from alignedserve.cluster.cli.main import make_parser

HEAD = f"""\
# Command line

{NOTICE}

Every command ends with status 0, with 2 where it could not begin (configuration, model), with 1 for failures later.
"""


def page() -> str:
    _, commands = make_parser()
    summary = table(
        ("command", "what it does"), ((f"[{name}](#{name})", _about(one)) for name, one in commands.items())
    )
    lines = [HEAD, *summary]
    for name, parser in commands.items():
        lines += [f"## {name}", "", _about(parser), ""]
        if rows := _rows(parser):
            lines += table(("option", "meaning", "key"), rows)
        for order, one in _orders(parser).items():
            lines += [f"### {name} {order}", "", *table(("option", "meaning", "key"), _rows(one))]
        if parser.epilog:
            lines += ["```text", parser.epilog.strip("\n"), "```", ""]
    return "\n".join(lines)


def _rows(parser: argparse.ArgumentParser) -> list[tuple[str, str, str]]:
    rows = [_row(action) for action in parser._actions if action.help not in (argparse.SUPPRESS, None)]
    return [row for row in rows if row[0] != "`-h`, `--help`"]


def _orders(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's own commands."""
    found = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(found, {})


def _about(parser: argparse.ArgumentParser) -> str:
    return plain(parser.description or "")


def _row(action: argparse.Action) -> tuple[str, str, str]:
    names: tuple[str, ...] = tuple(action.option_strings) or (action.dest,)
    if action.nargs != 0 and action.option_strings:
        metavar = action.metavar or action.dest.rpartition(".")[2].upper()
        names = tuple(f"{name} {metavar}" for name in names)
    key = action.dest if action.dest in configuration.described() else ""
    return ", ".join(map(code, names)), plain((action.help or "") % {"default": action.default}), code(key)
