"""The request log: one JSON line for each request that ended, with lengths, timestamps and names of blocks; no text.

`alignedserve simulate --trace` replays it. A dedicated thread writes it, so that a slow disk does not block the event
loop. Several gateways may append to the same file; each write has whole lines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from alignedserve.errors import ConfigError
from alignedserve.gateway.prompt_blocks import BLOCK_TOKENS, block_names, key_beside
from alignedserve.request import Stage

if TYPE_CHECKING:
    from alignedserve.gateway.ledger.calls import Answer
    from alignedserve.gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

MAX_WAITING = 65_536
MOST_NAMED = 4096  # entries that wait with their tokens; further ones have no names of blocks
_AT_ONCE = 256  # lines of one write
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Named:
    """What the names of an entry's blocks are made of, in the log's thread."""

    salt: bytes
    prompt: Sequence[int]
    answer: Sequence[int]


class RequestLog:
    """`note` never blocks: entries that the disk cannot take in time are dropped and counted. `close` flushes."""

    def __init__(self, path: str | Path, gateway_id: str, metrics: GatewayMetrics) -> None:
        """Raises ConfigError if the file cannot be opened for appending."""
        self._path = Path(path).expanduser()
        self._gateway_id = gateway_id
        self._metrics = metrics
        self._waiting: queue.Queue[tuple[dict[str, Any], _Named | None] | None] = queue.Queue(MAX_WAITING)
        self._file = open_log(self._path)
        self._key = key_beside(self._path, self._file)
        self._failing = self._half = False  # `_half`: the file ends with a partial line
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)
        self._thread.start()

    def note(self, answer: Answer) -> None:
        """Logs an answer that has ended, with or without an error."""
        named = None
        if self._waiting.qsize() < MOST_NAMED:
            named = _Named(answer.call.salt, answer.prompt.token_ids, answer.tokens)
        try:
            self._waiting.put_nowait((entry_of(answer, self._gateway_id, time.time_ns()), named))
        except queue.Full:
            self._metrics.unlogged.inc()

    def close(self) -> None:
        """Blocks until everything is written, for at most a few seconds."""
        try:
            self._waiting.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _write_all(self) -> None:
        more = True
        while more:
            entries = [self._waiting.get()]
            while len(entries) < _AT_ONCE and not self._waiting.empty():
                entries.append(self._waiting.get_nowait())
            more = entries[-1] is not None
            self._write([self._with_names(*entry) for entry in entries if entry is not None])
        os.close(self._file)

    def _with_names(self, entry: dict[str, Any], named: _Named | None) -> dict[str, Any]:
        """The last token has no KV, so the block that it would fill has no name."""
        if named is None:
            return entry
        names = block_names(self._key, named.salt, [*named.prompt, *named.answer][:-1])
        whole = len(named.prompt) // BLOCK_TOKENS
        if len(names) < whole:  # nothing was generated, or the prompt is longer than is named
            names = block_names(self._key, named.salt, named.prompt)
        return {**entry, "block_tokens": BLOCK_TOKENS, "blocks": names}

    def _write(self, entries: list[dict[str, Any]]) -> None:
        data = b"".join(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE) for entry in entries)
        if self._half:
            data = b"\n" + data
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
            self._failing = self._half = False
        except OSError as error:
            self._metrics.unlogged.inc(data.count(b"\n", written) - (self._half and not written))
            size = written - (data.rfind(b"\n", 0, written) + 1)
            self._half = (self._half and not written) or bool(size and not self._take_back(size))
            if not self._failing:
                logger.warning("the request log %s cannot be written: %s", self._path, error.strerror)
            self._failing = True

    def _take_back(self, size: int) -> bool:
        """Removes the partial line of `size` bytes that a full disk has accepted; whether it was removed.

        It stays if another gateway has written after it, or if the file is a pipe. The next write then starts a new
        line.
        """
        with contextlib.suppress(OSError):
            end = os.lseek(self._file, 0, os.SEEK_CUR)
            if os.fstat(self._file).st_size == end:
                os.ftruncate(self._file, end - size)
                return True
        return False


def open_log(path: Path) -> int:
    """Opens a file for appending and returns its descriptor. Raises ConfigError."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"gateway.request_log: {path} cannot be appended to: {error.strerror}") from error


def entry_of(answer: Answer, gateway_id: str, now_ns: int) -> dict[str, Any]:
    """The log entry of an answer that has ended. Times are Unix seconds.

    `arrival_unix_s`: arrival at the gateway. `queue_unix_s`: submission to the scheduler in the request's last epoch.
    `<stage>_unix_s`: when each stage first began. `<stage>_s`: seconds in the stage, including repetitions after an
    eviction. `bubble_s`: as in `timings`, absent without a cost model. `cached_tokens`: of the prompt, absent without a
    prefix cache. `x_request_id`: the header, if there was one.
    """
    call, stopwatch = answer.call, answer.stopwatch
    entry: dict[str, Any] = {
        "request_id": answer.request_id,
        "gateway_id": gateway_id,
        "arrival_unix_s": call.arrival_ns / 1e9,
        "input_tokens": len(answer.prompt.token_ids),
        "output_tokens": len(answer.tokens),
        "outcome": outcome_of(answer),
        "epoch": answer.epoch,
        "resumed": bool(call.plan.resume),
        "wait_objective_s": call.plan.wait_objective_s,
        "priority": call.plan.priority,
        "end_unix_s": now_ns / 1e9,
        "prefill_id": answer.prefill_id,
        "decode_id": answer.decode_id,
    }
    if call.plan.cache is not None:
        entry["cached_tokens"] = answer.cached_tokens
    if call.sent_id:
        entry["x_request_id"] = call.sent_id
    tokens = {"first": answer.first_token_s, "second": answer.second_token_s, "last": answer.last_token_s}
    entry |= {f"{which}_token_unix_s": answer.unix_ns(at_s) / 1e9 for which, at_s in tokens.items() if at_s}
    entry |= {f"{stage}_unix_s": stopwatch.begun_ns[stage] / 1e9 for stage in Stage if stage in stopwatch.begun_ns}
    if stopwatch.bubble_s is not None:
        entry["bubble_s"] = stopwatch.bubble_s
    entry |= {f"{stage}_s": stopwatch.spent_s[stage] for stage in Stage if stage in stopwatch.spent_s}
    return entry


def outcome_of(answer: Answer) -> str:
    """How an answer has ended: its finish reason, or an error's code."""
    if answer.finish is not None:
        return answer.finish.value
    return "cancelled" if answer.call.error is None else answer.call.error.code
