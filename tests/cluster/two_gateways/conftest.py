"""The server of all files here: starting Ray and Serve takes longer than most of their tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from alignedserve.cluster.cli.serve_process import ServeProcess
from support.leftovers import none_left_behind


@pytest.fixture(scope="package", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    yield from none_left_behind()


@pytest.fixture(scope="package")
def server() -> Iterator[ServeProcess]:
    """`test_whole_cluster.py`, the last of the files, stops it."""
    environment = {"ALIGNEDSERVE_GATEWAY__REPLICAS": "2", "ALIGNEDSERVE_KV_POOL__SIZE_GIB": "0.2"}
    with ServeProcess("--model", "tiny", environment=environment) as running:
        yield running
        if running.process.poll() is None:
            running.check_integrity()
