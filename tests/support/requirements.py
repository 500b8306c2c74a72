"""Requirements of tests on the machine. A test that lacks one is skipped, or fails with CI=true: CI has them all."""

from __future__ import annotations

import os

import pytest


def need(lack: str) -> None:
    """`lack`: the missing requirement; "" if there is none."""
    if lack and os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, and {lack}", pytrace=False)
    if lack:
        pytest.skip(lack)


def needs(lack: str) -> pytest.MarkDecorator:
    """The same as a mark of a test or a module. tests/conftest.py checks it before the test's fixtures."""
    return pytest.mark.needs(lack)
