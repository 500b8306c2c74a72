"""Kills or stops one process after the other while 32 greedy fp32 streams run on a real cluster. A third of them are
under a grammar, or call a tool.

The short form checks that the streams are exact and valid and that no blocks are left, regardless of the machine's
speed; the long form also limits the gaps in the streams.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys

import pytest

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.control.samples import value
from alignedserve.testing.reference import random_prompts
from support.chaos import HEADER, Chaos, Round, table
from support.chaos_asks import Ask, mixed

STREAMS = 32
ROLES = ("decode", "prefill", "kv_pool", "scheduler", "gateway", "supervisor", "node_agent")
RANKS = ("rank of decode", "rank of prefill")
SHORT_ROLES = ("decode", "scheduler", "gateway")
VOCABULARY = 2000
LONGEST_GAP_S = {"spare": 2.0, "alone": 8.0, "verified": 8.0, "ranks": 8.0}
RANDOM_STRIKES = 20
REPLACED_S = 10.0

pytestmark = pytest.mark.cluster


def asks(seed: int, shared_tokens: int = 160) -> list[Ask]:
    """Short and long prompts, and one with several chunks. Every second one begins with the same `shared_tokens`."""
    draw = random.Random(seed)
    lengths = [draw.choice([1, 8, 20, 40, 90, 200]) for _ in range(STREAMS - 1)]
    shared, *prompts = random_prompts([shared_tokens, *lengths, 600], VOCABULARY, seed=seed, shared=0)
    return mixed([shared + prompt if number % 2 else prompt for number, prompt in enumerate(prompts)])


async def strike_each(chaos: Chaos, strikes: list[tuple[str, int]]) -> list[Round]:
    """The undisturbed run and the rounds of all strikes. A strike that comes too late is repeated."""
    rounds = [await chaos.undisturbed()]
    for role, number in strikes:
        for _ in range(3):
            rounds.append(await chaos.strike(role, number))
            if rounds[-1].counts:
                break
        assert rounds[-1].counts, f"{role} was never struck in time"
    return rounds


def show(rounds: list[Round]) -> None:
    rows = [list(HEADER), *table(rounds)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)), file=sys.stderr)


def require_exact(rounds: list[Round]) -> None:
    for one in rounds:
        assert (one.wrong, one.invalid, one.errors, one.blocks_left, one.segments_more) == (0, 0, (), 0, 0), one


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_whichever_process_is_killed_no_stream_loses_or_repeats_a_token() -> None:
    async def run(server: ServeProcess) -> tuple[list[Round], int]:
        async with Chaos(server.url, server.grpc_address, asks(1), max_tokens=64, seed=1) as chaos:
            return await strike_each(chaos, [(role, signal.SIGKILL) for role in SHORT_ROLES]), chaos.expected_tokens

    with ServeProcess("--model", "tiny", "--dtype", "float32", "--set", "gateway.replicas=2") as server:
        rounds, tokens = asyncio.run(run(server))
        server.check_integrity()
    require_exact(rounds)
    by_role = {one.strike.role: one for one in rounds if one.strike is not None}
    # The requests of the decode worker reuse the KV in the pool: only generated tokens are prefilled again.
    assert 0 < by_role["decode"].repeated_tokens <= tokens
    assert by_role["decode"].reused_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", ["alone", "spare", "verified", "ranks"])
def test_every_role_is_struck_and_then_any(shape: str) -> None:
    arguments = {
        "alone": [],
        "spare": ["--prefill", "2", "--decode", "2", "--set", "supervisor.spares=1"],
        "verified": ["--verify-kv"],
        "ranks": ["--prefill-tp", "2", "--decode-pp", "2", "--set", "supervisor.spares=1"],
    }[shape]
    draw = random.Random(7)
    roles, count = (RANKS, len(RANKS) * 4) if shape == "ranks" else (ROLES, RANDOM_STRIKES)
    strikes = [(role, signal.SIGKILL) for role in roles]
    strikes += [(draw.choice(roles), draw.choice([signal.SIGKILL, signal.SIGSTOP])) for _ in range(count)]

    sent = asks(2, 500) if shape == "verified" else asks(2)

    async def run(server: ServeProcess) -> list[Round]:
        async with Chaos(server.url, server.grpc_address, sent, max_tokens=160, seed=2) as chaos:
            return await strike_each(chaos, strikes)

    command = ("--model", "tiny", "--dtype", "float32", "--set", "gateway.replicas=2", *arguments)
    with ServeProcess(*command) as server:
        rounds = asyncio.run(run(server))
        server.check_integrity()
        hits = value(server.metrics(), "alignedserve_prefix_cache_hit_tokens_total")
    show(rounds)
    assert hits > 0
    require_exact(rounds)
    killed = [one for one in rounds if one.strike is not None and one.strike.how == "SIGKILL"]
    stopped = [one for one in rounds if one.strike is not None and one.strike.how == "SIGSTOP"]
    struck = [*killed, *stopped]
    late = [one for one in killed if one.longest_gap_s > LONGEST_GAP_S[shape]]
    late += [one for one in stopped if one.longest_gap_s > REPLACED_S]
    late += [one for one in struck if one.strike is not None and one.strike.restored_s > REPLACED_S]
    assert not late, late
