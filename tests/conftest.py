"""Settings for all tests. Triton decides at its import whether kernels run in its interpreter."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Hypothesis allows 200 ms for each example. On a shared machine a slow example is not a failure.
# Examples are the same each time, as walks of the state machines are; `make test-all` and `make fuzz` draw anew.
settings.register_profile(
    "unhurried",
    settings.get_profile("default"),
    deadline=None,
    derandomize=os.environ.get("ALIGNEDSERVE_FUZZ", "1") == "1",
    database=None,
)
settings.load_profile("unhurried")

# Child processes of tests import `support` as well.
HERE = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])

if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from support.scheduling import FolderScheduling

    return FolderScheduling(config, log)


def pytest_collection_finish() -> None:
    """This process's torch has one thread: a second one would spin on a core that the other tests use."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    from support.requirements import need

    for mark in item.iter_markers("needs"):
        need(*mark.args)


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    from support.leftovers import none_left_behind

    yield from none_left_behind()
