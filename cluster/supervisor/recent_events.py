"""What has happened in the cluster of late, in the words of the supervisor's own log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from alignedserve.proto import supervisor_pb2 as sv

MOST_EVENTS = 300
MOST_WARNINGS = 20
_LOGGER = "alignedserve.cluster.supervisor"


class RecentEvents(logging.Handler):
    """The newest log records of the supervisor from INFO on. Another supervisor of the same process has its own."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._events: deque[sv.ClusterEvent] = deque(maxlen=MOST_EVENTS)

    def start(self) -> None:
        logging.getLogger(_LOGGER).addHandler(self)

    def stop(self) -> None:
        logging.getLogger(_LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        event = sv.ClusterEvent(unix_s=record.created, level=record.levelname.lower(), text=record.getMessage())
        self._events.append(event)

    def newest(self) -> Iterable[sv.ClusterEvent]:
        """Oldest first."""
        return list(self._events)

    def warnings(self) -> list[tuple[float, str]]:
        """(Unix time, text) of the newest events of level warning or above, oldest first."""
        found = [(one.unix_s, one.text) for one in self._events if one.level != "info"]
        return found[-MOST_WARNINGS:]
