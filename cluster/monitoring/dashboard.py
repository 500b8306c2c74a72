"""Makes Grafana's dashboard from the panels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from string import ascii_uppercase
from typing import Any

from alignedserve.cluster.monitoring.panels import ROWS, Panel
from alignedserve.cluster.monitoring.selectors import restricted

Json = dict[str, Any]

UID = "alignedserve"
TITLE = "AlignedServe"
JOB = "alignedserve"  # of the scrape, natively and with Docker; an operator of Kubernetes names it after the service
SCHEMA_VERSION = 41  # of Grafana 12; 11 reads it too
COLUMNS = 24
HEIGHTS = {True: 4, False: 8}  # of a figure, and of a plot
REFRESH = "10s"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> Json:
    """The dashboard as Grafana imports it."""
    return {
        "uid": UID,
        "title": TITLE,
        "description": "Requests, alignment of decode batches, KV and transfers, and failures of one cluster.",
        "tags": [UID],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "refresh": REFRESH,
        "time": {"from": "now-30m", "to": "now"},
        "links": [],
        "annotations": {"list": [_starts()]},
        "templating": {
            "list": [
                _datasource(),
                _jobs(),
                _instances("decode", "alignedserve_decode_running"),
                _instances("prefill", "alignedserve_prefill_pending_tokens"),
            ]
        },
        "panels": list(_panels()),
    }


def of_job(expr: str) -> str:
    """The expression, with each metric restricted to the cluster that the dashboard shows."""
    return restricted(expr, 'job="$job"')


def _panels() -> Iterator[Json]:
    """Rows and their panels, from left to right and from top to bottom."""
    ids, y = count(1), 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {"id": next(ids), "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > COLUMNS or (x and height != HEIGHTS[panel.figure]):
                x, y = 0, y + height
            height = HEIGHTS[panel.figure]
            yield {"id": next(ids), **_panel(panel), "gridPos": {"x": x, "y": y, "w": panel.width, "h": height}}
            x += panel.width
        y += height


def _panel(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit, "min": 0, "noValue": "–", "color": {"mode": "palette-classic"}}
    if panel.highest is not None:
        defaults["max"] = panel.highest
    if not panel.figure:
        defaults["custom"] = {
            "fillOpacity": 30 if panel.stacked else 0,
            "showPoints": "auto",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return {
        "type": "stat" if panel.figure else "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _figure() if panel.figure else _plot(),
        "targets": [
            {"refId": letter, "datasource": SOURCE, "expr": of_job(query.expr), "legendFormat": query.legend}
            for letter, query in zip(ascii_uppercase, panel.queries, strict=False)
        ],
    }


def _figure() -> Json:
    return {"colorMode": "none", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"], "values": False}}


def _plot() -> Json:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _datasource() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}


def _jobs() -> Json:
    return {
        **_variable("job", "cluster", "label_values(alignedserve_role_starts_total, job)"),
        "current": {"text": JOB, "value": JOB},
    }


def _instances(role: str, metric: str) -> Json:
    """The processes that have the metric; all at first."""
    return {
        **_variable(role, f"{role} instances", f"label_values({of_job(metric)}, instance)"),
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _variable(name: str, label: str, query: str) -> Json:
    """A variable of the series' labels, asked for whenever the dashboard's time changes."""
    asked = {"query": query, "refId": name}
    return {
        "name": name,
        "label": label,
        "type": "query",
        "hide": 0,
        "datasource": SOURCE,
        "definition": query,
        "query": asked,
        "refresh": 2,
        "sort": 1,
    }


def _starts() -> Json:
    """A line in every plot where the supervisor has started a process."""
    return {
        "name": "process starts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "orange",
        "expr": of_job("changes(alignedserve_role_starts_total[1m]) > 0"),
        "titleFormat": "the supervisor has started a process",
    }
