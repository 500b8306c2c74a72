"""A request's timeline, and the words about it."""

from __future__ import annotations

from typing import Any

from alignedserve.gateway.live.explain import Told, explain
from alignedserve.gateway.live.timeline import open_timeline, timeline


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


def told(stays: list[dict[str, Any]], **changes: Any) -> Told:
    return Told(request(**changes), stays, prefill=1, decode=2, prefix_cache=True)


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
    words, advice = explain(told(stays, epoch=1, losses=1, stages={"lost": 5.0, "decode": 1.0}))
    assert not any("evicted" in one for one in words)
    assert not any("decode cache" in one for one in advice)
    assert words[0].endswith("most of it was what was lost with a process (5.0 s).")
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
    words, advice = explain(told([], took_s=0.2, stages={"prefill": 0.05, "decode": 0.1}, outcome="stop"))
    assert not advice
    assert len(words) == 3


def test_a_request_without_any_stage_is_summed_up() -> None:
    refused = request(stages={}, steps=[], outcome="overloaded", prefill_id="", decode_id="", output_tokens=0)
    words, advice = explain(Told(refused, [], 1, 1, prefix_cache=True))
    assert words[0] == "It took 6.0 s and ended with overloaded."
    assert "refused" in words[1]
    assert "Retry-After" in advice[0]


def test_a_call_that_was_refused_on_arrival_says_why() -> None:
    words, advice = explain(told([], refused="the cluster is full", outcome="overloaded", took_s=0.0, stages={}))
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
