"""A hundred thousand lines under kill -9: every line has one answer, and memory does not grow with their number."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from alignedserve.gateway.batches.batches import BatchStore
from alignedserve.gateway.batches.database import Database
from alignedserve.gateway.batches.files import FileStore
from support.batch_process import ENDPOINT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LINES = 100_000
KILLS = 8
MOST_GROWTH_MIB = 96.0
OWNER = b"owner"


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "support.batch_process", str(folder), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_hundred_thousand_lines_under_kills(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    database = Database(folder)
    files = FileStore(database, 1 << 40, 1e7)
    batches = BatchStore(database, files)
    file_id, draft = files.draft()
    with draft.open("w") as file:
        for number in range(LINES):
            row = {"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": {"prompt": f"{number} " * 50}}
            file.write(json.dumps(row) + "\n")
    files.add(file_id, OWNER, "in.jsonl")
    batch_id = batches.create(OWNER, ENDPOINT, file_id, {})["id"]

    draw = random.Random(11)
    for number in range(KILLS):
        before = batches.get(batch_id, OWNER)["request_counts"]["completed"]
        share = LINES * (number + draw.random()) / (KILLS + 1)
        with start(folder, f"gateway-{number}") as runner:
            while batches.get(batch_id, OWNER)["request_counts"]["completed"] < share:
                assert runner.poll() is None
                time.sleep(0.02)
            runner.send_signal(signal.SIGKILL)
        assert batches.get(batch_id, OWNER)["request_counts"]["completed"] >= before
    with start(folder, "gateway-last") as runner:
        said, _ = runner.communicate()
    first, last = map(float, said.split())

    batches.check_integrity()
    batch = batches.get(batch_id, OWNER)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    found: Counter[str] = Counter()
    output, cursor = files.get(batch["output_file_id"], OWNER), 0
    while True:
        part, cursor = files.read(output, cursor)
        if not part:
            break
        found.update(json.loads(row)["custom_id"] for row in part.splitlines())
    database.close()
    assert found.keys() == {str(number) for number in range(LINES)}
    assert set(found.values()) == {1}
    assert last - first < MOST_GROWTH_MIB
