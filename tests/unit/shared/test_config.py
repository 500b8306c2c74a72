"""The configuration's sources: precedence, type conversion, and error messages that name the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from alignedserve.cluster.cli.main import main
from alignedserve.config import Config, PrefillConfig
from alignedserve.config_sources import from_tree, known_keys, load, to_tree, to_yaml
from alignedserve.errors import ConfigError, UnknownKeyError


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("gateway: {port: 1, grpc_port: 2, replicas: 3}\n", encoding="utf-8")
    environ = {"ALIGNEDSERVE_GATEWAY__PORT": "11", "ALIGNEDSERVE_GATEWAY__GRPC_PORT": "12"}
    config = load(str(file), environ, {"gateway.port": 21, "gateway.host": None})
    gateway = config.gateway
    assert (gateway.port, gateway.grpc_port, gateway.replicas, gateway.host) == (21, 12, 3, "127.0.0.1")


@pytest.mark.parametrize("name", ["007", "yes", "null", "1e3", "{a: b}", "[", ""])
def test_text_in_the_environment_stays_as_it_is(name: str) -> None:
    assert load(environ={"ALIGNEDSERVE_MODEL__SERVED_NAME": name}).model.served_name == name


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("ALIGNEDSERVE_KV_POOL__SIZE_GIB", "2", 2.0),
        ("ALIGNEDSERVE_SCHEDULER__TPOT_OBJECTIVE_S", "1e-3", 1e-3),
        ("ALIGNEDSERVE_DECODE__CACHE_BLOCKS", "64", 64),
        ("ALIGNEDSERVE_CLUSTER__PREFETCH", "false", False),
        ("ALIGNEDSERVE_CLUSTER__PREFETCH", "0", False),
        ("ALIGNEDSERVE_CLUSTER__PREFETCH", "1", True),
    ],
)
def test_numbers_and_truth_values_in_the_environment_are_read(variable: str, text: str, value: Any) -> None:
    section, key = variable.removeprefix("ALIGNEDSERVE_").lower().split("__")
    found = to_tree(load(environ={variable: text}))[section][key]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ALIGNEDSERVE_DECODE__CACHE_BLOCK": "1"}, "nearest is 'decode.cache_blocks'"),
        ({"ALIGNEDSERVE_DECOD__CACHE_BLOCKS": "1"}, "nearest is 'decode.cache_blocks'"),
        ({"ALIGNEDSERVE_DECODE__CACHE_BLOCKS": "many"}, "must be int, not 'many' (from ALIGNEDSERVE_DECODE__"),
        ({"ALIGNEDSERVE_DECODE__CACHE_BLOCKS": "true"}, "must be int, not True"),
        ({"ALIGNEDSERVE_KV_POOL__SIZE_GIB": ".nan"}, "must be a finite number"),
        ({"ALIGNEDSERVE_KV_POOL__SIZE_GIB": "nan"}, "must be a finite number"),
        ({"ALIGNEDSERVE_KV_POOL__SIZE_GIB": "9" * 400}, "must be a finite number"),
        ({"ALIGNEDSERVE_DECODE__CACHE_BLOCKS": "9" * 5000}, "must be int, not '999"),
        ({"ALIGNEDSERVE_DECODE__CACHE_BLOCKS": "[" * 9000}, "must be int, not '[[["),
        ({"ALIGNEDSERVE_DECODE__CACHE_BLOCKS": "2024-13-01"}, "must be int, not '2024-13-01'"),
        ({"ALIGNEDSERVE_GATEWAY__PORT": "70000"}, "gateway.port must be between 1 and 65535; got 70000"),
        ({"ALIGNEDSERVE_SUPERVISOR__HEARTBEAT_S": "4"}, "must be at least twice supervisor.heartbeat_s (4)"),
        ({"ALIGNEDSERVE_GATEWAY__PROXY": "nginx"}, "gateway.proxy must be one of haproxy, python; got 'nginx'"),
    ],
)
def test_a_mistake_is_named_with_its_place(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(environ=environ)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "must contain sections"),
        ("gateway: 3\n", "must contain keys"),
        ("gateway: {port: [}\n", "is not valid YAML"),
        ("gateway: {port: 2024-13-01}\n", "is not valid YAML"),
        ("[" * 9000, "is not valid YAML"),
        ("gatway: {port: 3}\n", "unknown configuration key 'gatway'"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load(str(file), {})
    assert said in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("5E2", 500.0), ("+.5e+1", 5.0), ("2.e1", 20.0)])
def test_a_file_s_exponent_is_a_number_for_a_float_and_a_name_for_a_text(
    text: str, value: float, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"scheduler: {{max_wait_s: 3e2, ttft_objective_s: {text}}}\nmodel: {{served_name: 1e-3}}\n")
    config = load(str(file), {})
    assert (config.scheduler.ttft_objective_s, config.scheduler.max_wait_s) == (value, 300.0)
    assert config.model.served_name == "1e-3"


def test_off_and_on_of_a_file_are_words_where_the_key_takes_them(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("decode: {graphs: off, overlap: on}\nengine: {compile: off}\n")
    config = load(str(file), {})
    assert (config.decode.graphs, config.decode.overlap, config.engine.compile) == ("off", "on", "off")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decode: {graphs: on}", "decode.graphs must be str, not True"),
        ("model: {served_name: off}", "model.served_name must be str, not False"),
        ("decode: {cache_blocks: 1e3}", "decode.cache_blocks must be int, not '1e3'"),
        ("cluster: {prefetch: 1e0}", "cluster.prefetch must be bool, not '1e0'"),
        ("scheduler: {max_wait_s: '5'}", "scheduler.max_wait_s must be float, not '5'"),
        ("scheduler: {max_wait_s: 1e3s}", "scheduler.max_wait_s must be float, not '1e3s'"),
        ("scheduler: {max_wait_s: e3}", "scheduler.max_wait_s must be float, not 'e3'"),
        ("scheduler: {max_wait_s: 1_0e3}", "scheduler.max_wait_s must be float, not '1_0e3'"),
        ("scheduler: {max_wait_s: nan}", "scheduler.max_wait_s must be float, not 'nan'"),
        ("scheduler: {max_wait_s: 1e999}", "scheduler.max_wait_s must be a finite number"),
        ("scheduler: {late_share: 1e3}", "scheduler.late_share must be between 0 and 1"),
        ("scheduler: {max_wate_s: 1e3}", "the nearest is 'scheduler.max_wait_s'"),
    ],
)
def test_no_other_text_of_a_file_is_a_number(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(str(file), {})
    assert said in str(error.value)


def test_what_is_printed_is_read_as_the_same() -> None:
    config = load(environ={"ALIGNEDSERVE_MODEL__SERVED_NAME": "007", "ALIGNEDSERVE_LOG__DIR": "a: b # c"})
    assert from_tree(yaml.safe_load(to_yaml(config))) == config
    assert from_tree(to_tree(config)) == config


def test_every_key_has_a_line_of_documentation() -> None:
    lines = [line for line in to_yaml(Config()).splitlines() if line.startswith("  ")]
    assert len(lines) == len(known_keys())
    assert all(len(line.partition("  # ")[2]) > 5 for line in lines)


def test_the_served_name_is_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (".", "./", str(tmp_path), f"{tmp_path}/"):
        assert load(environ={}, flags={"model.path": path}).served_model_name == tmp_path.name
    assert load(environ={}, flags={"model.path": "org/name"}).served_model_name == "name"


def test_a_key_that_is_none_is_an_error_of_its_own_type() -> None:
    with pytest.raises(UnknownKeyError):
        from_tree({"gateway": {"prot": 1}})


def test_the_command_s_set_takes_a_number_as_python_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "scheduler.tpot_objective_s=1e-3"]) == 0
    assert "tpot_objective_s: 0.001 " in capsys.readouterr().out


def test_passes_and_queues_of_prompts_are_longer_on_a_gpu_unless_they_are_given() -> None:
    on_cpu, on_gpu = (Config().on_device(device).prefill for device in ("cpu", "cuda"))
    assert (on_cpu.pass_tokens, on_cpu.queued_tokens) == (512, 8192)
    assert (on_gpu.pass_tokens, on_gpu.queued_tokens) == (8192, 16384)  # the pass being computed and the next one
    given = Config(prefill=PrefillConfig(token_budget=300, queue_tokens=400)).on_device("cuda").prefill
    assert (given.pass_tokens, given.queued_tokens) == (300, 400)
