"""What has happened in the cluster of late: the supervisor's own log, and what gateways count."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from alignedserve.control.role import REFUSED_GAUGE, RESUBMITTED_GAUGE
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

MOST_EVENTS = 300
MOST_WARNINGS = 20
_LOGGER = "alignedserve.cluster.supervisor"
COUNTED_EVERY_S = 10.0
_COUNTED = {REFUSED_GAUGE: "requests were refused", RESUBMITTED_GAUGE: "requests were submitted again"}


class RecentEvents(logging.Handler):
    """The newest log records of the supervisor from INFO on. Another supervisor of the same process has its own."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._events: deque[sv.ClusterEvent] = deque(maxlen=MOST_EVENTS)
        self._totals: dict[tuple[str, int], dict[str, float]] = {}  # of gateways, by id and incarnation
        self._untold: Counter[str] = Counter()
        self._told_s: dict[str, float] = {}

    def start(self) -> None:
        logging.getLogger(_LOGGER).addHandler(self)

    def stop(self) -> None:
        logging.getLogger(_LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        event = sv.ClusterEvent(unix_s=record.created, level=record.levelname.lower(), text=record.getMessage())
        self._events.append(event)

    def count(self, gateway: pb.ProcessKey, gauges: Mapping[str, float], now_s: float) -> None:
        """A heartbeat of a gateway: log what it counts, each kind at once and then every ten seconds at most."""
        before = self._totals.setdefault((gateway.id, gateway.incarnation), {})
        for name, meaning in _COUNTED.items():
            total = gauges.get(name, 0.0)
            self._untold[name] += int(total - before.get(name, total))  # what came before this supervisor is known
            before[name] = total
            if self._untold[name] and now_s - self._told_s.get(name, -COUNTED_EVERY_S) >= COUNTED_EVERY_S:
                logger.warning("%d %s", self._untold.pop(name), meaning)
                self._told_s[name] = now_s

    def newest(self) -> Iterable[sv.ClusterEvent]:
        """Oldest first."""
        return list(self._events)

    def warnings(self) -> list[tuple[float, str]]:
        """(Unix time, text) of the newest events of level warning or above, oldest first."""
        found = [(one.unix_s, one.text) for one in self._events if one.level != "info"]
        return found[-MOST_WARNINGS:]
