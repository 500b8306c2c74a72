"""Each trace format, errors for broken traces, and generated arrivals."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import statistics
from pathlib import Path

import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.errors import ConfigError, TraceError
from alignedserve.request import BATCH_PRIORITY
from alignedserve.simulator.prefix.groups import group_by_prefix
from alignedserve.simulator.traces import LengthsTrace, Load, TimedTrace, read_trace
from support.requirements import need

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def write(folder: Path, name: str, text: str | bytes) -> str:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


def shape(source: str, load: Load | None = None, seed: int = 0) -> list[tuple[float, int, int]]:
    workload = read_trace(source).workload(load or Load(), seed)
    return [(arrival.arrival_s, arrival.input_tokens, arrival.output_tokens) for arrival in workload.arrivals]


def test_azure_times_begin_at_zero(tmp_path: Path) -> None:
    first, second = shape(write(tmp_path, "a.csv", AZURE))
    assert first == (0.0, 374, 44)
    assert second[0] == pytest.approx(4.314579, abs=2e-6)
    assert second[1:] == (396, 109)


def test_azure_of_2024_has_a_zone_in_its_times(tmp_path: Path) -> None:
    text = AZURE.replace(".6805900", ".500000+00:00").replace(".9951690", ".750000+00:00")
    assert [row[0] for row in shape(write(tmp_path, "a.csv", text))] == [0.0, 4.25]


def test_csv_columns_may_stand_in_any_order_and_beside_others(tmp_path: Path) -> None:
    text = "\ufeffoutput_tokens,model,arrival_time_s,input_tokens\r\n7,x,2.5,100\r\n\r\n9,y,1.5,50\r\n"
    trace = read_trace(write(tmp_path, "t.csv", text))
    workload = trace.workload(Load(), 0)
    assert [(a.arrival_s, a.input_tokens, a.output_tokens) for a in workload.arrivals] == [(0.0, 50, 9), (1.0, 100, 7)]
    assert "the trace is not ordered by time; it was sorted" in workload.notes
    assert len(str(workload.description["sha256"])) == 64


def test_a_column_that_is_not_read_is_named(tmp_path: Path) -> None:
    text = ",arrival_time_s,input_tokens,output_tokens,wait_objective\n0,0,5,5,2\n"
    (note,) = read_trace(write(tmp_path, "misspelt.csv", text)).workload(Load(), 0).notes
    assert note == "columns of the trace that are not read: wait_objective"
    text = "num_prefill_tokens,num_decode_tokens,pd_ratio\n5,5,1\n"
    (note,) = read_trace(write(tmp_path, "lengths.csv", text)).workload(Load(), 0).notes
    assert note.endswith(": pd_ratio")


def test_times_are_shifted_and_sorted_and_the_sorting_is_noted(tmp_path: Path) -> None:
    file = write(tmp_path, "t.csv", CSV_HEAD + "1,5,5\n-1,6,6\n")
    assert shape(file) == [(0.0, 6, 6), (2.0, 5, 5)]
    assert read_trace(file).workload(Load(), 0).notes == ("the trace is not ordered by time; it was sorted",)


def test_a_compressed_trace_is_not_taken_for_text(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t.csv.gz is compressed \(gzip\): decompress it first"):
        read_trace(write(tmp_path, "t.csv.gz", gzip.compress(b"a,b\n")))


def test_a_table_s_index_without_a_name_is_no_objective(tmp_path: Path) -> None:
    azure = ",TIMESTAMP,ContextTokens,GeneratedTokens\n0,2023-11-16 18:15:46,7,8\n5,2023-11-16 18:15:47,7,8\n"
    lengths = ",num_prefill_tokens,num_decode_tokens\n1,7,8\n2,7,8\n"
    for name, text in (("azure.csv", azure), ("lengths.csv", lengths)):
        arrivals = read_trace(write(tmp_path, name, text)).workload(Load(), 0).arrivals
        assert [(one.input_tokens, one.output_tokens, one.wait_objective_s) for one in arrivals] == [(7, 8, 0.0)] * 2


def test_mooncake_without_hashes_has_no_prefix_hits(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 7, "output_length": 8}
    text = "\n".join(map(json.dumps, [row, {**row, "hash_ids": None}, {**row, "hash_ids": []}]))
    workload = read_trace(write(tmp_path, "m.jsonl", text)).workload(Load(), 0)
    assert len(workload.arrivals) == 3
    assert workload.notes == ()


def test_mooncake_says_that_prefix_hits_were_not_used(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1500, "output_length": 6, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 1600, "output_length": 4, "hash_ids": [1, 2, 9, 3]},
    ]
    trace = read_trace(write(tmp_path, "m.jsonl", "\n".join(map(json.dumps, rows))))
    workload = trace.workload(Load(), 0)
    assert [a.arrival_s for a in workload.arrivals] == [0.0, 2.5]
    assert any("2 of 7 prompt blocks" in note for note in workload.notes)


def test_ids_of_blocks_are_bounded_and_may_be_fewer_than_a_prompt_has(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1500, "output_length": 600, "hash_ids": [1, 2, 3]}
    log = {"arrival_unix_s": 1.0, "input_tokens": 64, "output_tokens": 2, "block_tokens": 64}
    for wrong in [-1], [1 << 63], [True], "1":
        for name, line in ("hash_ids", {**row, "hash_ids": wrong}), ("blocks", {**log, "blocks": wrong}):
            with pytest.raises(TraceError, match=rf"line 1, column \d+ \({name}\): must be a list of whole numbers"):
                read_trace(write(tmp_path, "t.jsonl", json.dumps(line)))
    both = {**log, **row, "block_tokens": 512, "hash_ids": [(1 << 63) - 1, 2]}
    text = "\n".join(map(json.dumps, [{**row, "hash_ids": [1]}, both]))
    workload = read_trace(write(tmp_path, "few.jsonl", text)).workload(Load(), 0)
    named = [(one.blocks, one.answer_blocks) for one in workload.arrivals]
    assert named == [((1,), ()), (((1 << 63) - 1, 2), (-1, -2))]
    assert len(group_by_prefix(workload)) == 2


def test_a_request_log_is_saved_for_load_tools_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"arrival_unix_s": 1700000000.5, "input_tokens": 40, "output_tokens": 20, "blocks": [77, 1 << 60, 5]},
        {"arrival_unix_s": 1700000001.75, "input_tokens": 50, "output_tokens": 3, "blocks": [77, 1 << 60, 99]},
        {"arrival_unix_s": 1700000003.0, "input_tokens": 7, "output_tokens": 8},
    ]
    log = write(tmp_path, "log.jsonl", "\n".join(json.dumps({"block_tokens": 16, **line}) for line in lines))
    saved = tmp_path / "saved.jsonl"
    assert main(["simulate", "--trace", log, "--save-trace", str(saved)]) == 0
    assert capsys.readouterr().out == f"{saved}: 3 requests\n"
    first, second, third = map(json.loads, saved.read_text().splitlines())
    assert first == {"timestamp": 0, "input_length": 40, "output_length": 20, "hash_ids": [0, 1], "block_tokens": 16}
    assert second == {**first, "timestamp": 1250, "input_length": 50, "output_length": 3, "hash_ids": [0, 1, 2]}
    assert third == {"timestamp": 2500, "input_length": 7, "output_length": 8}

    workload = read_trace(str(saved)).workload(Load(), 0)
    assert workload.block_tokens == 16
    assert [(one.arrival_s, one.input_tokens, one.output_tokens, len(one.blocks)) for one in workload.arrivals] == [
        (0.0, 40, 20, 2),
        (1.25, 50, 3, 3),
        (2.5, 7, 8, 0),
    ]
    assert main(["simulate", "--trace", str(saved), "--save-trace", str(saved), "--clients", "2"]) == 2
    assert "--save-trace excludes --clients" in capsys.readouterr().err
    assert main(["simulate", "--trace", str(saved), "--save-trace", str(tmp_path / "no/such.jsonl")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_blocks_of_another_size_than_earlier_ones_are_refused(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1500, "output_length": 6, "hash_ids": [1]}
    text = "\n".join(map(json.dumps, [row, {**row, "block_tokens": 16}]))
    with pytest.raises(TraceError, match=r"line 2, column \d+ \(block_tokens\): must be 512, as in earlier lines"):
        read_trace(write(tmp_path, "sizes.jsonl", text))


def lines_of_ids(*lines: tuple[int, int], **more: object) -> str:
    """Lines of a Mooncake trace with prompts of so many tokens and so many ids."""
    rows = (
        {"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": [*range(ids)], **more} for n, ids in lines
    )
    return "\n".join(map(json.dumps, rows))


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        (((1500, 3), (512, 1), (513, 2)), 512),
        (((1500, 3), (9000, 2)), 512),  # fewer than there are
        (((521, 33), (15, 1), (16, 1)), 16),
        (((521, 32), (31, 1)), 16),  # full blocks only
        (((1500, 2), (9000, 9)), 1024),
        (((100, 1), (90, 1)), 512),  # any size over 100 fits
    ],
)
def test_the_size_of_blocks_is_the_one_that_fits_all_lines(
    tmp_path: Path, lines: tuple[tuple[int, int], ...], size: int
) -> None:
    workload = read_trace(write(tmp_path, "m.jsonl", lines_of_ids(*lines))).workload(Load(), 0)
    assert workload.block_tokens == size
    told = [note for note in workload.notes if "are taken to name blocks of" in note]
    assert len(told) == (size != 512)
    assert all(f"blocks of {size} tokens" in note for note in told)


@pytest.mark.parametrize(("more", "most"), [({}, 3), ({"block_tokens": 1024}, 2)])
def test_more_ids_than_a_prompt_fills_blocks_are_refused(tmp_path: Path, more: dict[str, int], most: int) -> None:
    text = lines_of_ids((512, 1), (1500, 4), **more)
    with pytest.raises(TraceError, match=rf"line 2, column \d+ \(hash_ids\): 4 ids are more than the {most} blocks"):
        read_trace(write(tmp_path, "m.jsonl", text))


def test_an_id_that_is_twice_in_a_line_is_refused(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1500, "output_length": 6, "hash_ids": [1, 2, 1]}
    log = {"arrival_unix_s": 1.0, "input_tokens": 48, "output_tokens": 2, "block_tokens": 16, "blocks": [5, 7, 7]}
    for key, again, line in ("hash_ids", 1, row), ("blocks", 7, log):
        good = {**line, key: []}
        with pytest.raises(TraceError, match=rf"line 2, column \d+ \({key}\): {again} is there twice"):
            read_trace(write(tmp_path, "t.jsonl", "\n".join(map(json.dumps, [good, line]))))


def test_answers_are_not_taken_for_blocks_that_follow_each_other_in_a_circle(tmp_path: Path) -> None:
    text = "\n".join(
        json.dumps({"timestamp": n, "input_length": 512 * len(ids), "output_length": 2048, "hash_ids": ids})
        for n, ids in enumerate([[1], [1, 2, 3], [3, 2]])
    )
    first, *_ = read_trace(write(tmp_path, "m.jsonl", text)).workload(Load(), 0).arrivals
    assert first.answer_blocks == (2, 3, -1)


def test_times_of_bailian_s_traces_are_seconds(tmp_path: Path) -> None:
    row = {"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 2, "turn": 1}
    rows = [row, {**row, "timestamp": 4.0, "hash_ids": [1, 2, 3]}]
    workload = read_trace(write(tmp_path, "b.jsonl", "\n".join(map(json.dumps, rows)))).workload(Load(), 0)
    assert [one.arrival_s for one in workload.arrivals] == [0.0, 2.5]
    assert workload.block_tokens == 16


def test_the_request_log_is_sorted_and_answers_without_a_token_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"request_id": "b", "arrival_unix_s": 1700000001.25, "input_tokens": 10, "output_tokens": 3},
        {"request_id": "c", "arrival_unix_s": 1700000003.0, "input_tokens": 10, "output_tokens": 0},
        {"request_id": "d", "arrival_unix_s": 1700000003.0, "input_tokens": 0, "output_tokens": 0},
        {"request_id": "a", "arrival_unix_s": 1700000000.0, "input_tokens": 20, "output_tokens": 5},
    ]
    workload = read_trace(write(tmp_path, "l.jsonl", "\n".join(map(json.dumps, rows)) + "\n")).workload(Load(), 0)
    assert [(a.request_id, a.arrival_s, a.input_tokens) for a in workload.arrivals] == [("a", 0.0, 20), ("b", 1.25, 10)]
    assert list(workload.notes) == ["2 requests of the log ended without a token and were left out"]


def test_a_request_log_says_what_the_cluster_took(tmp_path: Path) -> None:
    def line(
        name: str, queue_s: float, tokens: int, first_s: float, last_s: float, **more: object
    ) -> dict[str, object]:
        times = {
            "arrival": 90.0,
            "queue": queue_s,
            "first_token": first_s,
            "second_token": first_s + 1,
            "last_token": last_s,
        }
        stamps = {f"{which}_unix_s": value for which, value in times.items()}
        return {"request_id": name, "input_tokens": 4, "output_tokens": tokens, **stamps, "decode_s": 4.0, **more}

    lines = [
        line("a", 100.0, 5, 101.0, 105.0),  # TTFT 1, TPOT 1
        line("b", 102.0, 3, 105.0, 111.0, decode_s=8.0),  # TTFT 3, TPOT 3
        line("c", 100.0, 2, 95.0, 112.0, epoch=1),  # submitted again: the first token is not from that epoch
        line("d", 1.0, 9, 2.0, 3.0, resumed=True),
        {"request_id": "e", "arrival_unix_s": 90.0, "input_tokens": 4, "output_tokens": 1},
    ]
    trace = read_trace(write(tmp_path, "l.jsonl", "\n".join(map(json.dumps, lines))))
    measured = trace.describe()["measured"]
    assert isinstance(measured, dict)
    assert measured["requests"] == 3
    assert measured["ttft_mean_s"] == pytest.approx((1 + 3 + 5) / 3)
    assert measured["second_token_mean_s"] == pytest.approx((2 + 4 + 6) / 3)
    assert measured["tpot_mean_s"] == pytest.approx((1 + 3 + 17) / 3)
    assert measured["makespan_s"] == pytest.approx(112 - 90)
    assert measured["stage_decode_mean_s"] == pytest.approx(16 / 3)
    assert measured["stage_pool_mean_s"] == 0.0
    plain = read_trace(write(tmp_path, "p.jsonl", json.dumps(lines[-1])))
    assert "measured" not in plain.describe()


def test_objectives_of_the_plain_csv_and_of_the_request_log_come_with_the_requests(tmp_path: Path) -> None:
    table = "arrival_time_s,input_tokens,output_tokens,wait_objective_s\n0,5,5,2.5\n1,5,5,\n"
    log = [
        {"arrival_unix_s": 10.0, "input_tokens": 5, "output_tokens": 5, "wait_objective_s": 2.5},
        {"arrival_unix_s": 11.0, "input_tokens": 5, "output_tokens": 5, "wait_objective_s": None},
        {"arrival_unix_s": 12.0, "input_tokens": 5, "output_tokens": 5},
    ]
    text = "\n".join(map(json.dumps, log))
    for name, content, wanted in (("t.csv", table, [2.5, 0.0]), ("l.jsonl", text, [2.5, 0.0, 0.0])):
        arrivals = read_trace(write(tmp_path, name, content)).workload(Load(), 0).arrivals
        assert [arrival.wait_objective_s for arrival in arrivals] == wanted


def test_priorities_of_the_plain_csv_and_of_the_request_log_come_with_the_requests(tmp_path: Path) -> None:
    table = "arrival_time_s,input_tokens,output_tokens,priority\n0,5,5,-2\n1,5,5,\n2,5,5,1000000\n"
    row = {"arrival_unix_s": 10.0, "input_tokens": 5, "output_tokens": 5}
    text = "\n".join(map(json.dumps, [{**row, "priority": -2}, {**row, "priority": None}, row]))
    for name, content, wanted in (("t.csv", table, [-2, 0, 1_000_000]), ("l.jsonl", text, [-2, 0, 0])):
        arrivals = read_trace(write(tmp_path, name, content)).workload(Load(), 0).arrivals
        assert [arrival.priority for arrival in arrivals] == wanted


def test_a_mix_may_have_a_backlog_of_batch_requests_beside_the_same_others() -> None:
    plain = read_trace("mix:requests=20").workload(Load(rate_per_s=2.0), 3)
    both = read_trace("mix:requests=20,batch=30").workload(Load(rate_per_s=2.0), 3)
    behind = [arrival for arrival in both.arrivals if arrival.priority]
    assert tuple(arrival for arrival in both.arrivals if not arrival.priority) == plain.arrivals
    assert {(arrival.priority, arrival.arrival_s) for arrival in behind} == {(BATCH_PRIORITY, 0.0)}
    assert len(behind) == 30
    with pytest.raises(ConfigError, match="clients"):
        read_trace("mix:batch=30").workload(Load(clients=2), 3)
    with pytest.raises(ConfigError, match="batch must be"):
        read_trace("mix:batch=-1")


def test_a_made_up_id_is_none_of_the_trace_s(tmp_path: Path) -> None:
    ids = ["r2", "a", "a", "r2'"]
    rows = [
        {"request_id": one, "arrival_unix_s": n, "input_tokens": 1, "output_tokens": 1} for n, one in enumerate(ids)
    ]
    workload = read_trace(write(tmp_path, "l.jsonl", "\n".join(map(json.dumps, rows)))).workload(Load(), 0)
    assert [arrival.request_id for arrival in workload.arrivals] == ["r2", "a", "r2''", "r2'"]


LENGTHS = "num_prefill_tokens,num_decode_tokens,pd_ratio\n" + "".join(f"{n},{n + 1},0.5\n" for n in range(1, 201))


def test_lengths_alone_come_in_an_order_of_the_seed(tmp_path: Path) -> None:
    source = write(tmp_path, "s.csv", LENGTHS)
    assert isinstance(read_trace(source), LengthsTrace)
    rows = shape(source, seed=1)
    assert {row[0] for row in rows} == {0.0}
    assert sorted(row[1:] for row in rows) == [(n, n + 1) for n in range(1, 201)]
    assert rows == shape(source, seed=1) != shape(source, seed=2)
    assert len(shape(source, Load(limit=7), seed=1)) == 7


@pytest.mark.parametrize(("cv", "seed"), [(None, 1), (None, 2), (1.0, 1), (3.0, 1), (0.5, 4)])
def test_made_arrivals_have_the_rate_and_the_variation_that_were_asked_for(cv: float | None, seed: int) -> None:
    times = Load(rate_per_s=4.0, cv=cv).draw(40_001, seed)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    wanted = 1.0 if cv is None else cv
    assert times[0] == 0.0
    assert times == sorted(times)
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=5 * wanted / math.sqrt(len(gaps)))
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(wanted, rel=0.06)


def test_even_spacing_and_common_random_numbers() -> None:
    assert Load(rate_per_s=2.0, cv=0.0).draw(4, 9) == [0.0, 0.5, 1.0, 1.5]
    slow, fast = Load(rate_per_s=1.0).draw(50, 3), Load(rate_per_s=4.0).draw(50, 3)
    assert fast == pytest.approx([time / 4 for time in slow])
    assert Load(rate_per_s=1.0).draw(50, 4) != slow


def test_a_rate_stretches_a_trace_that_has_arrivals(tmp_path: Path) -> None:
    text = "arrival_time_s,input_tokens,output_tokens\n0,5,5\n1,5,5\n4,5,5\n"
    workload = read_trace(write(tmp_path, "t.csv", text)).workload(Load(rate_per_s=4.0), 0)
    assert [a.arrival_s for a in workload.arrivals] == [0.0, 0.125, 0.5]
    assert workload.notes == ("arrivals of the trace were stretched to 4 requests a second on average",)
    with pytest.raises(ConfigError, match="--cv is for generated arrivals"):
        read_trace(write(tmp_path, "t.csv", text)).workload(Load(rate_per_s=4.0, cv=2.0), 0)


def test_a_mix_has_its_share_of_short_requests_and_its_limits() -> None:
    rows = shape("mix:short=0.7,requests=2000", seed=5)
    short = [row for row in rows if row[1] < 1000]
    assert (len(rows), len(short)) == (2000, 1400)
    assert min(row[1] for row in short) >= 32
    assert max(row[1] for row in rows) <= 8000
    assert {row[0] for row in rows} == {0.0}
    assert min(row[2] for row in rows) >= 64
    assert max(row[2] for row in rows) <= 512
    assert statistics.fmean(row[1] for row in short) == pytest.approx(515.5, rel=0.05)
    assert rows == shape("mix:short=0.7,requests=2000", seed=5) != shape("mix:short=0.7,requests=2000", seed=6)
    assert [row[1:] for row in shape("mix:short=0.7,requests=2000", Load(rate_per_s=9.0), seed=5)] == [
        row[1:] for row in rows
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("mix:sort=1", "unknown key 'sort'; the keys are short, requests"),
        ("chats:users=1", "unknown key 'users'; the keys are conversations, turns"),
        ("chats:turns=0", "conversations times turns must be between 1 and 10000000"),
        ("chats:conversations=9999999,turns=9", "conversations times turns"),
        ("chats:system=-1", "system must be"),
        ("chats:message_min=600", "message_max"),
        ("chats:pause_s=nan", "pause_s must not be negative"),
        ("chats:pause_s=9e6", "end within a year"),
        ("chats:turns=9000,output_max=2000000", "less than 2147483648 tokens"),
        ("mix:short=1.5", "short must be a share"),
        ("mix:requests=many", "requests='many' is not a whole number, such as 1000"),
        ("mix:short=half", "short='half' is not a number"),
        ("mix:long_min=9000", "long_max"),
        ("mix:requests=99999999999999999999", "requests must be between 1 and 10000000"),
        ("mix:long_max=99999999999999999999", "long_max must be less than 2147483648 tokens"),
    ],
)
def test_a_broken_mix_says_what_is_wrong(source: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_trace(source)


CSV_HEAD = "arrival_time_s,input_tokens,output_tokens\n"
JSON_HEAD = '{"timestamp": 0, "input_length": 5, "output_length": 6}\n'


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        (AZURE + "2023-11-16 18:15:51,abc,5\n", 4, 2, "ContextTokens"),
        (AZURE + "yesterday,12,5\n", 4, 1, "not a date and time"),
        (CSV_HEAD + "0,5,5\n\n1,5,0\n", 4, 3, "0 is not between 1"),
        (CSV_HEAD + "0,5.5,5\n", 2, 2, "not a whole number"),
        (CSV_HEAD + "nan,5,5\n", 2, 1, "not a time"),
        (CSV_HEAD + "0,5\n", 2, 3, "2 fields, but the header has 3"),
        (CSV_HEAD + '0,"5,5\n', 2, 1, "not CSV"),
        (CSV_HEAD, 2, 1, "no requests"),
        (CSV_HEAD.replace("\n", ",wait_objective_s\n") + "0,5,5,0\n", 2, 4, "0 is not between 0.01 and"),
        (CSV_HEAD.replace("\n", ",wait_objective_s\n") + "0,5,5,soon\n", 2, 4, "not a time"),
        (CSV_HEAD.replace("\n", ",priority\n") + "0,5,5,0.5\n", 2, 4, "not a signed 64-bit integer"),
        (CSV_HEAD.replace("\n", ",priority\n") + f"0,5,5,{1 << 63}\n", 2, 4, "not a signed 64-bit integer"),
        ("a,b\n1,2\n", 1, 1, "no known trace format"),
        ("", 1, 1, "empty"),
        (b"a,b\n1,\xff\n", 2, 3, "not UTF-8"),
        (JSON_HEAD + '{"timestamp": 1, "input_length": 5, "output_length"}\n', 2, 52, "not JSON"),
        (JSON_HEAD + '{"timestamp": 1, "input_length": -5, "output_length": 6}\n', 2, 18, "-5 is not between"),
        (JSON_HEAD + '{"timestamp": 1, "input_length": 5}\n', 2, 1, "output_length.*missing"),
        (JSON_HEAD + "[1]\n", 2, 1, "JSON object"),
        ('{"arrival_unix_s": 1, "input_tokens": "x", "output_tokens": 6}\n', 1, 23, "not a whole number"),
        (
            '{"arrival_unix_s": 1, "input_tokens": 5, "output_tokens": 6, "wait_objective_s": "x"}\n',
            1,
            62,
            "not a time",
        ),
        ('{"a": 1}\n', 1, 1, "no known trace format"),
        (JSON_HEAD + f'{{"timestamp": {"9" * 400}, "input_length": 5, "output_length": 6}}\n', 2, 2, "is not a time"),
        (JSON_HEAD + f'{{"timestamp": 1, "input_length": {"9" * 5000}}}\n', 2, 34, "more than 4300 digits"),
        (JSON_HEAD + f'{{"timestamp": 1, "input_length": {"9" * 400}, "output_length": 6}}\n', 2, 18, "is not between"),
        (JSON_HEAD + f'{{"timestamp": {"[" * 9000}{"]" * 9000}}}\n', 2, 1, "nested too deeply"),
        (JSON_HEAD + '{"timestamp": 4e10, "input_length": 5, "output_length": 6}\n', 2, 2, "more than a year"),
        (CSV_HEAD + "0,5,5\n1e300,5,5\n", 3, 1, "more than a year"),
        ('{"arrival_unix_s": 1, "input_tokens": 1, "output_tokens": 6, "request_id": []}\n', 1, 62, "must be text or"),
    ],
)
def test_a_broken_trace_names_file_line_and_column(
    tmp_path: Path, text: str | bytes, line: int, column: int, problem: str
) -> None:
    file = write(tmp_path, "broken", text)
    with pytest.raises(TraceError, match=problem) as raised:
        read_trace(file)
    assert raised.value.details == {"file": file, "line": line, "column": column}
    assert f"{file}, line {line}, column {column}" in raised.value.message


def test_a_missing_file_and_a_load_that_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(str(tmp_path / "none.csv"))
    for wrong in ({"rate_per_s": 0.0}, {"rate_per_s": 1.0, "cv": -1.0}, {"cv": 2.0}, {"limit": 0}, {"clients": -1}):
        with pytest.raises(ConfigError):
            Load(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="excludes --rate"):
        Load(rate_per_s=1.0, clients=2)
    for cv in (1e-200, 1e200, math.nan):
        with pytest.raises(ConfigError, match="--cv must be 0, or between"):
            Load(rate_per_s=1.0, cv=cv)


@pytest.mark.parametrize("text", ["mix:requests=5", CSV_HEAD + "0,5,5\n1,5,5\n"])
@pytest.mark.parametrize("rate_per_s", [1e-300, 5e-324, 1e-8])
def test_a_rate_at_which_virtual_time_would_stop_is_refused(tmp_path: Path, text: str, rate_per_s: float) -> None:
    source = text if text.startswith("mix:") else write(tmp_path, "t.csv", text)
    with pytest.raises(ConfigError, match="after more than a year"):
        read_trace(source).workload(Load(rate_per_s=rate_per_s), 0)
    assert shape(source, Load(rate_per_s=1e-6))[-1][0] > 1e5


DATA = Path(os.environ.get("ALIGNEDSERVE_DATA") or Path(__file__).parents[3] / "../shared/data")


@pytest.mark.parametrize(
    ("name", "rows", "kind"),
    [
        ("traces/AzureLLMInferenceTrace_code.csv", 8819, TimedTrace),
        ("traces/mooncake_synthetic_trace.jsonl", 3993, TimedTrace),
        ("lengths/arxiv_summarization_4k_lengths.csv", 28257, LengthsTrace),
        ("groundtruth/rtxpro6000-llama-3.1-8b/workload.csv", 300, TimedTrace),
    ],
)
def test_published_traces_are_read(name: str, rows: int, kind: type) -> None:
    need("" if (DATA / name).exists() else f"there is no {DATA / name} (ALIGNEDSERVE_DATA)")
    trace = read_trace(str(DATA / name))
    assert isinstance(trace, kind)
    assert len(trace.workload(Load(), 0).arrivals) == rows
