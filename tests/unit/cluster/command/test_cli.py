"""The command as users run it: fast where it should be, and one clear line for each error."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from alignedserve.cluster.cli.serve_process import free_port
from alignedserve.cluster.records import Record, read_records


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hides the records of clusters that run on this machine."""
    monkeypatch.setenv("ALIGNEDSERVE_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "alignedserve.cluster.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def error_line(done: subprocess.CompletedProcess[str], status: int = 2) -> str:
    """The single error line on stderr of a failed command."""
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr.startswith("alignedserve: error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "/no/such/folder"), "'/no/such/folder' does not exist"),
        (("--set", "decode.cach_blocks=3"), "the nearest is 'decode.cache_blocks'"),
        (("--prefil", "2"), "the nearest is --prefill"),
        (("--prot", "8123"), "the nearest is --port (see `alignedserve serve --help`)"),
        (("--prefill", "0"), "cluster.prefill must be between 1 and 1024"),
        (("--policy", "nonesuch"), "choose one of: aligned, aligned-cost, fcfs, "),
        (("--policy", "vllm"), "for now it runs in the simulator only"),
        (("--policy", "oracle"), "runs in the simulator only"),
        (("--policy", "aligned-no-prefetch", "--set", "cluster.prefetch=true"), "needs cluster.prefetch False"),
        (("--cost-model", "nonesuch"), "unknown cost model 'nonesuch'"),
        (("--dtype", "int8"), "model.dtype must be one of"),
        (("--set", "kv_pool.size_gib=100000"), "of memory is available"),
        (("--config", "/no/such/file.yaml"), "cannot read configuration file"),
        (("--chat-template", "/no/such/template"), "file /no/such/template does not exist"),
        (("--tensor-parallel-size", "3"), "3 ranks cannot share them (tensor parallel degrees that fit: 1, 2, 4"),
        (("--prefill-tp", "2", "--decode-tp", "7"), "7 ranks cannot share them"),
        (("--tensor-parallel-size", "2", "--device", "cuda"), "of 4 ranks together, but this machine has no GPU"),
        (("--pipeline-parallel-size", "9"), "9 stages cannot share them"),
        (("--enable-expert-parallel",), "use --decode-ep"),
        (("--decode-ep", "2"), "no experts that ranks could share"),
        (("--decode-ep", "2", "--decode-tp", "2"), "excludes tensor_parallel and pipeline_parallel"),
        (("--enable-prefix-caching",), "see --no-prefix-cache"),
        (("--quantization=fp8",), "quantised weights"),
        (("--speculative-config", "{}"), "speculative decoding"),
        (("--set", "model.kv_cache_dtype=fp8"), "a quantised KV cache"),
        (("--port", "8123", "--grpc-port", "8123"), "both are 8123"),
        (("--host", "not an address"), "is not an address"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line_before_anything_is_started(
    arguments: tuple[str, ...], said: str
) -> None:
    begun = time.monotonic()
    done = run("serve", "--device", "cpu", *arguments)
    assert said in error_line(done)
    assert done.stdout == ""
    assert time.monotonic() - begun < 10


def test_set_takes_text_as_it_is_and_a_flag_of_its_own_says_more() -> None:
    done = run("config", "--set", "model.served_name=007", "--set", "gateway.port=84", "--port", "85")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert (config["model"]["served_name"], config["gateway"]["port"]) == ("007", 85)


def test_a_policy_brings_its_settings() -> None:
    done = run("config", "--policy", "aligned-no-prefetch-fcfs")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert (config["scheduler"]["policy"], config["cluster"]["prefetch"]) == ("aligned-no-prefetch-fcfs", False)


def test_policies_are_listed_with_a_line_each_also_those_of_ones_own(tmp_path: Path) -> None:
    done = run("policies", "--json")
    systems = {system["name"]: system for system in json.loads(done.stdout)}
    assert [name for name, system in systems.items() if system["serves"]] == [
        "aligned",
        "aligned-cost",
        "fcfs",
        "aligned-no-prefetch",
        "aligned-no-prefetch-fcfs",
    ]
    assert len(run("policies").stdout.splitlines()) == len(systems) + 1


def test_more_gpus_than_there_are_is_refused() -> None:
    assert "GPU" in error_line(run("serve", "--device", "cuda", "--prefill", "500", CUDA_VISIBLE_DEVICES=""))


@pytest.mark.parametrize(("flag", "host"), [("--port", "127.0.0.1"), ("--grpc-port", "127.0.0.1")])
def test_a_port_in_use_is_named(flag: str, host: str) -> None:
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = {"--port": str(free_port()), "--grpc-port": str(free_port()), flag: str(port)}
        done = run("serve", "--device", "cpu", *(word for pair in ports.items() for word in pair))
    assert f"{port} on {host} is in use" in error_line(done)


def test_ports_in_use_are_all_named_and_the_cluster_of_this_user_that_has_them(gateway_url: str) -> None:
    port = int(gateway_url.rpartition(":")[2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = ("--port", str(port), "--grpc-port", str(taken.getsockname()[1]))
        assert "yours" not in error_line(run("serve", *ports))
        Record("00000001", gateway_url, os.getpid(), time.time()).write()
        said = error_line(run("serve", *ports))
    assert f"(--port) {port} and gRPC port (--grpc-port) {ports[-1]} on 127.0.0.1 are in use" in said
    assert f"by a cluster of yours (`alignedserve stop --url {gateway_url}` ends it); choose others" in said


@pytest.mark.parametrize("model_type", ["falcon", "bloom", "deepseek_v3"])
def test_an_architecture_that_would_give_wrong_tokens_is_refused_by_its_model_type(
    model_type: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert f"model_type '{model_type}' is not supported" in error_line(run("serve", "--model", str(tmp_path)))


def test_config_shows_flags_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("cluster: {prefill: 2, decode: 3}\ngateway: {port: 1111}\n")
    done = run("config", "--config", str(file), "--port", "3333", ALIGNEDSERVE_CLUSTER__DECODE="4")
    assert done.returncode == 0
    assert "  prefill: 2  # prefill instances\n" in done.stdout
    assert "  decode: 4  #" in done.stdout
    assert "  port: 3333  #" in done.stdout


def test_a_misspelt_flag_is_answered_by_the_command_that_it_was_given_to() -> None:
    said = error_line(run("simulate", "--plicy", "fcfs"))
    assert "the nearest is --policy (see `alignedserve simulate --help`)" in said


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("version",), ("serve", "--help"), ("simulate", "--help"), ("config",), ("policies",)],
)
def test_light_commands_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    heavy = ("ray", "torch", "transformers", "grpc", "numpy", "matplotlib", "pyarrow", "alignedserve.simulator.traces")
    code = (
        "import sys\nfrom alignedserve.cluster.cli.main import main\n"
        f"try:\n    main({list(arguments)!r})\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', *[name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "HEAVY", done.stderr


class _Gateway(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"state": "ready", "roles": [{"role": "decode", "id": "decode-0", "pid": 7}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def gateway_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_status_asks_the_newest_live_cluster_and_prints_json_and_nothing_else(gateway_url: str) -> None:
    Record("00000001", "http://127.0.0.1:1", 2**22 + 1, time.time() + 10).write()
    Record("00000002", gateway_url, os.getpid(), time.time()).write()
    done = run("status", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["roles"] == [{"role": "decode", "id": "decode-0", "pid": 7}]


def test_status_of_a_url_prints_a_table(gateway_url: str) -> None:
    assert (
        run("status", "--url", gateway_url.removeprefix("http://")).stdout == run("status", "--url", gateway_url).stdout
    )
    done = run("status", "--url", gateway_url)
    assert done.returncode == 0
    assert "decode-0" in done.stdout


def test_status_without_a_cluster_says_so() -> None:
    begun = time.monotonic()
    assert "no cluster of this user is running" in error_line(run("status"), 1)
    assert time.monotonic() - begun < 5
    assert "does not answer" in error_line(run("status", "--url", "http://127.0.0.1:9"), 1)


def test_what_changes_a_cluster_asks_which_where_there_are_several(gateway_url: str) -> None:
    Record("00000001", "http://127.0.0.1:1", os.getpid(), time.time() + 10).write()
    Record("00000002", gateway_url, os.getpid(), time.time()).write()
    for command in (("stop",), ("scale", "--decode", "2")):
        said = error_line(run(*command), 2)
        assert "choose one with --url" in said
        assert gateway_url in said


async def test_a_record_that_the_disk_does_not_take_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_RUNTIME_DIR", str(tmp_path / "not there yet" / "run"))
    writing = asyncio.create_task(Record("00000001", "http://127.0.0.1:1", os.getpid(), 1.0).keep_writing(0.02))
    await asyncio.sleep(0.1)
    assert not writing.done()
    (tmp_path / "not there yet").mkdir()
    async with asyncio.timeout(10.0):
        await writing
    assert [record.cluster_id for record in read_records()] == ["00000001"]


def test_records_of_clusters_that_have_ended_are_removed_with_their_folders(own_runtime_dir: Path) -> None:
    dead = Record("deadbeef", "http://127.0.0.1:1", 2**22 + 1, 5.0)
    dead.write()
    (own_runtime_dir / "deadbeef").mkdir()
    live = Record("abcdef01", "http://127.0.0.1:2", os.getpid(), 4.0)
    live.write()
    (own_runtime_dir / "broken.json").write_text("{")
    assert read_records() == [live]
    assert not (own_runtime_dir / "deadbeef").exists()
    assert not (own_runtime_dir / "deadbeef.json").exists()
    assert (own_runtime_dir / "abcdef01.json").stat().st_mode & 0o077 == 0


def test_doctor_tells_channels_and_which_attention_backends_serve_the_model_as_json() -> None:
    done = run("doctor", "--json", "--device", "cpu")
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["missing"] else 0)
    assert {channel["channel"] for channel in report["channels"]} == {"shared-memory"}
    assert all(float(channel[way]) > 0 for channel in report["channels"] for way in ("GB/s", "GB/s back"))
    assert report["cores"] >= 1
    refusals = {found["name"]: found["refusal"] for found in report["attention"]}
    assert refusals["torch"] is None
    assert "GPU" in refusals["triton"]
    assert set(refusals) >= {"torch", "triton", "triton_no_split", "flash_attn", "varlen"}


@pytest.mark.slow
def test_doctor_misses_what_a_named_attention_backend_lacks_and_what_a_channel_lacks() -> None:
    named = {"ALIGNEDSERVE_ENGINE__ATTENTION": "triton", "ALIGNEDSERVE_CLUSTER__CHANNEL": "nccl"}
    done = run("doctor", "--device", "cpu", **named)
    assert done.returncode == 1
    assert "missing: engine.attention: triton cannot serve this here: " in done.stdout
    assert "missing: cluster.channel is 'nccl'" in done.stdout
