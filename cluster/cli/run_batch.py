"""`alignedserve run-batch`: answers the requests in a JSONL file through /v1/batches, and can go on after an end.

What it knows of a run is in the folder `OUTPUT.run-batch`: the ids at the server and, if it starts one, the server's
store. The same command goes on with it, and removes it at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from tqdm import tqdm

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.cluster.records import operator_key
from alignedserve.errors import AlignedServeError, ConfigError, UnavailableError

POLL_S = 0.5
LINE_EVERY_S = 10.0
PATIENCE_S = 120.0  # for a server that does not answer
STARTED_WITHIN_S = 900.0
TIMEOUT_S = 60.0
SHOWN_ERRORS = 5
ENDED = ("completed", "failed", "expired", "cancelled")


def run_batch(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Returns 0 if every line has an answer, 1 if some have an error.

    `given`: the configuration of a server to start, as arguments. Raises ConfigError for an unusable input file or
    options, UnavailableError if the server does not answer.
    """
    source, target = Path(options.input), Path(options.output)
    errors = Path(options.errors) if options.errors else target.with_suffix(f".errors{target.suffix}")
    key_file = getattr(options, "gateway.api_key_file")
    if not source.is_file():
        raise ConfigError(f"--input {source} is not a file")
    if len({path.resolve() for path in (source, target, errors)}) < 3:
        raise ConfigError("--input, --output and --errors must be three different files")
    for path in (target, errors):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file")
    if errors.parent.resolve() != target.parent.resolve() and not errors.parent.is_dir():
        raise ConfigError(f"--errors {errors}: there is no folder {errors.parent}")
    folder = target.with_name(f"{target.name}.run-batch")
    run = Run(folder, source)
    if (batch := run.ended(target, errors)) is None:
        with contextlib.ExitStack() as stack:
            url = options.url or stack.enter_context(_own_server(folder, given))
            server = Server(url, operator_key(key_file))
            batch = _begun_or_gone(run, folder, lambda: _through(server, run, target, errors))
    shutil.rmtree(folder)
    if batch["status"] == "failed":
        raise ConfigError(f"{source} is not valid: {_told(batch)}")
    counts = batch["request_counts"]
    print(f"{counts['completed']} of {counts['total']} lines answered: {target}")
    if counts["failed"]:
        lines = "1 line" if counts["failed"] == 1 else f"{counts['failed']} lines"
        print(f"{lines} failed: {errors}", file=sys.stderr)
    return int(counts["completed"] != counts["total"])


def _begun_or_gone(run: Run, folder: Path, go_through: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `go_through` returns. If it refuses the input, nothing of the run is left."""
    try:
        return go_through()
    except ConfigError:
        if "file" not in run.ids:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _own_server(folder: Path, given: Sequence[str]) -> Iterator[str]:
    """Encloses the run of a server whose store is in `folder`. Yields its URL."""
    log = folder / "serve.log"
    print(f"starting a server; its output is in {log}", file=sys.stderr)
    # This command is the server's only client, so refusals for load would only slow it.
    keys = {
        "batches.folder": str(folder.resolve() / "store"),
        "batches.max_file_mib": 1 << 20,
        "batches.quota_gib": 1 << 20,
    }
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    server = ServeProcess(*given, *sets, log=log, timeout_s=STARTED_WITHIN_S, ends_with_this=True)
    try:
        server.__enter__()
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        raise AlignedServeError(f"no server could be started ({error}); its output is in {log}") from error
    try:
        yield server.url
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it was killed
            server.stop()


class Run:
    """The state of a run on disk. `ids`: `run` (its own name), `file` once it is uploaded, `ended` with the batch once
    its files are written here.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        """Raises ConfigError if the input file has changed since the run began."""
        self.source = source
        self._path = folder / "run.json"
        stat = source.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.ids: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.ids = {"run": uuid4().hex, "input": stamp}
            self.save()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}; remove {folder} to begin anew") from error
        if self.ids["input"] != stamp:
            raise ConfigError(f"{source} has changed since its run began; remove {folder} to begin anew")

    def save(self) -> None:
        """The file is always whole, also after a power failure."""
        draft = self._path.with_suffix(".tmp")
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(json.dumps(self.ids))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        except OSError as error:
            raise _unwritten(self._path, error) from error

    def ended(self, target: Path, errors: Path) -> dict[str, Any] | None:
        """The batch of a run that was ended after it had written its files. Else None, also if one is gone since: the
        server has forgotten them, and the run begins anew.
        """
        batch: dict[str, Any] | None = self.ids.get("ended")
        if batch is None:
            return None
        written = [path for key, path in _files(target, errors) if batch[key]]
        if all(path.is_file() for path in written):
            return batch
        self.ids = {"run": uuid4().hex, "input": self.ids["input"]}
        self.save()
        return None


def _files(target: Path, errors: Path) -> tuple[tuple[str, Path], ...]:
    """The batch's fields with the ids of its files, and where these are written."""
    return ("output_file_id", target), ("error_file_id", errors)


def _unwritten(path: Path, error: OSError) -> AlignedServeError:
    return AlignedServeError(f"{path} cannot be written: {error.strerror}; the same command goes on later")


class LostError(Exception):
    """No server answered, or it had no room. It may have done what was asked."""


class Server:
    """A server that keeps batches. Its methods raise AlignedServeError with the server's reason for a refusal."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._told_s = -LINE_EVERY_S  # when it was told last that the server does not answer
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """The JSON answer to what may be asked again. While no server answers it is, then raises UnavailableError."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._once(method, path)
            except LostError as error:
                self._pause(until_s, error)

    def create(self, run: str, body: dict[str, Any]) -> dict[str, Any]:
        """The batch of a run. If the answer was lost, looks whether there is one before it is asked for again."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._once("POST", "/v1/batches", json=body)
            except LostError as error:
                self._pause(until_s, error)
            if (found := self.find(run)) is not None:
                return found

    def _once(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise LostError(f"does not answer ({str(error) or type(error).__name__})") from error
        if answer.status_code in (429, 502, 503, 504):
            raise LostError(f"answers with HTTP {answer.status_code}")
        found: dict[str, Any] = _parsed(answer)
        return found

    def _pause(self, until_s: float, error: LostError) -> None:
        now_s = time.monotonic()
        if now_s > until_s:
            raise UnavailableError(f"{self.url} {error}; the same command goes on later")
        if now_s - self._told_s > LINE_EVERY_S:
            self._told_s = now_s
            tqdm.write(f"{self.url} {error}; trying again for {PATIENCE_S:g} s", file=sys.stderr)
        time.sleep(POLL_S)

    def upload(self, source: Path) -> str:
        """The id of the uploaded file."""
        with source.open("rb") as file:
            form = {"file": (source.name, file, "application/jsonl")}
            try:
                answer = self._http.post("/v1/files", data={"purpose": "batch"}, files=form)
            except httpx.TransportError as error:
                raise UnavailableError(f"{source} cannot be uploaded to {self.url}: {error}") from error
        return str(_parsed(answer)["id"])

    def download(self, file_id: str, target: Path) -> None:
        """Writes a file's content; `target` exists only once it is complete."""
        draft = target.with_name(f"{target.name}.part")
        try:
            with self._http.stream("GET", f"/v1/files/{file_id}/content") as answer, draft.open("wb") as file:
                if answer.status_code != 200:
                    answer.read()
                    _parsed(answer)
                for part in answer.iter_bytes():
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
        except httpx.TransportError as error:
            raise UnavailableError(f"{target} cannot be downloaded from {self.url}: {error}") from error
        except OSError as error:
            raise _unwritten(draft, error) from error
        draft.replace(target)

    def forget(self, *file_ids: str | None) -> None:
        """Deletes files, so that they do not count for the quota; a failure does not matter."""
        for file_id in filter(None, file_ids):
            with contextlib.suppress(httpx.TransportError):
                self._http.delete(f"/v1/files/{file_id}")

    def find(self, run: str) -> dict[str, Any] | None:
        """The batch that a run has made; None if it has not."""
        after = ""
        while True:
            page = self.ask("GET", f"/v1/batches?limit=100{after}")
            for batch in page["data"]:
                if (batch["metadata"] or {}).get("run_batch") == run:
                    found: dict[str, Any] = batch
                    return found
            if not page["has_more"]:
                return None
            after = f"&after={page['last_id']}"


def _parsed(answer: httpx.Response) -> Any:
    try:
        value = answer.json()
    except ValueError:
        raise UnavailableError(f"{answer.url} answered with HTTP {answer.status_code}") from None
    if answer.status_code >= 400:
        message = value.get("error", {}).get("message") if isinstance(value, dict) else None
        raise AlignedServeError(f"{answer.url}: {message or f'HTTP {answer.status_code}'}")
    return value


def _through(server: Server, run: Run, target: Path, errors: Path) -> dict[str, Any]:
    """The batch once it has ended and its files are written."""
    batch = _begun(server, run)
    try:
        batch = _watched(server, batch)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on with the batch", file=sys.stderr)
        raise
    for key, path in _files(target, errors):
        if batch[key]:
            server.download(batch[key], path)
        else:  # one of an earlier run would be taken for this one's
            path.unlink(missing_ok=True)
    run.ids["ended"] = batch  # before the server forgets the files: they cannot be written again
    run.save()
    server.forget(batch["input_file_id"], batch["output_file_id"], batch["error_file_id"])
    return batch


def _begun(server: Server, run: Run) -> dict[str, Any]:
    """The run's batch: a new one, or the one that an earlier run of this command has made."""
    if (known := server.find(run.ids["run"])) is not None:
        return known
    if "file" not in run.ids:
        endpoint = _endpoint(run.source)
        run.ids |= {"file": server.upload(run.source), "endpoint": endpoint}
        run.save()
    body = {
        "input_file_id": run.ids["file"],
        "endpoint": run.ids["endpoint"],
        "completion_window": "24h",
        "metadata": {"run_batch": run.ids["run"]},
    }
    return server.create(run.ids["run"], body)


def _endpoint(source: Path) -> str:
    """The endpoint that the first line names."""
    with source.open("rb") as file:
        first = next((line for line in file if line.removeprefix(BOM_UTF8).strip()), b"")
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError, TypeError) as error:
        fault = f"is not JSON ({error})" if isinstance(error, ValueError) else "has no url"
        message = f'{source}: the first line {fault}: lines are {{"custom_id", "method", "url", "body"}}'
        raise ConfigError(message) from None


def _watched(server: Server, batch: dict[str, Any]) -> dict[str, Any]:
    """Shows the progress until the batch has ended: a bar on a terminal, a line every LINE_EVERY_S elsewhere."""
    told_s = time.monotonic()
    with tqdm(unit="line", dynamic_ncols=True, disable=None, desc=batch["status"]) as bar:
        while True:
            counts = batch["request_counts"]
            bar.total = counts["total"] or None
            bar.set_description(batch["status"], refresh=False)
            if counts["failed"]:
                bar.set_postfix(failed=counts["failed"], refresh=False)
            done = counts["completed"] + counts["failed"]
            bar.update(done - bar.n)
            if bar.disable and time.monotonic() - told_s >= LINE_EVERY_S:
                told_s = time.monotonic()
                text = f"{batch['status']}: {done:,} of {counts['total']:,} lines, {counts['failed']:,} failed"
                print(text, file=sys.stderr, flush=True)
            if batch["status"] in ENDED:
                return batch
            time.sleep(POLL_S)
            batch = server.ask("GET", f"/v1/batches/{batch['id']}")


def _told(batch: dict[str, Any]) -> str:
    found = batch["errors"]["data"]
    told = [f"line {error['line']}: {error['message']}" if error["line"] else error["message"] for error in found]
    more = f" (and {len(told) - SHOWN_ERRORS} more)" if len(told) > SHOWN_ERRORS else ""
    return "; ".join(told[:SHOWN_ERRORS]) + more
