"""Offline batches as the client sees them: the job, its lines and its results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from alignedserve.client.batch import load_bar
from alignedserve.client.bodies import CHAT, COMPLETIONS, body_of, completion_of, error_of
from alignedserve.client.calls import CallPlanner
from alignedserve.client.messages import Read
from alignedserve.client.options import BatchItem, ChatItem, Options, Progress
from alignedserve.client.types import Completion
from alignedserve.errors import AlignedServeError, InvalidRequestError

ENDED = ("completed", "failed", "cancelled", "expired")


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why an input file was refused; `line` counts from 1, None for the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class BatchJob:
    """An offline batch at the server. Times are Unix seconds; `problems` are those of a job that `failed`."""

    id: str
    status: str
    endpoint: str
    total: int
    completed: int
    failed: int
    created_at: int
    expires_at: int | None
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    metadata: Mapping[str, str]
    problems: tuple[LineProblem, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether no more lines will be answered."""
        return self.status in ENDED

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> BatchJob:
        """The job that the server describes."""
        names = ("id", "status", "endpoint", "created_at", "expires_at", "input_file_id", "output_file_id")
        problems = (value.get("errors") or {}).get("data") or ()
        return cls(
            **{name: value[name] for name in names},
            **{name: value["request_counts"][name] for name in ("total", "completed", "failed")},
            error_file_id=value["error_file_id"],
            metadata=dict(value.get("metadata") or {}),
            problems=tuple(LineProblem(**problem) for problem in problems),
        )


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of one line: an answer or an error. `body` is the answer as the server wrote it."""

    custom_id: str
    completion: Completion | None
    error: AlignedServeError | None
    body: Mapping[str, Any] | None


class Lines:
    """Writes items as lines of an input file. All must be prompts, or all conversations."""

    def __init__(self, planner: CallPlanner, options: Options) -> None:
        self._planner = planner
        self._options = options
        self.endpoint = ""
        self.count = 0

    def of(self, item: BatchItem | ChatItem) -> bytes:
        """Raises InvalidRequestError, which names the item."""
        number = self.count
        self.count += 1
        try:
            message = self._plan(item)
            body = body_of(message)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"item {number}: {error.message}", param=error.param) from error
        endpoint = CHAT if "messages" in body else COMPLETIONS
        self.endpoint = self.endpoint or endpoint
        if endpoint != self.endpoint:
            raise InvalidRequestError(f"item {number}: a batch is of prompts or of conversations only", param="prompt")
        chosen = isinstance(item, Mapping) and item.get("request_id")
        line = {"custom_id": chosen or str(number), "method": "POST", "url": endpoint, "body": body}
        return json.dumps(line, ensure_ascii=False).encode() + b"\n"

    def _plan(self, item: Any) -> Any:
        if isinstance(item, str | Mapping):
            return self._planner.generate_item(cast(BatchItem, item), self._options).message
        turns = list(item)
        if turns and not isinstance(turns[0], int):
            return self._planner.chat(turns, self._options).message
        return self._planner.generate(None, turns, self._options).message


class LineReader:
    """Whole lines from the parts of a file. After a lost connection the file is asked for again."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._given = 0  # bytes of lines that were given
        self._skip = 0

    @property
    def headers(self) -> dict[str, str]:
        """Of a request for what is left. It has the last line's end, too: a range may not be empty."""
        return {"range": f"bytes={self._given - 1}-"} if self._given else {}

    def begin(self, status: int) -> None:
        """The answer to such a request begins. A server that knows no ranges (200) sends the file from its start."""
        self._rest.clear()
        self._skip = 1 if status == 206 else self._given

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The lines that end in this part."""
        skipped = min(self._skip, len(part))
        self._skip -= skipped
        self._rest += part[skipped:]
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            self._given += end + 1
            yield line


def result_of(line: bytes, read: Read | None) -> BatchResult:
    """The result in a line of an output or error file."""
    row = json.loads(line)
    response = row.get("response") or {}
    body = response.get("body") or {}
    if row.get("error") is not None:
        return BatchResult(row["custom_id"], None, error_of(500, row), body)
    if response["status_code"] != 200:
        return BatchResult(row["custom_id"], None, error_of(response["status_code"], body), body)
    return BatchResult(row["custom_id"], completion_of(body, read), None, body)


class JobMeter:
    """Shows how many lines of a job have ended: as a bar, or to a function of (done, total)."""

    def __init__(self, progress: Progress) -> None:
        self._tell = progress if callable(progress) else None
        self._bar: Any = load_bar()(total=None, unit="line", dynamic_ncols=True) if progress is True else None
        self._told: tuple[int, int | None] | None = None

    def show(self, job: BatchJob) -> None:
        state = job.completed + job.failed, job.total or None
        if state == self._told:
            return
        self._told = state
        if self._tell is not None:
            self._tell(*state)
        if self._bar is not None:
            self._bar.total = state[1]
            self._bar.set_postfix(status=job.status, failed=job.failed, refresh=False)
            self._bar.update(state[0] - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
