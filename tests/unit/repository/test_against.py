"""benchmarks/against.py with a program in the tools' place: turns, a run that goes on, the page, and errors."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import against
from load_tools import FIGURES, TOOLS, Endpoint, Load

# Writes a report as guidellm does. The second server is twice as slow; each run is noted beside the report's folder.
PROGRAM = """
import json, pathlib, sys
words = dict(zip(sys.argv[2::], sys.argv[3::]))
target = dict(part.split("=", 1) for part in words["--backend"].split(","))["target"]
report = pathlib.Path(words["--output"].partition("path=")[2])
streams = int(words["--profile"].rpartition("=")[2])
key = dict(part.split("=", 1) for part in words["--backend"].split(",")).get("api_key", "")
with (report.parents[1] / "keys").open("a") as keys:
    keys.write(f"{target} {key}\\n")
with (report.parents[1] / "calls").open("a") as calls:
    calls.write(f"{target} {streams}\\n")
if target.endswith(":9"):
    sys.exit("no such server")
slow = 2.0 if target.endswith(":2") else 1.0
def of(value):
    return {"successful": {"mean": value, "total_sum": value, "percentiles": {"p50": value, "p99": 3 * value}}}
metrics = {
    "request_totals": {"successful": 8, "errored": 0},
    "prompt_token_count": of(512), "output_token_count": of(256), "output_tokens_per_second": of(streams * 10 / slow),
    "time_to_first_token_ms": of(20 * slow), "inter_token_latency_ms": of(5 * slow), "request_latency": of(0.5 * slow),
}
if target.endswith(":8"):
    metrics["time_to_first_token_ms"]["successful"]["percentiles"]["p50"] = None
report.write_text(json.dumps({"benchmarks": [{"metrics": metrics}]}))
"""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    program = tmp_path / "tool.py"
    program.write_text(PROGRAM)
    out = ("--out", str(tmp_path / "out"))
    command = ("--command", f"{sys.executable} {program}")
    return [*command, "--tokenizer", "t", *out, "--streams", "1", "4", "--rounds", "2"]


def calls(arguments: list[str]) -> list[str]:
    return (Path(arguments[arguments.index("--out") + 1]) / "calls").read_text().splitlines()


TWO = ["--endpoint", "ours=http://a:1,m", "--endpoint", "other=http://b:2/v1/,m"]


def test_endpoints_take_turns_and_the_page_has_their_ratios(arguments: list[str], tmp_path: Path) -> None:
    assert against.main([*arguments, *TWO]) == 0
    turns = [call.removeprefix("http://") for call in calls(arguments)]
    assert turns == ["a:1 1", "b:2 1", "a:1 4", "b:2 4", "b:2 1", "a:1 1", "b:2 4", "a:1 4"]
    runs = [json.loads(line) for line in (tmp_path / "out/runs.jsonl").read_text().splitlines()]
    assert against.of(runs, "other", 4, "output_tokens_per_s") == [20.0, 20.0]
    assert against.ratio(runs, "other", "ours", 4, "output_tokens_per_s") == 0.5
    assert against.ratio(runs, "other", "ours", 4, "failed") is None
    page = (tmp_path / "out/index.html").read_text()
    assert page.count("<svg") == len(against.PLOTTED)
    assert all(f"<td>{label}</td>" in page for label in FIGURES.values())
    assert "<td>40 (40 to 40)</td><td>20 (20 to 20)</td><td>0.500</td>" in page


def test_keys_go_to_their_endpoints_and_into_no_file(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTHERS_KEY", "sk-secret")
    assert against.main([*arguments, *TWO, "--key", "other=OTHERS_KEY"]) == 0
    keys = (tmp_path / "out/keys").read_text().splitlines()
    assert set(keys) == {"http://a:1 ", "http://b:2 sk-secret"}
    for file in ("runs.jsonl", "index.html"):
        assert "sk-secret" not in (tmp_path / "out" / file).read_text()
    for wrong, words in (
        ("other=NO_SUCH_VARIABLE", "--key is NAME=VARIABLE"),
        ("third=OTHERS_KEY", "--key names no endpoint: third"),
    ):
        assert against.main([*arguments, *TWO, "--key", wrong]) == 1
        assert words in capsys.readouterr().err
    aiperf: Any = TOOLS["aiperf"].words(Endpoint("http://a:1", "m", "t", "sk-secret"), Load(), tmp_path)
    assert aiperf[aiperf.index("--api-key") + 1] == "sk-secret"


def test_a_run_goes_on_with_what_lacks(arguments: list[str], tmp_path: Path) -> None:
    assert against.main([*arguments, *TWO]) == 0
    file = tmp_path / "out/runs.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]) + lines[5][:20])  # it was killed in the middle of a line
    assert against.main([*arguments, *TWO]) == 0
    assert Counter(calls(arguments)).total() == 8 + 3
    assert against.main([*arguments, *TWO]) == 0
    assert Counter(calls(arguments)).total() == 8 + 3
    assert against.main([*arguments, *TWO, "--output-tokens", "9"]) == 0  # another load: nothing of it is known
    assert Counter(calls(arguments)).total() == 8 + 3 + 8


@pytest.mark.parametrize(
    ("endpoint", "more", "words"),
    [
        ("http://a:1", (), "--endpoint is NAME=URL or NAME=URL,MODEL, not 'http://a:1'"),
        ("ours=http://a:1,m", (), "two endpoints are named 'ours'"),
        ("down=http://127.0.0.1:1", (), "http://127.0.0.1:1/v1/models does not tell a model"),
        ("other=http://b:9,m", (), "guidellm ended with 1, see "),
        ("other=http://b:8,m", (), "the report of guidellm in "),
        ("other=http://b:2,m", ("--command", "no-such-tool"), "no-such-tool is not installed: pip install guidellm"),
    ],
    ids=["no name", "two of a name", "no model", "the tool fails", "no figure", "no tool"],
)
def test_what_is_wrong_is_said(
    endpoint: str, more: tuple[str, ...], words: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert against.main([*arguments, "--endpoint", "ours=http://a:1,m", "--endpoint", endpoint, *more]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", TOOLS)
def test_a_report_without_what_is_read_is_an_error(name: str, tmp_path: Path) -> None:
    found: Any = TOOLS[name].words(Endpoint("http://a:1", "m", "t"), Load(), tmp_path)
    assert all(isinstance(word, str) for word in found)
    for file in ("report.json", "profile_export_aiperf.json"):
        (tmp_path / file).write_text('{"benchmarks": []}')
    with pytest.raises((ValueError, KeyError)):
        TOOLS[name].figures(tmp_path)
