"""Schemas in the manner of JSONSchemaBench's categories: every answer that ends is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.grammars import LIBRARIES
from support.schema_categories import CATEGORIES, of_folder, outcome, table
from support.schema_suite import suite_outcome

NAMES = {"Glaiveai2K", "JsonSchemaStore", "Kubernetes", "Snowplow", "WashingtonPost"} | {
    f"Github_{size}" for size in ("trivial", "easy", "medium", "hard", "ultra")
}


def test_every_category_is_there() -> None:
    assert CATEGORIES.keys() == NAMES
    assert sum(map(len, CATEGORIES.values())) > 80


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_answer_is_wrong(library: str) -> None:
    found = outcome(library, [schemas[number % 7] for number, schemas in enumerate(CATEGORIES.values())], seeds=1)
    assert found.wrong == []
    assert found.finished > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_answer_of_any_category_is_wrong(library: str) -> None:
    found = {name: outcome(library, schemas, seeds=6) for name, schemas in CATEGORIES.items()}
    print(f"\n{library}\n{table(found)}")
    assert [answer for one in found.values() for answer in one.wrong] == []
    if library == "llguidance":
        assert sum(one.supported for one in found.values()) > 70


def test_a_folder_of_the_dataset_is_read(tmp_path: Path) -> None:
    files = {"Github_easy/a.json": {"type": "integer"}, "Github_easy/b.json": {"json_schema": '{"not": {}}'},
             "Snowplow/c.json": {"json_schema": {"const": 1}}}  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    categories = dict(of_folder(tmp_path, 9))
    assert categories == {"Github_easy": [{"type": "integer"}, {"not": {}}], "Snowplow": [{"const": 1}]}
    assert dict(of_folder(tmp_path, 1))["Github_easy"] == [{"type": "integer"}]
    found = outcome("llguidance", categories["Github_easy"], seeds=1)
    assert (found.supported, dict(found.refused), found.wrong) == (1, {"not": 1}, [])
    assert "| x | 1 | 1 | 0 | 2 | not 1 |" in table({"x": found})


def test_a_draft_of_the_test_suite_is_read(tmp_path: Path) -> None:
    tests = [{"description": text, "data": text, "valid": text == "a"} for text in ("a", "b")]
    numbers = [{"description": str(number), "data": number, "valid": number == 3} for number in (2, 3)]
    minimum = {"description": "m", "schema": {"minimum": 2, "exclusiveMinimum": True}, "tests": numbers}
    cases = [{"description": "c", "schema": {"const": "a"}, "tests": tests}, minimum,
             {"description": "n", "schema": {"not": {}}, "tests": tests}]  # fmt: skip
    folder = tmp_path / "draft4"
    folder.mkdir()
    (folder / "some.json").write_text(json.dumps(cases), encoding="utf-8")
    assert suite_outcome("llguidance", folder) == ({"right": 4, "refused": 1}, [])
    tests[1]["valid"], tests[0]["valid"] = True, False
    (folder / "some.json").write_text(json.dumps(cases[:1]), encoding="utf-8")
    assert suite_outcome("llguidance", folder) == ({"wrong": 1, "stricter": 1}, ['some.json: c: a: "a"'])
