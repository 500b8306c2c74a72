"""Commands to a running cluster (`alignedserve scale`, `restart`, `stop`), through its gateway."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from alignedserve.admin import ADMIN_HEADER
from alignedserve.cluster.cli.status_command import ask_newest, same_url
from alignedserve.cluster.records import fetch_json, fetch_status, read_records
from alignedserve.errors import AlignedServeError, UnavailableError

ORDER_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """Where it answers, and the keys that it asks for. `pids` are those of its roles, where it is this machine's."""

    url: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    pids: frozenset[int]

    def status(self) -> dict[str, Any] | None:
        """None where nobody answers just now."""
        try:
            return fetch_status(self.url, api_key=self.api_key)
        except UnavailableError:
            return None

    def order(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """The gateway's answer. Raises AlignedServeError with its reason, UnavailableError."""
        answer = fetch_json(
            f"{self.url}/alignedserve/{name}",
            ORDER_TIMEOUT_S,
            api_key=self.api_key,
            body=body,
            headers={ADMIN_HEADER: self.admin_key},
        )
        if isinstance(error := answer.get("error"), dict):
            raise AlignedServeError(str(error.get("message")))
        return answer


def find_cluster(url: str | None, api_key_file: str | None) -> RunningCluster:
    """The cluster at `url`, or this user's only one. Raises AuthenticationError, ConfigError, UnavailableError."""

    def fetch(address: str, *, api_key: str) -> tuple[str, dict[str, Any]]:
        return api_key, fetch_status(address, api_key=api_key)

    where, (api_key, status) = ask_newest(url, api_key_file, fetch, only=True)
    record = next((record for record in read_records() if same_url(record, where)), None)
    pids = frozenset(int(entry["pid"]) for entry in status.get("roles", ())) if record is not None else frozenset()
    return RunningCluster(where.rstrip("/"), api_key, record.admin_key if record else "", pids)
