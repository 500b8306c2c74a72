"""The files that start Prometheus and Grafana for a cluster: natively, with Docker, and on Kubernetes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from alignedserve.cluster.monitoring import kubernetes
from alignedserve.cluster.monitoring.alerts import RUNBOOKS, rules
from alignedserve.cluster.monitoring.dashboard import JOB, TITLE, dashboard
from alignedserve.cluster.monitoring.readme import README
from alignedserve.errors import ConfigError

URL = "http://127.0.0.1:8000"
INTERVAL_S = 10.0
PROMETHEUS_PORT, GRAFANA_PORT = 9090, 3000
PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
GRAFANA_IMAGE = "grafana/grafana:12.3.1"
COMPOSE = "docker-compose.yaml"
PROVISIONING = "grafana/provisioning"
DASHBOARD = f"{PROVISIONING}/dashboards/alignedserve.json"
RAY_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"  # a Ray cluster writes it on its head
WIDTH = 120
_IN_IMAGE = "/etc/grafana/provisioning"


@dataclass(frozen=True, slots=True)
class Target:
    """The cluster that is scraped, and how often. `ray`: Ray's own metrics, too. `roles`: each process's own page.

    `credentials`: a file with an API key, for the list of these pages; "": there are no API keys. `runbooks`: the URL
    of their page; "": its path in the repository.
    """

    scheme: str
    address: str
    path: str
    interval_s: float
    ray: bool
    roles: bool
    credentials: str
    runbooks: str

    @classmethod
    def of(
        cls,
        url: str,
        interval_s: float,
        ray: bool = False,
        roles: bool = False,
        credentials: str = "",
        runbooks: str = "",
    ) -> Target:
        """Raises ConfigError for unusable values."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            usable = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(f"--url takes the URL of a gateway such as {URL}, not {url!r}")
        if not 0.001 <= interval_s < math.inf:
            raise ConfigError(f"--interval takes seconds above 0, not {interval_s:g}")
        if runbooks and not re.fullmatch(r"https?://\S+", runbooks):
            raise ConfigError(f"--runbooks takes the URL of a page, not {runbooks!r}")
        if credentials and not roles:
            raise ConfigError("--credentials-file is for the list of each process's page: add --roles")
        path = f"{parts.path.rstrip('/')}/metrics"
        return cls(parts.scheme, parts.netloc, path, interval_s, ray, roles, credentials, runbooks)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}{self.path.removesuffix('/metrics')}"

    @property
    def interval(self) -> str:
        """As Prometheus writes it."""
        seconds = self.interval_s
        return f"{seconds:.0f}s" if seconds == round(seconds) else f"{seconds * 1000:.0f}ms"


def write(folder: Path, target: Target) -> list[str]:
    """Write all files into the folder. Returns their paths in it. Raises ConfigError if they cannot be written."""
    made = files(target)
    try:
        for name, text in made.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error}") from error
    return list(made)


def files(target: Target) -> Mapping[str, str]:
    """The text of each file, by its path."""
    made = {
        "README.md": README.format(url=target.url, interval=target.interval),
        "prometheus.yml": _yaml(_prometheus(target), "Prometheus' configuration."),
        "alerts.yml": _yaml(rules(), "The alert rules: docs/operations/runbooks.md."),
        f"{PROVISIONING}/datasources/alignedserve.yaml": _yaml(_datasource(target), "Where Grafana asks."),
        f"{PROVISIONING}/dashboards/alignedserve.yaml": _yaml(_provider(), "Where Grafana finds the dashboard."),
        DASHBOARD: json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n",
        COMPOSE: _yaml(_compose(target), "Prometheus and Grafana in the host's network, on loopback only."),
        "values-kube-prometheus-stack.yaml": _yaml(
            kubernetes.values(target.interval), "Values for the Helm chart kube-prometheus-stack."
        ),
        "kubernetes.yaml": _yaml(
            kubernetes.objects(target.interval), "For a Prometheus operator that was not installed by the chart."
        ),
    }
    link = f"runbook_url: {target.runbooks or RUNBOOKS}"
    return {name: text.replace(f"runbook_url: {RUNBOOKS}", link) for name, text in made.items()}


def grafana_environment(provisioning: str) -> dict[str, str]:
    """Grafana's settings: read-only, without a login, on loopback only. It sends nothing to other hosts."""
    return {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(GRAFANA_PORT),
        "GF_PATHS_PROVISIONING": provisioning,
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{provisioning}/dashboards/alignedserve.json",
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "GF_PLUGINS_PREINSTALL_DISABLED": "true",
    }


def _yaml(content: Any, meaning: str) -> str:
    """One document, or one for each entry of a list."""
    documents = content if isinstance(content, list) else [content]
    text = yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=WIDTH)
    return f"# {meaning} Written by `alignedserve monitoring`.\n{text}"


def _prometheus(target: Target) -> dict[str, Any]:
    own = {
        "job_name": JOB,
        "scheme": target.scheme,
        "metrics_path": target.path,
        "honor_labels": True,  # `instance` is the process that a sample is of
        "static_configs": [{"targets": [target.address]}],
    }
    rays = {"job_name": "ray", "honor_labels": True, "file_sd_configs": [{"files": [RAY_TARGETS]}]}
    discovery: dict[str, Any] = {"url": f"{target.url}/metrics/targets", "refresh_interval": target.interval}
    if target.credentials:
        discovery["authorization"] = {"credentials_file": target.credentials}
    roles = {"job_name": f"{JOB}-roles", "honor_labels": True, "http_sd_configs": [discovery]}
    return {
        "global": {"scrape_interval": target.interval, "evaluation_interval": target.interval},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [own, *[rays] * target.ray, *[roles] * target.roles],
    }


def _datasource(target: Target) -> dict[str, Any]:
    source = {
        "name": TITLE,
        "uid": "alignedserve-prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": f"http://127.0.0.1:{PROMETHEUS_PORT}",
        "isDefault": True,
        "jsonData": {"timeInterval": target.interval},
    }
    return {"apiVersion": 1, "datasources": [source]}


def _provider() -> dict[str, Any]:
    place = {"path": "$GF_PATHS_PROVISIONING/dashboards"}
    return {"apiVersion": 1, "providers": [{"name": TITLE, "type": "file", "allowUiUpdates": False, "options": place}]}


def _compose(target: Target) -> dict[str, Any]:
    """In the host's network, because a bridge does not reach a cluster that listens on loopback."""
    ray = str(Path(RAY_TARGETS).parent)  # the folder, since Ray replaces the file
    more = [f"{ray}:{ray}:ro"] * target.ray
    if target.roles and (key := target.credentials):  # Prometheus takes a relative path as one beside its file
        more.append(f"{key}:{key}:ro" if Path(key).is_absolute() else f"./{key}:/etc/prometheus/{key}:ro")
    prometheus = {
        "image": PROMETHEUS_IMAGE,
        "network_mode": "host",
        "restart": "unless-stopped",
        "command": [
            "--config.file=/etc/prometheus/prometheus.yml",
            "--storage.tsdb.path=/prometheus",
            f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
        ],
        "volumes": [
            "./prometheus.yml:/etc/prometheus/prometheus.yml:ro",
            "./alerts.yml:/etc/prometheus/alerts.yml:ro",
            *more,
            "prometheus:/prometheus",
        ],
    }
    grafana = {
        "image": GRAFANA_IMAGE,
        "network_mode": "host",
        "restart": "unless-stopped",
        "environment": grafana_environment(_IN_IMAGE),
        "volumes": [
            *(f"./{PROVISIONING}/{kind}:{_IN_IMAGE}/{kind}:ro" for kind in ("datasources", "dashboards")),
            "grafana:/var/lib/grafana",
        ],
    }
    return {
        "name": "alignedserve-monitoring",
        "services": {"prometheus": prometheus, "grafana": grafana},
        "volumes": {"prometheus": {}, "grafana": {}},
    }
