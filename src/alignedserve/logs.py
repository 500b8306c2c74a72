"""Logging of every role: one line per record, as text or JSON, with role, instance and, if known, request id.

JSON lines of a gateway also have the ids of trace and span while a traced call is handled.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from pathlib import Path
from typing import TextIO

from alignedserve.config import LogConfig

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
# Ids of the trace and the span of the call that is handled; None: it is not traced.
trace: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("trace", default=None)


class _Formatter(logging.Formatter):
    def __init__(self, role: str, instance: str) -> None:
        super().__init__()
        self.role = role
        self.instance = instance

    def fields(self, record: logging.LogRecord) -> dict[str, str]:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = {
            "time": moment,
            "level": record.levelname.lower(),
            "role": self.role,
            "instance": self.instance,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := getattr(record, "request_id", None) or request_id.get():
            fields["request_id"] = request
        if ids := getattr(record, "trace", None) or trace.get():
            fields["trace_id"], fields["span_id"] = ids
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return fields


class _Text(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        request = f" [{fields['request_id']}]" if "request_id" in fields else ""
        line = f"{fields['time']} {fields['level']:<7} {fields['instance']}{request} {fields['message']}"
        return f"{line}\n{fields['exception']}" if "exception" in fields else line


class _Json(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields(record), ensure_ascii=False)


class _Handler(logging.StreamHandler[TextIO]):
    """Counts the lines that cannot be written. A full disk does not make the process fail, or fill another disk."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.lost = 0
        self.trouble = ""  # why the last line could not be written; "" if it was written
        self.no_file = ""  # why this process has no log file; "" if it has one

    def emit(self, record: logging.LogRecord) -> None:
        lost = self.lost
        super().emit(record)
        if self.trouble and self.lost == lost:
            self.trouble = ""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.lost += 1
            self.trouble = error.strerror or str(error)
        else:
            super().handleError(record)


def setup(config: LogConfig, role: str, instance: str) -> None:
    """Send this process's `alignedserve` records to a file in `config.dir`, or to stderr.

    If the file cannot be opened, stderr is used, because a successor must start on a full disk, too.
    """
    stream, failure = _open(Path(config.dir), f"{instance}.log") if config.dir else (None, "")
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter((_Json if config.format == "json" else _Text)(role, instance))
    logger = logging.getLogger("alignedserve")
    logger.handlers[:] = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False
    if failure:
        handler.no_file = failure
        logger.error("log.dir: the log of %s goes to stderr, %s cannot be written: %s", instance, config.dir, failure)


def alarm() -> str:
    """Why lines of this process's log are lost; "" if none are."""
    handlers = logging.getLogger("alignedserve").handlers
    found = next((handler for handler in handlers if isinstance(handler, _Handler)), None)
    if found is None or not (found.no_file or found.trouble):
        return ""
    return f"its log cannot be written ({found.no_file or found.trouble}; {found.lost} lines lost or late)"


def _open(folder: Path, name: str) -> tuple[TextIO | None, str]:
    """The open file and "", or None and the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / name).open("a", encoding="utf-8"), ""
    except OSError as error:
        return None, error.strerror or str(error)
