"""The part of Grafana's dashboard schema (kinds/dashboard/dashboard_kind.cue) that is used here; no other fields."""

from __future__ import annotations

from typing import Any


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


TEXT = {"type": "string", "minLength": 1}
ANY_TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
NUMBER = {"type": "number"}
DURATION = {"type": "string", "pattern": "^[0-9]+(s|m|h|d)$"}
SOURCE = _object({"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}})
PLACE = _object(
    {
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "h": {"type": "integer", "minimum": 1},
    }
)
TARGET = _object({"refId": {"pattern": "^[A-Z]$"}, "datasource": SOURCE, "expr": TEXT, "legendFormat": TEXT})
CUSTOM = _object(
    {
        "fillOpacity": {"type": "integer", "minimum": 0, "maximum": 100},
        "showPoints": {"enum": ["auto", "never", "always"]},
        "stacking": _object({"mode": {"enum": ["none", "normal", "percent"]}, "group": TEXT}),
    }
)
DEFAULTS = _object(
    {"unit": TEXT, "color": _object({"mode": {"enum": ["palette-classic", "thresholds", "fixed"]}})},
    {"min": NUMBER, "max": NUMBER, "decimals": NUMBER, "noValue": TEXT, "custom": CUSTOM},
)
STAT_OPTIONS = _object(
    {
        "colorMode": {"enum": ["none", "value", "background"]},
        "graphMode": {"enum": ["none", "area"]},
        "reduceOptions": _object({"calcs": _list(TEXT, 1), "values": FLAG}, {"fields": ANY_TEXT}),
    }
)
PLOT_OPTIONS = _object(
    {
        "legend": _object(
            {
                "displayMode": {"enum": ["list", "table", "hidden"]},
                "placement": {"enum": ["bottom", "right"]},
                "showLegend": FLAG,
            },
            {"calcs": _list(TEXT)},
        ),
        "tooltip": _object({"mode": {"enum": ["single", "multi", "none"]}, "sort": {"enum": ["none", "asc", "desc"]}}),
    }
)


def _panel(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    return _object(
        {
            "id": {"type": "integer", "minimum": 1},
            "type": {"const": kind},
            "title": TEXT,
            "description": TEXT,
            "gridPos": PLACE,
            "datasource": SOURCE,
            "fieldConfig": _object({"defaults": DEFAULTS, "overrides": _list({"type": "object"})}),
            "options": options,
            "targets": _list(TARGET, 1),
        }
    )


ROW = _object(
    {
        "id": {"type": "integer", "minimum": 1},
        "type": {"const": "row"},
        "title": TEXT,
        "collapsed": FLAG,
        "gridPos": PLACE,
        "panels": _list({"type": "object"}),
    }
)
VARIABLE = _object(
    {"name": TEXT, "type": {"enum": ["query", "datasource"]}, "query": {"type": ["string", "object"]}},
    {
        "label": TEXT,
        "hide": {"enum": [0, 1, 2]},
        "datasource": SOURCE,
        "definition": TEXT,
        "refresh": {"enum": [0, 1, 2]},
        "sort": {"enum": list(range(7))},
        "multi": FLAG,
        "includeAll": FLAG,
        "allValue": TEXT,
        "current": {"type": "object", "required": ["text", "value"]},
    },
)
ANNOTATION = _object(
    {"name": TEXT, "datasource": SOURCE, "enable": FLAG, "iconColor": TEXT},
    {"expr": TEXT, "titleFormat": TEXT, "hide": FLAG},
)
DASHBOARD = _object(
    {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "title": TEXT,
        "schemaVersion": {"type": "integer", "minimum": 39, "maximum": 42},
        "version": {"type": "integer", "minimum": 1},
        "editable": FLAG,
        "graphTooltip": {"enum": [0, 1, 2]},
        "time": _object({"from": TEXT, "to": TEXT}),
        "refresh": DURATION,
        "templating": _object({"list": _list(VARIABLE, 1)}),
        "annotations": _object({"list": _list(ANNOTATION)}),
        "panels": _list({"anyOf": [ROW, _panel("stat", STAT_OPTIONS), _panel("timeseries", PLOT_OPTIONS)]}, 1),
    },
    {"description": TEXT, "tags": _list(TEXT), "timezone": {"enum": ["browser", "utc"]}, "links": _list({})},
)
