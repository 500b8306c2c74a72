"""What a test needs of the machine. Without it the test is skipped, but fails with CI=true: CI has all of it."""

from __future__ import annotations

import os

import pytest


def need(lack: str) -> None:
    """`lack`: what is missing, "" for nothing."""
    if lack and os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, and {lack}", pytrace=False)
    if lack:
        pytest.skip(lack)


def needs(lack: str) -> pytest.MarkDecorator:
    """The same as a mark of a test or a module; tests/conftest.py looks at it before the test's fixtures."""
    return pytest.mark.needs(lack)
