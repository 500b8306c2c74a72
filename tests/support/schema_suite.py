"""The JSON Schema Test Suite against a library: answers that a schema forbids and its grammar allows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignedserve.errors import GrammarError
from alignedserve.request import GrammarKind, GrammarSpec
from support.grammars import allows, tiny_grammars

_DRAFTS = {"draft7": "http://json-schema.org/draft-07/schema#", "draft4": "http://json-schema.org/draft-04/schema#"}


def suite_cases(folder: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """`folder`: one draft's, such as `tests/draft2020-12`. Each schema's name, itself, and its tests."""
    for file in sorted(folder.rglob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            schema = case["schema"]
            if isinstance(schema, dict) and folder.name in _DRAFTS:
                schema = {"$schema": _DRAFTS[folder.name], **schema}
            yield f"{file.relative_to(folder)}: {case['description']}", schema, case["tests"]


def suite_outcome(library: str, folder: Path) -> tuple[Counter[str], list[str]]:
    """Counts of schemas refused, and of values right, wrong and stricter than the schema; and the wrong ones."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for name, schema, tests in suite_cases(folder):
        spec = GrammarSpec(GrammarKind.JSON, json.dumps(schema))
        for test in tests:
            answer = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
            try:
                allowed = allows(tiny_grammars(library), spec, answer)
            except GrammarError:
                counts["refused"] += 1
                break
            counts["right" if allowed is test["valid"] else "wrong" if allowed else "stricter"] += 1
            if allowed and not test["valid"]:
                wrong.append(f"{name}: {test['description']}: {answer}")
    return counts, wrong
