"""The README beside the written files."""

README = """\
# Monitoring

`alignedserve monitoring` wrote these files for the cluster at {url}, scraped every {interval}. For another cluster:
`alignedserve monitoring --out DIR --url URL`.

| file | what it is |
|---|---|
| `prometheus.yml`, `alerts.yml` | Prometheus' configuration and alert rules |
| `grafana/provisioning/` | Grafana's data source and dashboard |
| `docker-compose.yaml` | both in containers |
| `values-kube-prometheus-stack.yaml` | values for the Helm chart, for clusters of `deploy/kuberay` |
| `kubernetes.yaml` | monitors and rules for a Prometheus operator without the chart |

`--ray` adds a job for Ray's own metrics, `--roles` one for each process's own page (`docs/operations/metrics.md`).

Prometheus is at http://127.0.0.1:9090, Grafana at http://127.0.0.1:3000. Both listen on this machine only. Grafana
shows the dashboard without a login, read-only.

With Docker:

```bash
docker compose up -d
```

With binaries of your own on the path, run what `alignedserve monitoring` prints: it has all settings. With its own ones
Grafana listens on every interface.

With kube-prometheus-stack:

```bash
helm upgrade --install monitoring prometheus-community/kube-prometheus-stack \\
    --namespace monitoring --create-namespace -f values-kube-prometheus-stack.yaml \\
    --set-file 'grafana.dashboards.alignedserve.alignedserve.json=grafana/provisioning/dashboards/alignedserve.json'
```

With another Prometheus operator: `kubectl apply -f kubernetes.yaml`, and import the dashboard in Grafana.

Alerts go nowhere yet: add an `alerting` section with your Alertmanager to `prometheus.yml`.
`docs/operations/runbooks.md` says what each alert means and what to do.
"""
