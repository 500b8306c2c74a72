"""A request's timeline, and the words about it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from alignedserve.gateway.live.explain import FOR_PREFILL, FOR_ROOM, POOL_REASONS, Told, explain
from alignedserve.gateway.live.queue_cause import queue_cause
from alignedserve.gateway.live.samples import Samples
from alignedserve.gateway.live.timeline import open_timeline, timeline, with_last_stay
from alignedserve.metrics import Page
from alignedserve.request import MOST_STEPS
from alignedserve.scheduler.core import pool_relief, scheduler_core, state


def request(**changes: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "request_id": "cmpl-1-0",
        "took_s": 6.0,
        "input_tokens": 120,
        "output_tokens": 21,
        "cached_tokens": 64,
        "outcome": "length",
        "prefill_id": "prefill-0",
        "decode_id": "decode-1",
        "epoch": 0,
        "losses": 0,
        "loss_reasons": [],
        "tokens_before": 0,
        "resumed_tokens": None,
        "bubble_s": None,
        "refused": "",
        "stages": {"queue": 0.1, "prefill": 0.2, "pool": 3.2, "prefetch": 0.2, "handover": 0.3, "decode": 2.0},
        "steps": [
            ["queue", 0.0],
            ["prefill", 0.1],
            ["pool", 0.3],
            ["prefetch", 2.5],
            ["handover", 2.6],
            ["decode", 2.8],
            ["pool", 3.8],
            ["prefetch", 4.8],
            ["handover", 4.9],
            ["decode", 5.0],
        ],
        **changes,
    }


def stay(**changes: Any) -> dict[str, Any]:
    usual = {"epoch": 0, "decode_id": "decode-0", "kv_tokens": 121, "waited_s": 2.2, "ahead": 40, "sent_first": 45}
    return {**usual, "shorter": 4, "longer": 41, "joined": True, "over": True, **changes}


def told(stays: list[dict[str, Any]], waits_for: str = "", **changes: Any) -> Told:
    return Told(request(**changes), stays, prefill=1, decode=2, prefix_cache=True, waits_for=waits_for)


def test_the_pool_says_what_went_first_and_what_helps() -> None:
    words, advice = explain(told([stay()]))
    assert "It waited 2.2 s in the pool: 40 requests waited there already, and 45 requests went first" in words[3]
    assert "(4 shorter and 41 longer than its 121 tokens)" in words[3]
    assert any("alignedserve scale --decode 3" in one for one in advice)
    assert not any("--prefill" in one for one in advice)
    assert words[0] == (
        "It took 6.0 s at prefill-0 and decode-1 and ended with length; most of it was the wait in the pool (3.2 s)."
    )
    assert "64 tokens of it were in the prefix cache" in words[2]
    assert "It decoded 21 tokens in 2.0 s, 100 ms each." in words


def test_an_eviction_and_a_loss_are_named() -> None:
    stays = [stay(joined=False), stay(), stay(decode_id="decode-1", sent_first=0)]
    words, advice = explain(told(stays, losses=2))
    assert "It waited 2.2 s in the pool again; no other request went first." in words
    assert "It came back from a decode instance once before it joined a batch." in words
    assert any(one.startswith("It was evicted once") for one in words)
    assert any("submitted again" in one and "twice" in one for one in words)
    assert any("decode cache" in one for one in advice)


def test_a_loss_is_no_eviction_and_a_resumed_call_no_loss() -> None:
    stays = [stay(), stay(epoch=1, decode_id="decode-1")]
    words, advice = explain(told(stays, epoch=1, losses=1, stages={"lost": 5.0, "decode": 1.0}, steps=[]))
    assert not any("evicted" in one for one in words)
    assert not any("decode cache" in one for one in advice)
    assert words[0].endswith("most of it was the time before it was submitted again (5.0 s).")
    words, _ = explain(told([stay(epoch=1)], epoch=1))
    assert not any("lost" in one for one in words)


def test_tokens_of_an_earlier_epoch_are_not_counted_as_decoded_in_the_last() -> None:
    """An instance was killed after 150 tokens; the KV of the prompt and of 149 of them was adopted."""
    changes = {"epoch": 1, "output_tokens": 200, "tokens_before": 150, "stages": {"pool": 0.1, "decode": 1.0}}
    words, _ = explain(told([], losses=1, **changes))
    assert "It decoded its last 50 tokens in 1.0 s, 20 ms each." in words
    words, _ = explain(told([], resumed_tokens=150, **changes))
    assert "It decoded its last 50 tokens in 1.0 s, 20 ms each." in words
    assert any(one.startswith("It was resumed here") and "; 150 tokens came before" in one for one in words)
    words, _ = explain(told([], **changes | {"output_tokens": 151, "stages": {"prefill": 0.1, "decode": 1.0}}))
    assert not any("decoded" in one for one in words)  # prefill made it


def test_a_short_request_needs_no_advice() -> None:
    changes = {"stages": {"prefill": 0.05, "decode": 0.1}, "steps": [], "outcome": "stop"}
    words, advice = explain(told([], took_s=0.2, **changes))
    assert not advice
    assert len(words) == 3


def test_a_request_without_any_stage_is_summed_up() -> None:
    refused = request(stages={}, steps=[], outcome="overloaded", prefill_id="", decode_id="", output_tokens=0)
    words, advice = explain(Told(refused, [], 1, 1, prefix_cache=True))
    assert words[0] == "It took 6.0 s and ended with overloaded."
    assert "refused" in words[1]
    assert "Retry-After" in advice[0]


def test_a_call_that_was_refused_on_arrival_says_why() -> None:
    changes = {"outcome": "overloaded", "took_s": 0.0, "stages": {}, "steps": []}
    words, advice = explain(told([], refused="the cluster is full", **changes))
    assert words == ["Its gateway refused it when it arrived: the cluster is full."]
    assert "Retry-After" in advice[0]


def test_a_wait_that_is_not_over_says_what_went_first() -> None:
    waits = stay(over=False, joined=False, waited_s=30.0, decode_id="")
    words, _ = explain(told([waits], outcome="open", took_s=31.0, stages={"pool": 30.0}))
    assert any(one.startswith("It has waited 30.0 s in the pool: 40 requests waited there already") for one in words)
    words, _ = explain(told([stay(), {**waits, "sent_first": 0}], outcome="open", stages={"pool": 30.0}))
    assert "It has waited 30.0 s in the pool again; no other request has gone first." in words
    assert any(one.startswith("It was evicted once") for one in words)


def test_the_timeline_says_where_each_stage_was() -> None:
    bars = timeline(request(), ["decode-0", "decode-1"])
    assert [(bar["stage"], bar["where"]) for bar in bars] == [
        ("queue", "scheduler"),
        ("prefill", "prefill-0"),
        ("pool", "kv_pool"),
        ("prefetch", "decode-0"),
        ("handover", "decode-0"),
        ("decode", "decode-0"),
        ("pool", "kv_pool"),
        ("prefetch", "decode-1"),
        ("handover", "decode-1"),
        ("decode", "decode-1"),
    ]
    assert [bar["end_s"] for bar in bars[:-1]] == [bar["begin_s"] for bar in bars[1:]]
    assert bars[-1]["end_s"] == 6.0


def test_without_the_schedulers_memory_bars_name_the_instances_that_tokens_came_from() -> None:
    known = request(moves=[[2.9, "decode-0"], [5.1, "decode-1"]])
    for remembered in ([], ["decode-1"]):
        bars = timeline(known, remembered)
        assert [bar["where"] for bar in bars if bar["stage"] == "decode"] == ["decode-0", "decode-1"]


def test_a_request_that_ended_while_it_was_evicted_waited_in_the_pool() -> None:
    """No worker told of the eviction."""
    stays = [stay(), stay(decode_id="", waited_s=55.0, joined=False)]
    steps, stages = [["pool", 0.3], ["decode", 4.0]], {"decode": 57.0, "pool": 3.7}
    ended = request(took_s=61.0, outcome="deadline_exceeded", stages=stages, steps=steps)
    found = with_last_stay(ended, stays)
    assert found["stages"] == {"decode": 2.0, "pool": 58.7}
    assert [(bar["stage"], bar["end_s"]) for bar in timeline(found, ["decode-0"])] == [
        ("pool", 4.0),
        ("decode", 6.0),
        ("pool", 61.0),
    ]
    words, _ = explain(Told(found, stays, prefill=1, decode=2, prefix_cache=True))
    assert any(one.startswith("It was evicted once") for one in words)
    assert any(one.startswith("It waited 55.0 s in the pool again: 40 requests waited there already") for one in words)
    for others in ([], stays[:1], [stay(decode_id="", epoch=1)], [stay(decode_id="", over=False)]):
        assert with_last_stay(ended, others) is ended


def test_the_timeline_begins_with_what_was_lost() -> None:
    steps = [["queue", 4.0], ["prefill", 4.1], ["pool", 4.3], ["decode", 5.0]]
    bars = timeline(request(losses=1, steps=steps), ["decode-1"])
    assert bars[0] == {"stage": "lost", "where": "", "begin_s": 0.0, "end_s": 4.0}
    assert [bar["stage"] for bar in bars[1:]] == ["queue", "prefill", "pool", "decode"]


def test_a_request_that_no_scheduler_has_got_has_no_timeline() -> None:
    assert timeline(request(stages={}, steps=[], outcome="unavailable"), []) == []
    assert timeline(request(stages={}, steps=[], outcome="open", losses=1), []) == []


def test_a_request_that_ended_before_its_first_token_was_in_the_queue_or_in_prefill() -> None:
    ended = {"steps": [], "outcome": "deadline_exceeded", "output_tokens": 0, "stages": {"until_first_token": 5.5}}
    bar = {"stage": "until_first_token", "where": "", "begin_s": 0.5, "end_s": 6.0}
    assert timeline(request(**ended), []) == [bar]
    assert timeline(request(**ended, losses=1), []) == [{**bar, "stage": "lost", "begin_s": 0.0, "end_s": 0.5}, bar]
    words, advice = explain(told([], **ended))
    assert words[0].endswith("ended with deadline_exceeded; most of it was the wait for a token (5.5 s).")
    assert "It ended after 5.5 s in the queue or in prefill; no worker had told more of it." in words
    assert any("alignedserve scale --prefill 2" in one for one in advice)
    words, advice = explain(told([], **ended, epoch=1, losses=1))
    assert "It ended after 5.5 s in the queue, in prefill or in the pool; no worker had told more of it." in words
    assert not any("--prefill" in one for one in advice)


def test_the_timeline_of_an_open_request_ends_now() -> None:
    now = {
        "state": "waiting",
        "ages_s": {"queued": 2.0, "prefilling": 1.5, "waiting": 1.0},
        "prefill_id": "prefill-1",
        "decode_id": "",
    }
    bars = open_timeline(request(took_s=2.0, prefill_id="", decode_id="", outcome="open", steps=[]), now, [])
    assert [(bar["stage"], bar["where"], bar["begin_s"], bar["end_s"]) for bar in bars] == [
        ("queue", "scheduler", 0.0, 0.5),
        ("prefill", "prefill-1", 0.5, 1.0),
        ("pool", "kv_pool", 1.0, 2.0),
    ]


def test_the_timeline_of_an_open_request_has_what_was_before_an_eviction() -> None:
    """Workers have told of its steps until it decoded; the scheduler knows when it entered each state last."""
    steps = request()["steps"][:6]
    ages_s = {"queued": 6.0, "prefilling": 5.89, "prefetched": 3.49, "decoding": 3.19, "waiting": 2.2}
    now = {"state": "waiting", "ages_s": ages_s, "prefill_id": "", "decode_id": ""}
    bars = open_timeline(request(took_s=6.0, outcome="open", steps=steps), now, ["decode-0"])
    assert [(bar["stage"], bar["where"], round(bar["begin_s"], 3), round(bar["end_s"], 3)) for bar in bars] == [
        ("queue", "scheduler", 0.0, 0.1),
        ("prefill", "prefill-0", 0.1, 0.3),
        ("pool", "kv_pool", 0.3, 2.5),
        ("prefetch", "decode-0", 2.5, 2.6),
        ("handover", "decode-0", 2.6, 2.8),
        ("decode", "decode-0", 2.8, 3.8),
        ("pool", "kv_pool", 3.8, 6.0),
    ]


def test_the_timeline_of_an_open_request_that_was_lost_begins_with_that() -> None:
    ages_s = {"queued": 2.0, "prefilling": 1.0}
    now = {"state": "prefilling", "ages_s": ages_s, "prefill_id": "prefill-1", "decode_id": ""}
    bars = open_timeline(request(took_s=6.0, outcome="open", steps=[], losses=1), now, [])
    assert [(bar["stage"], bar["begin_s"], bar["end_s"]) for bar in bars] == [
        ("lost", 0.0, 4.0),
        ("queue", 4.0, 5.0),
        ("prefill", 5.0, 6.0),
    ]


# ---- evictions


def test_an_eviction_to_a_candidate_buffer_is_named_without_any_stay() -> None:
    steps = [["queue", 0.0], ["prefill", 0.1], ["pool", 0.3], ["prefetch", 0.4], ["decode", 0.5]]
    steps += [["prefetch", 1.0], ["handover", 12.9], ["decode", 13.0]]
    changes = {"steps": steps, "took_s": 14.0, "stages": {"prefetch": 12.0, "handover": 0.1, "decode": 1.5}}
    words, advice = explain(told([], **changes))
    assert "It was evicted once: it left a running batch, usually to make room." in words
    assert any("decode cache" in one for one in advice)


def test_an_eviction_that_steps_and_stays_have_counts_once() -> None:
    words, _ = explain(told([stay(), stay(decode_id="decode-1")]))
    assert any(one.startswith("It was evicted once") for one in words)
    words, _ = explain(told([stay(), stay(), stay(epoch=1)], epoch=1, losses=1))  # once in each epoch
    assert any(one.startswith("It was evicted twice") for one in words)


# ---- losses


def test_the_reasons_of_losses_are_named_and_a_full_pool_is_advised_about() -> None:
    words, advice = explain(told([], losses=3, loss_reasons=["the KV pool is full", "x died", "the KV pool is full"]))
    assert "It was submitted again 3 times: the KV pool is full (twice); x died." in words
    assert any("kv_pool.size_gib" in one for one in advice)
    words, advice = explain(told([], losses=1, loss_reasons=["it was cancelled by the cluster"]))
    assert "It was submitted again once: it was cancelled by the cluster." in words
    assert not any("kv_pool.size_gib" in one for one in advice)
    words, _ = explain(told([], losses=1, loss_reasons=[""]))
    assert "It was submitted again once." in words
    assert not any("process" in one for one in words)


@pytest.mark.parametrize(
    ("reasons", "blamed"),
    [(["decode decode-0 was lost"] * 5, True), (["the KV pool is full"] * 5, False), ([], False)],
)
def test_a_lost_request_is_blamed_only_if_its_processes_ended(reasons: list[str], blamed: bool) -> None:
    words, advice = explain(told([], outcome="request_lost", losses=5, loss_reasons=reasons))
    assert "It was lost several times in a row, without a token in between." in words
    assert any("crash" in one for one in words) == blamed
    assert any("Do not send it again" in one for one in advice) == blamed


def test_the_scheduler_still_words_the_reasons_so() -> None:
    full, lower = POOL_REASONS
    assert full in inspect.getsource(pool_relief)
    assert lower in inspect.getsource(state)
    assert "{event.role} {event.instance_id} was lost" in inspect.getsource(scheduler_core)


# ---- the queue


def of_queue(stays: list[dict[str, Any]], waits_for: str = "") -> tuple[str, bool, bool]:
    """What is said of a long wait in the queue, and whether prefill instances and a larger pool are advised."""
    words, advice = explain(told(stays, waits_for, stages={"queue": 4.0, "decode": 1.0}, steps=[]))
    (said,) = (one for one in words if one.startswith("It waited 4.0 s for prefill: "))
    return (
        said.partition(": ")[2],
        any("--prefill 2" in one for one in advice),
        any("size_gib" in one for one in advice),
    )


def test_the_queue_names_its_cause_where_it_is_known_and_else_both() -> None:
    assert of_queue([]) == ("other prompts came first, or the pool had no room for it.", True, True)
    assert of_queue([stay(ahead=40)]) == ("other prompts came first, or the pool had no room for it.", True, True)
    assert of_queue([stay(ahead=0)]) == ("other prompts came first.", True, False)
    assert of_queue([], FOR_PREFILL) == ("other prompts came first.", True, False)
    assert of_queue([], FOR_ROOM) == ("the pool has no room for it.", False, True)


@pytest.mark.parametrize(
    ("pending", "free", "cause"),
    [
        ((500, 20), (60, 20), FOR_PREFILL),
        ((500, 0), (10, 5), FOR_ROOM),
        ((500, 20), (10, 5), ""),
        ((500, 0), (60, 20), ""),
        ((), (60, 20), ""),
    ],
)
def test_metrics_tell_what_the_queue_waits_for(pending: tuple[int, ...], free: tuple[int, int], cause: str) -> None:
    pages = []
    for number, tokens in enumerate(pending):
        page = Page(instance=f"prefill-{number}")
        page.gauge("prefill_pending_tokens", "tokens", tokens)
        pages.append(page.text())
    page = Page(instance="kv_pool-0")
    blocks = {"free": free[0], "cached": free[1], "owned": 100 - sum(free)}
    for store in ("kv_pool-0", "kv_pool-0/disk"):
        for kind, count in blocks.items():
            page.gauge("kv_blocks", "blocks", count if store == "kv_pool-0" else 0, store=store, state=kind)
        page.gauge("kv_capacity_blocks", "blocks", 100, store=store)
    assert queue_cause(Samples("".join([*pages, page.text()]), 0.0)) == cause


# ---- decode and prefill


def test_a_request_that_decodes_long_in_even_batches_is_advised_more_decode_instances() -> None:
    stages = {"prefill": 0.2, "decode": 5.5}
    _, advice = explain(told([], stages=stages, steps=[], bubble_s=0.1))
    assert [one.rpartition(": ")[2] for one in advice] == ["alignedserve scale --decode 3"]
    _, advice = explain(told([], stages=stages, steps=[], bubble_s=2.0))
    assert not any("--decode" in one for one in advice)


def test_a_long_prompt_needs_no_advice_with_the_prefix_cache() -> None:
    _, advice = explain(told([], stages={"prefill": 5.0, "decode": 0.5}, steps=[]))
    assert advice == []


# ---- more steps than are noted


def test_steps_that_were_not_noted_are_one_bar_and_are_said() -> None:
    steps = [[("pool", "prefetch", "handover", "decode")[number % 4], 0.1 * number] for number in range(MOST_STEPS)]
    many = {"steps": steps, "took_s": 60.0}
    bars = timeline(request(**many), [])
    assert len(bars) == MOST_STEPS
    assert bars[-2]["end_s"] == steps[-1][1]
    assert bars[-1] == {"stage": "not_noted", "where": "", "begin_s": steps[-1][1], "end_s": 60.0}
    words, _ = explain(told([], **many))
    assert f"The timeline has its first {MOST_STEPS - 1} steps; later ones were not noted." in words
    assert any(one.startswith("It was evicted at least 11 times") for one in words)
    words, _ = explain(told([]))
    assert not any("not noted" in one for one in words)
    now = {"state": "decoding", "ages_s": {"decoding": 1.0}, "prefill_id": "", "decode_id": "decode-0"}
    bars = open_timeline(request(**many, outcome="open"), now, [])
    assert [(bar["stage"], bar["where"]) for bar in bars[-2:]] == [("not_noted", ""), ("decode", "decode-0")]
    assert (bars[-2]["end_s"], bars[-1]["end_s"]) == (59.0, 60.0)
