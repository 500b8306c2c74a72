"""The cluster's log against its simulation: what is compared, and a replay of a log on the cluster's stores."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from alignedserve.cluster.cli.open_loop import Load, drive

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
spec = importlib.util.spec_from_file_location("own_truth", ROOT / "benchmarks/own_truth.py")
own_truth = sys.modules["own_truth"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own_truth)
sys.path.remove(str(ROOT / "benchmarks"))

SHIPPED = ROOT / "scheduler/cost/data/rtxpro6000-llama-3.1-8b.json"


def entry(number: int, output_tokens: int, **more: float) -> dict[str, object]:
    begun_s = 1000.0 + number
    stamps = {"arrival_unix_s": begun_s, "queue_unix_s": begun_s + 0.01, "first_token_unix_s": begun_s + 0.05}
    last = {"last_token_unix_s": begun_s + 0.05 + 0.02 * (output_tokens - 1)}
    lengths = {"input_tokens": 40 + number, "output_tokens": output_tokens}
    return {"request_id": f"r{number}", **stamps, **last, **lengths, "queue_s": 0.004, "decode_s": 0.3, **more}


def write_log(file: Path, entries: list[dict[str, object]]) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in entries), encoding="utf-8")
    return file


def test_times_of_a_log_count_from_the_submission_to_the_scheduler(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [entry(0, 1), entry(1, 11, prefill_s=0.03)])
    answers = own_truth.real_answers(log)
    assert [answer.ttft_s for answer in answers] == pytest.approx([0.04, 0.04])
    assert answers[0].tpot_s is None
    assert answers[1].tpot_s == pytest.approx(0.02)
    found = own_truth.figures(answers)
    assert found["ttft"] == pytest.approx(40.0)
    assert found["tpot"] == pytest.approx(20.0)
    assert (found["queue"], found["prefill"], found["pool"], found["decode"]) == (4.0, 15.0, 0.0, 300.0)


def test_a_log_is_replayed_on_the_stores_of_the_cluster(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [entry(number, 8) for number in range(6)])
    blocks = dict.fromkeys(own_truth.STORES, 64) | {"pool": 300}
    options = argparse.Namespace(policy="aligned", set=["decode.max_running=2", "cluster.threads=1"])
    own_truth.simulate(log, SHIPPED, blocks, options, tmp_path / "out")
    answers, later = (own_truth.simulated_answers(tmp_path / "out", messages_s) for messages_s in (0.0, 0.5))
    assert len(answers) == 6
    assert [one.ttft_s - other.ttft_s for one, other in zip(later, answers, strict=True)] == pytest.approx([0.5] * 6)
    assert all(answer.tpot_s and answer.stages_s["decode"] > 0.0 for answer in answers)
    ran = json.loads((tmp_path / "out/summary.json").read_text())["run"]["configuration"]
    assert ran["hardware"]["pool_tokens"] == 300 * 16
    assert ran["policies"]["aligned"]["config"]["prefill"]["requests_buffer_blocks"] == 64
    assert ran["policies"]["aligned"]["config"]["decode"]["max_running"] == 2


def test_a_store_is_found_whatever_its_incarnation() -> None:
    metrics = (
        'alignedserve_kv_capacity_blocks{store="prefill-0/batch-1795",instance="prefill-0"} 820\n'
        'alignedserve_kv_capacity_blocks{store="decode-0/cache",instance="decode-0"} 2052\n'
    )
    assert own_truth.capacity_blocks(metrics, "prefill-0/batch") == 820
    assert own_truth.capacity_blocks(metrics, "decode-0/cache") == 2052
    with pytest.raises(RuntimeError, match="no store kv_pool-0"):
        own_truth.capacity_blocks(metrics, "kv_pool-0")


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_load_of_given_lengths_sends_each_once_and_ends(at_once: bool) -> None:
    bodies: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(size)))
        chunk = b"data: {}\n\n"
        stream = b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + stream)
        await writer.drain()
        writer.close()

    lengths = [(5, 2), (7, 1), (300, 40)]
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        outcome = await drive(Load(port, 200.0, 0.0, lengths=lengths, at_once=at_once, drain_s=10.0))
    assert (outcome.offered, len(outcome.served), outcome.errors) == (3, 3, {})
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in bodies) == sorted(lengths)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--model", "nosuch"), "model folder 'nosuch' does not exist"),
        (("--policy", "vllm"), "is a colocated system"),
        (("--set", "decode.max_runing=4"), "unknown configuration key 'decode.max_runing'"),
        (
            ("--set", "scheduler.sharing=none"),
            "--set scheduler.sharing has no effect here: several decode instances read it",
        ),
        (("--requests", "0"), "--requests must be at least 1"),
        (("--short", "9:1"), "LOW:HIGH"),
        (("--profile", "/nosuch.json"), "unknown cost model '/nosuch.json'"),
        (("--json", "/nosuch/x.json"), "--json /nosuch/x.json: give a file in an existing, writable folder"),
    ],
)
def test_wrong_options_end_before_the_profile_starts(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(SystemExit):
        own_truth.main(arguments)
    assert problem in " ".join(capsys.readouterr().err.split())
    assert own_truth.options_of(()).set == [f"cluster.threads={own_truth.options_of(()).threads}"]
