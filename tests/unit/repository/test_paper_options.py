"""benchmarks/paper: wrong options end with a message before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.paper_scripts import script

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks/paper"))


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("load_sweep", ("--variants", "foo"), "there is no 'foo'; choose, separated by semicolons, of: fcfs; aligned,"),
        ("load_sweep", ("--variants", "fcfs;aligned"), "there is no 'aligned'"),
        ("load_sweep", ("--loads", "foo"), "--loads takes shares above 0, at-once or closed"),
        ("load_sweep", ("--loads", "0.9,-1"), "not '0.9,-1'"),
        ("load_sweep", ("--kernel-modes", "no_split:x"), "'no_split:x' has no bandwidth"),
        ("load_sweep", ("--csv", "/nosuch/dir/x.csv"), "--csv /nosuch/dir/x.csv: give a file in an existing"),
        ("load_sweep", ("--data", "/nosuch"), "--data /nosuch: there is no such folder"),
        ("load_sweep", ("--out", __file__), "is not a folder"),
        ("no_split", ("--machine", "nosuch"), "a100-opt-13b"),
        ("no_split", ("--cost-model", "a100-opt-13b"), "unrecognized arguments"),
        ("ranks", ("--ranks", "x"), "takes a whole number from 1 on, not 'x'"),
        ("ranks", ("--ranks", "8,0"), "takes a whole number from 1 on, not '0'"),
        ("ranks", ("--requests-per-rank", "0"), "takes a whole number from 1 on, not '0'"),
    ],
)
def test_wrong_options_end_with_a_message(
    capsys: pytest.CaptureFixture[str], name: str, arguments: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        script(name).main([*arguments, "--quiet", "--jobs", "1"])
    assert ended.value.code == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_an_estimate_is_in_words() -> None:
    in_words = script("load_sweep").in_words
    assert (in_words(0.2), in_words(90.0), in_words(600.0)) == ("1 s", "90 s", "10 min")
