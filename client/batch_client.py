"""Clients of offline batches, over HTTP: blocking and for asyncio. What they send is in `job_steps`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack
from urllib.parse import urlsplit

from alignedserve.client import job_steps as steps
from alignedserve.client.batch import checked_items
from alignedserve.client.bodies import error_of
from alignedserve.client.calls import CallPlanner
from alignedserve.client.job_steps import Answer, Ask, LostError, Patience, Steps
from alignedserve.client.jobs import BatchJob, BatchResult, LineReader, Lines, result_of
from alignedserve.client.messages import Read
from alignedserve.client.options import BatchItem, ChatItem, Options, Progress
from alignedserve.client.structured import ResponseFormat, wanted
from alignedserve.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    import ssl

    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
Result = TypeVar("Result")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Settings:
    """What both clients have in common."""

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout_s: float, patience_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must begin with http:// or https://, and name the HTTP port, got {url!r}")
        if not timeout_s > 0 or not patience_s >= 0:
            raise ConfigError(f"timeout_s must be above 0, and patience_s at least 0, got {timeout_s} and {patience_s}")
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("offline batches need httpx: pip install httpx") from error
        self.httpx = httpx
        self.planner = CallPlanner(model, api_key=api_key)
        self.patience_s = patience_s
        key = self.planner.api_key
        self.http: dict[str, Any] = {
            "base_url": url.rstrip("/"),
            "headers": {"authorization": f"Bearer {key}"} if key else {},
            "timeout": timeout_s,
            "trust_env": parts.hostname not in _LOOPBACK,
        }

    @contextlib.contextmanager
    def connection(self) -> Iterator[None]:
        """Raises LostError for what happens to a connection."""
        try:
            yield
        except self.httpx.TransportError as error:
            raise LostError(str(error) or type(error).__name__) from error

    def answer(self, response: httpx.Response) -> Answer:
        try:
            body = response.json()
        except ValueError:
            body = None
        asked = response.headers.get("retry-after", "")
        return Answer(response.status_code, body, float(asked) if asked.isdigit() else None)

    def wait_s(self, response: httpx.Response, patience: Patience) -> float:
        """Seconds until a file that was refused is asked for again. Raises the error of a refusal."""
        answer = self.answer(response)
        error = error_of(answer.status, answer.body, answer.retry_after_s)
        if answer.status not in (*steps.AGAIN, *steps.LOST):
            raise error
        return patience.wait_s(error, answer.retry_after_s)


def _form(ask: Ask, file: Any) -> dict[str, Any]:
    return {"data": {"purpose": "batch"}, "files": {"file": (ask.filename, file, "application/jsonl")}}


def _endpoint_of(path: Path) -> str:
    """The url of a file's first line. Raises InvalidRequestError."""
    try:
        with path.open("rb") as file:
            found = json.loads(next((line for line in file if line.strip()), b""))["url"]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        fault = f"is not JSON ({error})" if isinstance(error, ValueError) else "has no url"
        raise InvalidRequestError(f"{path}: the first line {fault}", param="url") from error
    return str(found)


def _files_of(job: BatchJob) -> list[str]:
    if not job.ended:
        raise InvalidRequestError(f"batch {job.id} is {job.status}: wait for its end", param="job")
    return [file_id for file_id in (job.output_file_id, job.error_file_id) if file_id is not None]


def _read(response_format: ResponseFormat | None) -> Read | None:
    found = wanted(response_format)
    return None if found is None else found.read


def _id(job: BatchJob | str) -> str:
    return job if isinstance(job, str) else job.id


class BatchClient:
    """A blocking client of offline batches: files of requests that are answered in the background, within 24 hours.

    It uses the HTTP port, and needs httpx. A lost connection, or a gateway that ends, is not noticed: nothing is sent
    twice, and results go on where they were.

    Args:
        url: of the HTTP port, with the application's path if it has one.
        model: the served model for requests that name none; None: the only one.
        api_key: None: the environment variable ALIGNEDSERVE_API_KEY. Files and batches belong to it.
        timeout_s: time limit in seconds to connect, and for each part that is sent or received.
        patience_s: a server that does not answer or has no room is tried again for this many seconds.
        verify: as for httpx: True, or an SSL context with an authority of your own.

    Besides its own errors, every method raises:
        AuthenticationError: the server requires an API key, and this one is missing or unknown.
        NotFoundError: no such batch exists for this key, or the server keeps none (`batches_not_configured`).
        UnavailableError: no server answers at `url`.

    Raises:
        ConfigError: an argument of the client itself is invalid, or httpx is not installed.

    Example:
        with BatchClient("http://127.0.0.1:8000") as batches:
            job = batches.create(["Return the", "Raise a"], max_tokens=32)
            for result in batches.results(batches.wait(job, progress=True)):
                print(result.custom_id, result.completion.text if result.completion else result.error)
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        patience_s: float = 120.0,
        verify: bool | ssl.SSLContext = True,
    ) -> None:
        self._settings = _Settings(url, model, api_key, timeout_s, patience_s)
        self._patience_s = patience_s
        self._http = self._settings.httpx.Client(**self._settings.http, verify=verify)

    def create(
        self,
        items: Iterable[BatchItem | ChatItem],
        *,
        metadata: Mapping[str, str] | None = None,
        keep_s: int | None = None,
        **options: Unpack[Options],
    ) -> BatchJob:
        """Upload requests, and have them answered.

        Args:
            items: prompts or conversations, as for `generate_many` and `chat_many`. They are written one by one to a
                temporary file. A dict's `request_id` is the line's `custom_id`, by default its number from 0.
            metadata: up to 15 texts of your own.
            keep_s: seconds after which the files with the answers are deleted; by default the server's.
            options: for all requests.

        Raises:
            InvalidRequestError: an item or option is malformed; values are checked when a line is answered.
            TooLargeError: the file is too large, or the files of this key are.

        Example:
            job = batches.create(({"prompt": line, "request_id": line} for line in open("lines.txt")), max_tokens=32)
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lines.jsonl"
            lines = Lines(self._settings.planner, options)
            with path.open("wb") as file:
                file.writelines(map(lines.of, checked_items(items)))
            return self.create_from_file(path, endpoint=lines.endpoint, metadata=metadata, keep_s=keep_s)

    def create_from_file(
        self,
        path: str | os.PathLike[str],
        *,
        endpoint: str | None = None,
        metadata: Mapping[str, str] | None = None,
        keep_s: int | None = None,
    ) -> BatchJob:
        """Upload a file of requests in OpenAI's form, and have them answered.

        `endpoint` is the url of all lines; None: that of the first line. Errors are those of `create`.

        Example:
            job = batches.create_from_file("requests.jsonl")
        """
        endpoint = endpoint or _endpoint_of(Path(path))
        return self._run(steps.create_with(Path(path), endpoint, metadata, keep_s, self._patience_s))

    def get(self, job: BatchJob | str) -> BatchJob:
        """The job as it is now."""
        return self._run(steps.get(_id(job), self._patience_s))

    def wait(self, job: BatchJob | str, *, progress: Progress = False, timeout_s: float | None = None) -> BatchJob:
        """Wait until the job has ended, in whatever way.

        `progress`: True shows a bar (needs tqdm); a function is called with the numbers of ended and of all lines.

        Raises:
            DeadlineError: `timeout_s` passed; the job goes on.
        """
        return self._run(steps.wait(_id(job), progress, timeout_s, self._patience_s))

    def results(self, job: BatchJob | str, *, response_format: ResponseFormat | None = None) -> Iterator[BatchResult]:
        """The results of a job that has ended, one by one: first the answers, then the errors, each in order.

        Only one line is kept in memory. `response_format` is that of the requests: `completion.parsed` is the object.

        Raises:
            InvalidRequestError: the job has not ended.
        """
        found = self.get(job) if isinstance(job, str) else job
        return self._results(_files_of(found), _read(response_format))

    def cancel(self, job: BatchJob | str) -> BatchJob:
        """Cancel the job. What was answered stays; a job that has ended is returned as it is."""
        return self._run(steps.cancel(_id(job), self._patience_s))

    def jobs(self, limit: int = 20) -> list[BatchJob]:
        """The newest jobs of this API key."""
        return self._run(steps.jobs(limit, self._patience_s))

    def delete_files(self, job: BatchJob) -> None:
        """Delete the files of a job that has ended, input and results."""
        self._run(steps.delete_files(job, self._patience_s))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, asked: Steps[Result]) -> Result:
        return steps.run(asked, self._send, time.sleep)

    def _send(self, ask: Ask) -> Answer:
        with self._settings.connection():
            if ask.upload is None:
                return self._settings.answer(self._http.request(ask.method, ask.path, params=ask.params, json=ask.json))
            with ask.upload.open("rb") as file:
                return self._settings.answer(self._http.request(ask.method, ask.path, **_form(ask, file)))

    def _results(self, file_ids: Iterable[str], read: Read | None) -> Iterator[BatchResult]:
        for file_id in file_ids:
            for line in self._lines(file_id):
                yield result_of(line, read)

    def _lines(self, file_id: str) -> Iterator[bytes]:
        path, reader, patience = f"/v1/files/{file_id}/content", LineReader(), Patience(self._patience_s)
        while True:
            try:
                with self._http.stream("GET", path, headers=reader.headers) as response:
                    if response.status_code in (200, 206):
                        reader.begin(response.status_code)
                        for part in response.iter_bytes():
                            patience.answered()
                            yield from reader.feed(part)
                        return
                    response.read()
                    wait_s = self._settings.wait_s(response, patience)
            except self._settings.httpx.TransportError as error:
                wait_s = steps.lost(error, patience)
            time.sleep(wait_s)


class AsyncBatchClient:
    """A client of offline batches for asyncio. Arguments, errors and methods are those of `BatchClient`.

    Example:
        async with AsyncBatchClient("http://127.0.0.1:8000") as batches:
            job = await batches.wait(await batches.create(["Return the", "Raise a"], max_tokens=32))
            async for result in batches.results(job):
                print(result.custom_id, result.completion.text if result.completion else result.error)
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        patience_s: float = 120.0,
        verify: bool | ssl.SSLContext = True,
    ) -> None:
        self._settings = _Settings(url, model, api_key, timeout_s, patience_s)
        self._patience_s = patience_s
        self._http = self._settings.httpx.AsyncClient(**self._settings.http, verify=verify)

    async def create(
        self,
        items: Iterable[BatchItem | ChatItem] | AsyncIterable[BatchItem | ChatItem],
        *,
        metadata: Mapping[str, str] | None = None,
        keep_s: int | None = None,
        **options: Unpack[Options],
    ) -> BatchJob:
        """Upload requests, and have them answered; see `BatchClient.create`. `items` may be asynchronous, too."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lines.jsonl"
            lines = Lines(self._settings.planner, options)
            with path.open("wb") as file:
                if isinstance(items, AsyncIterable):
                    async for item in items:
                        file.write(lines.of(item))
                else:
                    file.writelines(map(lines.of, checked_items(items)))
            return await self.create_from_file(path, endpoint=lines.endpoint, metadata=metadata, keep_s=keep_s)

    async def create_from_file(
        self,
        path: str | os.PathLike[str],
        *,
        endpoint: str | None = None,
        metadata: Mapping[str, str] | None = None,
        keep_s: int | None = None,
    ) -> BatchJob:
        """Upload a file of requests, and have them answered; see `BatchClient.create_from_file`."""
        endpoint = endpoint or _endpoint_of(Path(path))
        return await self._run(steps.create_with(Path(path), endpoint, metadata, keep_s, self._patience_s))

    async def get(self, job: BatchJob | str) -> BatchJob:
        """The job as it is now."""
        return await self._run(steps.get(_id(job), self._patience_s))

    async def wait(
        self, job: BatchJob | str, *, progress: Progress = False, timeout_s: float | None = None
    ) -> BatchJob:
        """Wait until the job has ended; see `BatchClient.wait`."""
        return await self._run(steps.wait(_id(job), progress, timeout_s, self._patience_s))

    async def results(
        self, job: BatchJob | str, *, response_format: ResponseFormat | None = None
    ) -> AsyncIterator[BatchResult]:
        """The results of a job that has ended, one by one; see `BatchClient.results`."""
        found = await self.get(job) if isinstance(job, str) else job
        read = _read(response_format)
        for file_id in _files_of(found):
            async for line in self._lines(file_id):
                yield result_of(line, read)

    async def cancel(self, job: BatchJob | str) -> BatchJob:
        """Cancel the job; see `BatchClient.cancel`."""
        return await self._run(steps.cancel(_id(job), self._patience_s))

    async def jobs(self, limit: int = 20) -> list[BatchJob]:
        """The newest jobs of this API key."""
        return await self._run(steps.jobs(limit, self._patience_s))

    async def delete_files(self, job: BatchJob) -> None:
        """Delete the files of a job that has ended, input and results."""
        await self._run(steps.delete_files(job, self._patience_s))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, asked: Steps[Result]) -> Result:
        return await steps.run_async(asked, self._send, asyncio.sleep)

    async def _send(self, ask: Ask) -> Answer:
        with self._settings.connection():
            if ask.upload is None:
                found = await self._http.request(ask.method, ask.path, params=ask.params, json=ask.json)
                return self._settings.answer(found)
            with ask.upload.open("rb") as file:
                return self._settings.answer(await self._http.request(ask.method, ask.path, **_form(ask, file)))

    async def _lines(self, file_id: str) -> AsyncIterator[bytes]:
        path, reader, patience = f"/v1/files/{file_id}/content", LineReader(), Patience(self._patience_s)
        while True:
            try:
                async with self._http.stream("GET", path, headers=reader.headers) as response:
                    if response.status_code in (200, 206):
                        reader.begin(response.status_code)
                        async for part in response.aiter_bytes():
                            patience.answered()
                            for line in reader.feed(part):
                                yield line
                        return
                    await response.aread()
                    wait_s = self._settings.wait_s(response, patience)
            except self._settings.httpx.TransportError as error:
                wait_s = steps.lost(error, patience)
            await asyncio.sleep(wait_s)
