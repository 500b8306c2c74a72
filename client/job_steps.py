"""What the clients of offline batches send, and what they do about lost connections: generators without I/O.

A generator yields an `Ask` and gets an `Answer`, or `LostError` is thrown into it; or it yields a `Pause`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast
from uuid import uuid4

from alignedserve.client.attempts import Backoff
from alignedserve.client.bodies import error_of
from alignedserve.client.jobs import BatchJob, JobMeter
from alignedserve.client.options import Progress
from alignedserve.errors import AlignedServeError, DeadlineError, InvalidRequestError, UnavailableError

Result = TypeVar("Result")
_TOKEN = "alignedserve_client"  # a key of a batch's metadata
AGAIN = (429, 503)  # the server has done nothing
LOST = (502, 504)  # of a proxy whose gateway ended, or was too slow, in the middle: it may have done what was asked
_BACKOFF = Backoff(0.1, 5.0)
_PAGE = 100
FIRST_POLL_S, LONGEST_POLL_S = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `upload`: a file to send as a form, under the name `filename`."""

    method: str
    path: str
    params: Mapping[str, str | int] | None = None
    json: Any = None
    upload: Path | None = None
    filename: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """`body` is JSON, None if it is not."""

    status: int
    body: Any
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


class LostError(Exception):
    """The connection broke, or no server could be reached."""


Steps: TypeAlias = Generator[Ask | Pause, Answer | None, Result]


class Patience:
    """How long a server that does not answer, or has no room, is tried again: `seconds` since its last answer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until_s: float | None = None
        self._failures = 0

    def answered(self) -> None:
        self._until_s, self._failures = None, 0

    def wait_s(self, error: AlignedServeError, asked_s: float | None = None) -> float:
        """Seconds until the next try. Raises the error if there is none."""
        now_s = time.monotonic()
        self._until_s = self._until_s or now_s + self._seconds
        wait_s = _BACKOFF.wait_s(self._failures, asked_s)
        self._failures += 1
        if now_s + wait_s > self._until_s:
            raise error
        return wait_s


def lost(error: Exception, patience: Patience) -> float:
    """Seconds to wait after a lost connection. Raises UnavailableError."""
    return patience.wait_s(UnavailableError(f"the server cannot be reached: {error or type(error).__name__}"))


def once(ask: Ask, patience: Patience) -> Steps[Any]:
    """The JSON answer. Tries again while the server refuses for load. Raises LostError, and the typed error of others.

    For a request that must not be repeated when its answer was lost.
    """
    while True:
        answer = yield ask
        assert answer is not None
        if answer.status in LOST:
            raise LostError(f"HTTP {answer.status}")
        if answer.status in AGAIN:
            error = error_of(answer.status, answer.body, answer.retry_after_s)
            yield Pause(patience.wait_s(error, answer.retry_after_s))
            continue
        patience.answered()
        if answer.status >= 400 or answer.body is None:
            raise error_of(answer.status, answer.body)
        return answer.body


def repeated(ask: Ask, patience_s: float) -> Steps[Any]:
    """The JSON answer to a request that may be repeated."""
    patience = Patience(patience_s)
    while True:
        try:
            return (yield from once(ask, patience))
        except LostError as error:
            yield Pause(lost(error, patience))


def upload(path: Path, patience_s: float) -> Steps[str]:
    """The id of the uploaded file. If the answer was lost, looks whether the file is there before it is sent again."""
    patience = Patience(patience_s)
    name = f"{uuid4().hex}.jsonl"
    while True:
        try:
            return str((yield from once(Ask("POST", "/v1/files", upload=path, filename=name), patience))["id"])
        except LostError as error:
            yield Pause(lost(error, patience))
        page = yield from repeated(Ask("GET", "/v1/files", {"purpose": "batch", "limit": _PAGE}), patience_s)
        if found := [file["id"] for file in page["data"] if file["filename"] == name]:
            return str(found[0])


def create(
    file_id: str, endpoint: str, metadata: Mapping[str, str] | None, keep_s: int | None, patience_s: float
) -> Steps[BatchJob]:
    """The new job. If the answer was lost, looks whether the job is there before it is asked for again."""
    patience = Patience(patience_s)
    token = uuid4().hex
    body: dict[str, Any] = {
        "input_file_id": file_id,
        "endpoint": endpoint,
        "completion_window": "24h",
        "metadata": {**(metadata or {}), _TOKEN: token},
    }
    if keep_s is not None:
        body["output_expires_after"] = {"anchor": "created_at", "seconds": keep_s}
    while True:
        try:
            return BatchJob.of((yield from once(Ask("POST", "/v1/batches", json=body), patience)))
        except LostError as error:
            yield Pause(lost(error, patience))
        page = yield from repeated(Ask("GET", "/v1/batches", {"limit": _PAGE}), patience_s)
        found = [job for job in page["data"] if (job.get("metadata") or {}).get(_TOKEN) == token]
        if found:
            return BatchJob.of(found[0])


def create_with(
    path: Path, endpoint: str, metadata: Mapping[str, str] | None, keep_s: int | None, patience_s: float
) -> Steps[BatchJob]:
    """The new job over a file that is uploaded. The file is deleted again if there is no job."""
    file_id = yield from upload(path, patience_s)
    try:
        return (yield from create(file_id, endpoint, metadata, keep_s, patience_s))
    except AlignedServeError as error:
        with contextlib.suppress(AlignedServeError):
            yield from repeated(Ask("DELETE", f"/v1/files/{file_id}"), 0.0)
        raise error


def get(job_id: str, patience_s: float) -> Steps[BatchJob]:
    return BatchJob.of((yield from repeated(Ask("GET", f"/v1/batches/{job_id}"), patience_s)))


def cancel(job_id: str, patience_s: float) -> Steps[BatchJob]:
    """The job as it is after the cancel. One that has ended already is returned as it is."""
    try:
        return BatchJob.of((yield from repeated(Ask("POST", f"/v1/batches/{job_id}/cancel"), patience_s)))
    except AlignedServeError as error:
        if error.details.get("http_status") != 409:
            raise
        return (yield from get(job_id, patience_s))


def wait(job_id: str, progress: Progress, timeout_s: float | None, patience_s: float) -> Steps[BatchJob]:
    """The job once it has ended. Raises DeadlineError."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    meter = JobMeter(progress)
    poll_s = FIRST_POLL_S
    try:
        while True:
            job = yield from get(job_id, patience_s)
            meter.show(job)
            if job.ended:
                return job
            left_s = poll_s if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(f"batch {job_id} is {job.status} after {timeout_s:g} s; it goes on")
            yield Pause(min(poll_s, left_s))
            poll_s = min(poll_s * 1.5, LONGEST_POLL_S)
    finally:
        meter.close()


def jobs(limit: int, patience_s: float) -> Steps[list[BatchJob]]:
    """The newest jobs."""
    if limit < 1:
        raise InvalidRequestError(f"limit must be at least 1, got {limit}", param="limit")
    found: list[BatchJob] = []
    after: dict[str, str | int] = {}
    while len(found) < limit:
        ask = Ask("GET", "/v1/batches", {"limit": min(_PAGE, limit - len(found)), **after})
        page = yield from repeated(ask, patience_s)
        found += map(BatchJob.of, page["data"])
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    return found


def delete_files(job: BatchJob, patience_s: float) -> Steps[None]:
    """Deletes the job's files, so that they do not count for the quota. One that is gone is no error."""
    for file_id in (job.input_file_id, job.output_file_id, job.error_file_id):
        if file_id is None:
            continue
        try:
            yield from repeated(Ask("DELETE", f"/v1/files/{file_id}"), patience_s)
        except AlignedServeError as error:
            if error.details.get("http_status") != 404:
                raise


class Course(Generic[Result]):
    """Runs a generator: `next` is what to do, until it has `ended` with a `result`."""

    def __init__(self, steps: Steps[Result]) -> None:
        self._steps = steps
        self.ended = False
        self.result: Result | None = None
        self.next: Ask | Pause = Pause(0.0)
        self._go_on(steps.send, None)

    def done(self, answer: Answer | None) -> None:
        """What was next is done: the answer to an Ask."""
        self._go_on(self._steps.send, answer)

    def lost(self, error: LostError) -> None:
        self._go_on(self._steps.throw, error)

    def _go_on(self, how: Callable[[Any], Ask | Pause], value: Any) -> None:
        try:
            self.next = how(value)
        except StopIteration as end:
            self.ended, self.result = True, end.value


def run(steps: Steps[Result], send: Callable[[Ask], Answer], sleep: Callable[[float], object]) -> Result:
    """Runs a generator. `send` raises LostError."""
    course = Course(steps)
    while not course.ended:
        if isinstance(course.next, Pause):
            sleep(course.next.seconds)
            course.done(None)
            continue
        try:
            answer = send(course.next)
        except LostError as error:
            course.lost(error)
        else:
            course.done(answer)
    return cast(Result, course.result)


async def run_async(
    steps: Steps[Result], send: Callable[[Ask], Awaitable[Answer]], sleep: Callable[[float], Awaitable[object]]
) -> Result:
    """As `run`."""
    course = Course(steps)
    while not course.ended:
        if isinstance(course.next, Pause):
            await sleep(course.next.seconds)
            course.done(None)
            continue
        try:
            answer = await send(course.next)
        except LostError as error:
            course.lost(error)
        else:
            course.done(answer)
    return cast(Result, course.result)
