"""`alignedserve policies`: the names that `--policy` accepts, one per line."""

from __future__ import annotations

import json

from alignedserve.errors import ConfigError
from alignedserve.scheduler.systems import System, listed, served_settings


def list_policies(*, as_json: bool) -> int:
    systems = listed()
    if as_json:
        print(json.dumps([_facts(system) for system in systems], indent=2))
        return 0
    width = max(len(system.name) for system in systems)
    for system in systems:
        fixed = ", ".join(f"{key} {value}" for key, value in system.settings.items())
        notes = [*([f"sets {fixed}"] if fixed else []), *([] if _serves(system) else ["simulator only"])]
        remark = f" ({'; '.join(notes)})" if notes else ""
        print(f"{system.name:<{width}}  {system.summary}{remark}")
    print("or package.module:Class for a policy of your own")
    return 0


def _serves(system: System) -> bool:
    """Whether a cluster can use the policy. The simulator supports all policies."""
    try:
        served_settings(system.name)
    except ConfigError:
        return False
    return True


def _facts(system: System) -> dict[str, object]:
    return {
        "name": system.name,
        "topology": system.topology.value,
        "summary": system.summary,
        "serves": _serves(system),
        "settings": dict(system.settings),
        "options": dict(system.options),
    }
