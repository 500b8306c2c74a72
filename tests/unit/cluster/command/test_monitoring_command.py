"""`alignedserve monitoring`: what it writes for a URL, prints for the programs that are there, and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from alignedserve.cluster.cli.main import main


def programs(folder: Path, *names: str) -> str:
    """A PATH with these programs."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("url", "scheme", "address", "path"),
    [
        ("http://10.0.0.7:9001", "http", "10.0.0.7:9001", "/metrics"),
        ("gateway:8000/", "http", "gateway:8000", "/metrics"),
        ("https://llm.example.com/served", "https", "llm.example.com", "/served/metrics"),
        ("http://[::1]:8000", "http", "[::1]:8000", "/metrics"),
    ],
)
def test_prometheus_scrapes_the_url(url: str, scheme: str, address: str, path: str, tmp_path: Path) -> None:
    assert main(["monitoring", "--out", str(tmp_path / "new/folder"), "--url", url, "--interval", "0.5"]) == 0
    config = yaml.safe_load((tmp_path / "new/folder/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert (job["scheme"], job["static_configs"][0]["targets"], job["metrics_path"]) == (scheme, [address], path)
    assert job["honor_labels"] is True
    assert config["global"]["scrape_interval"] == "500ms"
    assert json.loads((tmp_path / "new/folder/grafana/provisioning/dashboards/alignedserve.json").read_text())


def test_ray_is_scraped_when_asked_for(tmp_path: Path) -> None:
    assert main(["monitoring", "--out", str(tmp_path), "--ray"]) == 0
    jobs = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["alignedserve", "ray"]


def test_it_prints_docker_without_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin"))
    assert main(["monitoring", "--out", str(tmp_path / "out")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"  docker compose -f {tmp_path}/out/docker-compose.yaml up -d prometheus grafana"


@pytest.mark.parametrize(("name", "start"), [("grafana", "grafana server"), ("grafana-server", "grafana-server")])
def test_it_prints_the_commands_of_programs_that_are_there(
    name: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "grafana 12"
    (home / "conf").mkdir(parents=True)
    (home / "conf/defaults.ini").touch()
    monkeypatch.setenv("PATH", f"{programs(tmp_path / 'bin', 'prometheus')}:{programs(home / 'bin', name)}")
    assert main(["monitoring", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"  prometheus --config.file={tmp_path}/out/prometheus.yml" in lines[2]
    assert f"GF_PATHS_PROVISIONING={tmp_path}/out/grafana/provisioning " in lines[4]
    assert lines[4].endswith(f" {start} --homepath '{home}'")
    assert len(lines) == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "ftp://there"],
        ["--url", "http://"],
        ["--url", "http://[::1"],
        ["--url", "http://user:key@there"],
        ["--interval", "0"],
        ["--interval", "nan"],
        ["--interval", "inf"],
    ],
)
def test_what_cannot_be_used_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitoring", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["monitoring", "--out", str(tmp_path / "file")]) == 2
    assert "alignedserve: error: --out" in capsys.readouterr().err
