"""Logging of every role: one line a record, as text or JSON, with role, instance and (where known) request id."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from pathlib import Path

from alignedserve.config import LogConfig

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


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


def setup(config: LogConfig, role: str, instance: str) -> None:
    """Send this process's `alignedserve` records (and every warning) to stderr, or to a file of `config.dir`."""
    if config.dir:
        folder = Path(config.dir)
        folder.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = logging.FileHandler(folder / f"{instance}.log", encoding="utf-8")
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_Json if config.format == "json" else _Text)(role, instance))
    logger = logging.getLogger("alignedserve")
    logger.handlers[:] = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False
