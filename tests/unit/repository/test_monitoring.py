"""deploy/monitoring: it is what the command writes, and names only metrics, labels, files and runbooks that exist."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from alignedserve.cluster.monitoring.alerts import ALERTS, RUNBOOKS
from alignedserve.cluster.monitoring.dashboard import COLUMNS, dashboard, of_job
from alignedserve.cluster.monitoring.files import COMPOSE, INTERVAL_S, URL, Target, files
from alignedserve.cluster.monitoring.panels import ROWS
from support import kuberay
from support.grafana_schema import DASHBOARD
from support.metrics_page import described
from support.promql import problems

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/monitoring"
WRITTEN = files(Target.of(URL, INTERVAL_S))
KNOWN = described()


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def shown(text: str) -> list[str]:
    """The labels in a legend or in the text of an alert."""
    return re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text)


def test_the_folder_is_what_the_command_writes() -> None:
    found = {str(path.relative_to(FOLDER)): path.read_text("utf-8") for path in FOLDER.rglob("*") if path.is_file()}
    assert sorted(found) == sorted(WRITTEN)
    wrong = [name for name, text in WRITTEN.items() if found[name] != text]
    assert wrong == [], "run alignedserve monitoring --out deploy/monitoring"


# ---- metrics and labels


def test_every_metric_and_label_of_the_panels_exists() -> None:
    targets = [(panel["title"], target) for panel in panels() for target in panel["targets"]]
    wrong = [
        f"{title}: {problem}"
        for title, target in targets
        for problem in problems(target["expr"], KNOWN, shown(target["legendFormat"]))
    ]
    assert wrong == []
    assert all('job="$job"' in target["expr"] or "ALERTS" in target["expr"] for _, target in targets)


def test_no_panel_takes_the_rate_of_a_sum_that_may_fall() -> None:
    """A bubble may be below 0, and Prometheus takes a counter's fall for a new process."""
    exprs = {panel["title"]: panel["targets"][0]["expr"] for panel in panels() if panel["title"].startswith("Bubble")}
    assert len(exprs) == 2
    for expr in exprs.values():
        assert "bubble_seconds" not in expr
        assert re.match(r"1 - sum .*iteration_balanced_.* / sum .*iteration_predicted_", expr)


def test_every_metric_and_label_of_variables_and_marks_exists() -> None:
    variables = [entry for entry in dashboard()["templating"]["list"] if entry["type"] == "query"]
    for variable in variables:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
        assert match is not None
        assert problems(match[1], KNOWN, [match[2]]) == []
    (marks,) = dashboard()["annotations"]["list"]
    assert problems(marks["expr"], KNOWN) == []
    names = {variable["name"] for variable in variables} | {"datasource", "__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()))) == names


def test_every_metric_and_label_of_the_alerts_exists() -> None:
    wrong = [
        f"{alert.name}: {problem}"
        for alert in ALERTS
        for problem in problems(alert.expr, KNOWN, shown(alert.summary + alert.description))
        if problem != "the result has no label value"
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        ("rate(alignedserve_nothing_total[5m])", "no metric alignedserve_nothing_total"),
        ("sum (alignedserve_requests_queue) > 0", "no metric alignedserve_requests_queue"),
        ("alignedserve_gateway_ttft_seconds", "no metric alignedserve_gateway_ttft_seconds"),
        ("alignedserve_requests_queued_count", "no metric alignedserve_requests_queued_count"),
        ('alignedserve_kv_blocks{kind="free"}', "alignedserve_kv_blocks has no label kind"),
        ("sum by (role) (alignedserve_kv_blocks)", "nothing has the label role"),
        ('sum by (le) (alignedserve_gateway_ttft_seconds_sum{instance="a"})', "nothing has the label le"),
    ],
)
def test_what_does_not_exist_is_found(expr: str, problem: str) -> None:
    assert problems(expr, KNOWN) == [problem]
    assert problems(of_job(expr), KNOWN) == [problem]


def test_a_legend_has_the_labels_that_are_left() -> None:
    grouped = 'sum by (store) (alignedserve_kv_blocks{state="free"})'
    assert problems(grouped, KNOWN, ["store"]) == []
    assert problems(grouped, KNOWN, ["state"]) == ["the result has no label state"]


# ---- the dashboard


def test_the_dashboard_fits_grafanas_schema() -> None:
    validator = jsonschema.Draft202012Validator(DASHBOARD)
    assert [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(dashboard())] == []
    for spoil in (
        lambda made: made["panels"][1].pop("targets"),
        lambda made: made["panels"][1]["fieldConfig"]["defaults"].update(units="s"),
        lambda made: made["panels"][1]["gridPos"].update(x=24),
        lambda made: made.update(schemaVersion="41"),
    ):
        spoilt = copy.deepcopy(dashboard())
        spoil(spoilt)
        assert not validator.is_valid(spoilt)


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        assert columns[-1] < COLUMNS
        cells = set(itertools.product(columns, range(place["y"], place["y"] + place["h"])))
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_rows_and_titles() -> None:
    assert [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"] == list(ROWS)
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)
    text = (ROOT / RUNBOOKS).read_text("utf-8")
    named = set(re.findall(r'"([A-Z][^"]+)"', text))
    assert named - set(titles) == set()


# ---- the alerts


def sections() -> Iterator[tuple[str, str]]:
    """`(severity, alert)` of each runbook."""
    severity = ""
    for marks, title in re.findall(r"^(##+) (.+)$", (ROOT / RUNBOOKS).read_text("utf-8"), re.MULTILINE):
        if marks == "##":
            severity = title.lower().removesuffix("s")
        else:
            yield severity, title


def test_each_alert_has_a_runbook_with_its_severity() -> None:
    assert list(sections()) == [(alert.severity, alert.name) for alert in ALERTS]
    assert [alert.runbook for alert in ALERTS] == [f"{RUNBOOKS}#{name.lower()}" for _, name in sections()]


def test_alerts_link_to_the_runbooks_of_ones_own_site() -> None:
    page = "https://docs.example.com/operations/runbooks/"
    made = files(Target.of(URL, INTERVAL_S, runbooks=page))
    for name in ("alerts.yml", "kubernetes.yaml", "values-kube-prometheus-stack.yaml"):
        links = re.findall(r"runbook_url: (\S+)", made[name])
        assert links == [f"{page}#{alert.name.lower()}" for alert in ALERTS], name


# ---- the other files


def parsed(name: str) -> list[Any]:
    return list(yaml.safe_load_all(WRITTEN[name]))


def test_docker_mounts_what_is_written_and_listens_on_loopback() -> None:
    (compose,) = parsed(COMPOSE)
    for service in compose["services"].values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        sources = [volume.split(":")[0] for volume in service["volumes"]]
        for source in sources:
            assert source in compose["volumes"] or any(name.startswith(source[2:]) for name in WRITTEN)
    assert "--web.listen-address=127.0.0.1:9090" in compose["services"]["prometheus"]["command"]
    assert compose["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_the_readme_has_no_command_of_grafana_with_a_part_of_its_settings() -> None:
    """It would listen on every interface, with a password that everybody knows."""
    assert not re.search(r"GF_|grafana[ -]server", WRITTEN["README.md"])


@pytest.mark.parametrize("key", ["", "/etc/keys/prometheus", "keys/prometheus"])
def test_docker_mounts_each_file_that_prometheus_reads(key: str) -> None:
    made = files(Target.of(URL, INTERVAL_S, ray=True, roles=True, credentials=key))
    config, beside = yaml.safe_load(made["prometheus.yml"]), Path("/etc/prometheus")
    mounts = yaml.safe_load(made[COMPOSE])["services"]["prometheus"]["volumes"]
    bound = {Path(target): source for source, target, *_ in (mount.split(":") for mount in mounts)}
    named = set(config["rule_files"])
    for job in config["scrape_configs"]:
        named |= {path for found in job.get("file_sd_configs", ()) for path in found["files"]}
        named |= {found["authorization"]["credentials_file"] for found in job.get("http_sd_configs", ()) if key}
    assert named == {"alerts.yml", "/tmp/ray/prom_metrics_service_discovery.json", *filter(None, [key])}
    for path in named:
        inside = beside / path  # Prometheus takes a relative path as one beside its configuration
        (mounted,) = [mount for mount in bound if inside.is_relative_to(mount)]
        assert bound[mounted] == (str(mounted) if path.startswith("/") else f"./{path}")
    assert all(mount.endswith(":ro") for mount in mounts if mount != "prometheus:/prometheus")
    assert "/tmp/ray" in bound.values(), "Ray replaces the file, so its folder is mounted"


def test_monitors_select_what_those_of_kuberay_select() -> None:
    ours = {entry["kind"]: entry for entry in parsed("kubernetes.yaml")}
    (values,) = parsed("values-kube-prometheus-stack.yaml")
    charts = {
        "ServiceMonitor": values["prometheus"]["additionalServiceMonitors"],
        "PodMonitor": values["prometheus"]["additionalPodMonitors"],
    }
    for theirs in kuberay.manifests("monitoring"):
        monitor = ours[theirs["kind"]]
        assert monitor["metadata"]["name"] == theirs["metadata"]["name"]
        assert without_interval(monitor["spec"]) == without_interval(theirs["spec"])
        (chart,) = charts[theirs["kind"]]
        assert {"name": monitor["metadata"]["name"], **monitor["spec"]}.items() <= chart.items()
        assert chart["namespaceSelector"] == {"matchNames": [monitor["metadata"]["namespace"]]}
    assert ours["PrometheusRule"]["spec"] == values["additionalPrometheusRulesMap"]["alignedserve"]
    assert [ours["PrometheusRule"]["spec"]] == parsed("alerts.yml")


def without_interval(spec: Any) -> Any:
    if isinstance(spec, dict):
        return {key: without_interval(value) for key, value in spec.items() if key != "interval"}
    return [without_interval(value) for value in spec] if isinstance(spec, list) else spec
