"""The monitors and rules for Prometheus operators. They select the pods and services of deploy/kuberay."""

from __future__ import annotations

from typing import Any

from alignedserve.cluster.monitoring.alerts import rules

NAMESPACE = "alignedserve"
_LABELS = {"app.kubernetes.io/instance": "alignedserve"}


def objects(interval: str) -> list[dict[str, Any]]:
    """A ServiceMonitor, a PodMonitor and the rules, in the namespace of the cluster."""
    return [
        _object("ServiceMonitor", "alignedserve", _service_monitor(interval)),
        _object("PodMonitor", "alignedserve-ray", _pod_monitor()),
        _object("PrometheusRule", "alignedserve", rules()),
    ]


def values(interval: str) -> dict[str, Any]:
    """The same as values of kube-prometheus-stack, and where its Grafana takes the dashboard from."""
    provider = {
        "name": "alignedserve",
        "type": "file",
        "options": {"path": "/var/lib/grafana/dashboards/alignedserve"},
    }
    return {
        "prometheus": {
            "additionalServiceMonitors": [{"name": "alignedserve", **_there(), **_service_monitor(interval)}],
            "additionalPodMonitors": [{"name": "alignedserve-ray", **_there(), **_pod_monitor()}],
        },
        "additionalPrometheusRulesMap": {"alignedserve": rules()},
        "grafana": {"dashboardProviders": {"dashboardproviders.yaml": {"apiVersion": 1, "providers": [provider]}}},
    }


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE, "labels": dict(_LABELS)}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": kind, "metadata": metadata, "spec": spec}


def _there() -> dict[str, Any]:
    """The chart's monitors are in its own namespace."""
    return {"namespaceSelector": {"matchNames": [NAMESPACE]}}


def _service_monitor(interval: str) -> dict[str, Any]:
    """One target, whose answer has every role and store. `instance` is the process that a sample is of."""
    return {
        "selector": {"matchLabels": {**_LABELS, "app.kubernetes.io/component": "metrics"}},
        "endpoints": [{"port": "http", "path": "/metrics", "interval": interval, "honorLabels": True}],
    }


def _pod_monitor() -> dict[str, Any]:
    """Ray's own metrics, of each pod."""
    return {
        "selector": {"matchLabels": dict(_LABELS)},
        "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "30s", "honorLabels": True}],
    }
