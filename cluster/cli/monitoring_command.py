"""`alignedserve monitoring`: writes what Prometheus and Grafana need for a cluster, and says how to start them."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

DEFAULT_HOME = Path("/usr/share/grafana")  # of Grafana's packages


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", required=True, help="folder for the files")
    url = "http://127.0.0.1:8000"
    parser.add_argument("--url", default=url, help=f"URL of the cluster as Prometheus reaches it (default {url})")
    interval = "seconds between two scrapes (default 10)"
    parser.add_argument("--interval", type=float, default=10.0, metavar="S", help=interval)
    ray = "scrape Ray's metrics, too: for Prometheus on the head of a Ray cluster that `ray start` started"
    parser.add_argument("--ray", action="store_true", help=ray)
    roles = "scrape each process's own page, too (cluster.role_metrics)"
    parser.add_argument("--roles", action="store_true", help=roles)
    credentials = "with --roles, where there are API keys: a file that has one of them, as Prometheus finds it"
    parser.add_argument("--credentials-file", metavar="FILE", default="", help=credentials)
    runbooks = "URL of the runbooks' page on your site of the docs, for the links of alerts"
    parser.add_argument("--runbooks", metavar="URL", default="", help=runbooks)


def run(given: argparse.Namespace) -> int:
    """Raises ConfigError for an unusable URL or interval, or if the files cannot be written."""
    from alignedserve.cluster.monitoring.files import Target, write

    folder = Path(given.out)
    target = Target.of(given.url, given.interval, given.ray, given.roles, given.credentials_file, given.runbooks)
    written = write(folder, target)
    print(f"wrote {len(written)} files for {target.url} into {folder}; README.md says what each is")
    for line in commands(folder.resolve()):
        print(line)
    return 0


def commands(folder: Path) -> Iterator[str]:
    """How to start what is installed here; for the rest, with Docker."""
    from alignedserve.cluster.monitoring.files import COMPOSE, GRAFANA_PORT, PROMETHEUS_PORT

    missing = []
    for name, port, start in (
        ("prometheus", PROMETHEUS_PORT, prometheus_command(folder)),
        ("grafana", GRAFANA_PORT, grafana_command(folder)),
    ):
        if start:
            yield f"{name.capitalize()}, http://127.0.0.1:{port}:"
            yield f"  {start}"
        else:
            missing.append(name)
    if missing:
        yield f"{' and '.join(missing)}: not on the path. With Docker:"
        yield f"  {shlex.join(['docker', 'compose', '-f', str(folder / COMPOSE), 'up', '-d', *missing])}"


def prometheus_command(folder: Path) -> str:
    """Empty if it is not on the path."""
    from alignedserve.cluster.monitoring.files import PROMETHEUS_PORT

    if shutil.which("prometheus") is None:
        return ""
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "prometheus-data",
        "web.listen-address": f"127.0.0.1:{PROMETHEUS_PORT}",
    }
    return shlex.join(["prometheus", *(f"--{name}={value}" for name, value in options.items())])


def grafana_command(folder: Path) -> str:
    """Empty if it is not on the path. Newer versions have only `grafana server`."""
    from alignedserve.cluster.monitoring.files import PROVISIONING, grafana_environment

    for start in (["grafana", "server"], ["grafana-server"]):
        if (found := shutil.which(start[0])) is not None:
            unpacked = Path(found).resolve().parents[1]  # an archive has bin/ and conf/ side by side
            home = unpacked if (unpacked / "conf/defaults.ini").is_file() else DEFAULT_HOME
            settings = grafana_environment(str(folder / PROVISIONING)) | {
                "GF_PATHS_DATA": str(folder / "grafana-data"),
                "GF_PATHS_LOGS": str(folder / "grafana-data/log"),
            }
            words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
            return " ".join([*words, shlex.join([*start, "--homepath", str(home)])])
    return ""
