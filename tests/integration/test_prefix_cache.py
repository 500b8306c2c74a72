"""The prefix cache through the real workers in plain processes: tokens equal `generate`'s, whatever is reused."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.control.prefixes import cached_prefix
from alignedserve.control.samples import value
from alignedserve.gateway.pinning.board import PinBoard
from alignedserve.model import resolve_model
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import SamplingParams
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Answer, Driver
from support.gateway import http_to, joined_gateway

NEW_TOKENS = 21
BLOCK = 4


def config_for(folder: Path, token_budget: int = 64, **pool: object) -> Config:
    return from_tree(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1, "block_size": BLOCK, "verify": True, "prefix_cache": True, **pool},
            "prefill": {"token_budget": token_budget},
            "scheduler": {"min_batch_requests": 4},
            "supervisor": {"heartbeat_s": 0.2, "fence_after_s": 60.0},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "llama", seed=7)


def prompts_of(folder: Path, *lengths: int) -> list[list[int]]:
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return random_prompts(lengths, vocab_size, seed=11, shared=0)


SAMPLING = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def check(folder: Path, answers: list[Answer]) -> None:
    reference = load_reference(folder)
    for answer in answers:
        assert answer.error is None
        assert answer.tokens == greedy(reference, answer.spec.prompt_token_ids, NEW_TOKENS, answer.tokens)


async def metrics_at_rest(cluster: LocalCluster) -> str:
    """The metrics once no block is held: what has ended is cached or free."""
    while True:
        await asyncio.sleep(0.3)
        found = (await cluster.status()).metrics
        if value(found, "alignedserve_kv_blocks", state="owned") == 0:
            return found


def test_turns_compute_only_what_is_new(folder: Path) -> None:
    system, *tails = prompts_of(folder, 100, 9, 13, 2, 7)

    async def run() -> tuple[list[Answer], str]:
        async with LocalCluster(config_for(folder)) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                answers: list[Answer] = []
                prompt = system
                for tail in tails:  # a conversation: each turn has the prompt and the answer of the one before
                    prompt = prompt + tail
                    (answer,) = driver.submit(prompt, SAMPLING)
                    await driver.wait([answer])
                    answers.append(answer)
                    prompt = prompt + answer.tokens
                    await metrics_at_rest(cluster)
                return answers, await metrics_at_rest(cluster)

    answers, metrics = asyncio.run(run())
    check(folder, answers)
    held = [len(answer.spec.prompt_token_ids) + NEW_TOKENS - 1 for answer in answers]  # the last token has no KV
    expected = [0, *(tokens // BLOCK * BLOCK for tokens in held[:-1])]
    assert [answer.cached_tokens for answer in answers] == expected
    assert value(metrics, "alignedserve_prefix_cache_hit_tokens_total") == sum(expected)
    cached, free = (value(metrics, "alignedserve_kv_blocks", state=state) for state in ("cached", "free"))
    assert cached > 0
    assert cached + free == value(metrics, "alignedserve_kv_capacity_blocks")


def test_a_prefix_that_comes_at_once_is_computed_once(folder: Path) -> None:
    prompts = prompts_of(folder, 440, 441, 442, 443, 5, 6, 7, 8, 9, 30)
    systems, tails = prompts[:4], prompts[4:]

    async def run() -> tuple[list[list[Answer]], str]:
        rounds: list[list[Answer]] = []
        async with LocalCluster(config_for(folder, token_budget=8)) as cluster:  # so that it takes a while
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                for system in systems:  # on a slow machine the first prompt may be computed before others are looked up
                    answers = [driver.submit(system + tail, SAMPLING)[0] for tail in tails]
                    answers += driver.submit(system + tails[0], SAMPLING, n=3)
                    await driver.wait(answers)
                    rounds.append(answers)
                    metrics = await metrics_at_rest(cluster)
                    if value(metrics, "alignedserve_prefix_cache_waited_prompts_total") > 0:
                        break
                return rounds, metrics

    rounds, metrics = asyncio.run(run())
    for answers in rounds:
        check(folder, answers)
        cached = sorted(answer.cached_tokens for answer in answers)
        assert cached[0] == 0
        assert all(tokens >= 440 // BLOCK * BLOCK for tokens in cached[1:])
    assert value(metrics, "alignedserve_prefix_cache_waited_prompts_total") > 0


def test_prompts_of_a_killed_instance_find_their_prefix_again(folder: Path) -> None:
    system, *tails = prompts_of(folder, 440, 700, 701, 702, 703)

    async def run() -> list[Answer]:
        async with LocalCluster(config_for(folder, token_budget=8)) as cluster:  # so that it takes a while
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                await driver.wait(driver.submit([*system, *tails[0][:4]], SAMPLING))
                await metrics_at_rest(cluster)
                answers = [driver.submit(system + tail, SAMPLING)[0] for tail in tails]
                while value((await cluster.status()).metrics, "alignedserve_kv_blocks", state="owned") == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                cluster.kill("prefill-0")
                await driver.wait(answers)
                return answers

    answers = asyncio.run(run())
    check(folder, answers)
    assert any(answer.key.epoch for answer in answers)
    assert all(answer.cached_tokens >= 440 for answer in answers)


def test_prompts_that_end_with_their_first_token_are_cached_and_pins_outlive_their_shards_process(
    folder: Path,
) -> None:
    prompt, tail, system = prompts_of(folder, 90, 10, 42)

    async def run() -> list[Answer]:
        async with LocalCluster(config_for(folder)) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                answers: list[Answer] = []
                for tokens in (prompt, prompt + tail, prompt + tail):
                    answers += driver.submit(tokens, replace(SAMPLING, max_tokens=1))
                    await driver.wait(answers)
                    await metrics_at_rest(cluster)
                async with joined_gateway(cluster.join_info()) as gateway:
                    board = PinBoard(gateway.ledger, gateway.model, gateway.shard_channels, lambda: gateway.view)
                    pin = kp.PinnedPrefix(name="system", prefix=cached_prefix(system, b""), everywhere=True)
                    (held,) = await board.pin(pin, board.shards())
                    assert (held.tokens, held.blocks) == (40, 10)
                    killed = cluster.peer("kv_pool-0").process.incarnation
                    cluster.kill("kv_pool-0")
                    await cluster.wait_restarted("kv_pool-0", killed)
                    answers += driver.submit(system + tail, replace(SAMPLING, max_tokens=1))
                    await driver.wait(answers)
                    (found,) = await board.contents()
                    assert [(one.pin.name, one.tokens) for one in found.pins] == [("system", 40)]
                    assert found.pinned_blocks == 10
                    dropped = await board.drop(kp.DropCached(names=["system"]))
                    assert [list(one.names) for one in dropped.values()] == [["system"]]
                await metrics_at_rest(cluster)
                return answers

    answers = asyncio.run(run())
    assert [answer.cached_tokens for answer in answers] == [0, 88, 96, 40]
    reference = load_reference(folder)
    for answer in answers:
        assert answer.tokens == greedy(reference, answer.spec.prompt_token_ids, 1, answer.tokens)


def test_a_salt_and_the_switch_keep_prompts_apart(folder: Path) -> None:
    (prompt,) = prompts_of(folder, 64)

    async def run(config: Config, salts: list[bytes]) -> list[Answer]:
        async with LocalCluster(config) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                answers: list[Answer] = []
                for salt in salts:
                    answers += driver.submit(prompt, SAMPLING, cache_salt=salt)
                    await driver.wait(answers)
                    await metrics_at_rest(cluster)
                return answers

    salted = asyncio.run(run(config_for(folder), [b"a", b"b", b"a"]))
    check(folder, salted)
    assert [answer.cached_tokens for answer in salted] == [0, 0, 60]
    off = asyncio.run(run(config_for(folder, prefix_cache=False), [b"", b""]))
    check(folder, off)
    assert [answer.cached_tokens for answer in off] == [0, 0]


def test_api_keys_keep_prompts_apart_where_isolation_is_on(folder: Path, tmp_path: Path) -> None:
    """Also what an answer says is cached: it would tell one tenant what another has asked."""
    (prompt,) = prompts_of(folder, 64)
    keys = tmp_path / "keys"
    keys.write_text("one-key-of-sixteen\nanother-key-of-it\n")
    keys.chmod(0o600)
    config = config_for(folder)
    config = replace(config, gateway=replace(config.gateway, api_key_file=str(keys), cache_isolation="key"))

    async def run() -> list[int]:
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "include_timings": True}
        found = []
        async with LocalCluster(config) as cluster:
            await cluster.wait_ready()
            async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 60.0) as http:
                for key in ("one-key-of-sixteen", "another-key-of-it", "one-key-of-sixteen", "another-key-of-it"):
                    answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
                    told = answer.json()
                    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
                    assert told["timings"]["cached_tokens"] == cached
                    found.append(cached)
                    await metrics_at_rest(cluster)
        return found

    assert asyncio.run(run()) == [0, 0, 60, 60]


def test_a_salt_keeps_prompts_apart_on_every_endpoint() -> None:
    text = " ".join(f"Rule {number}: be brief." for number in range(12))
    bodies: dict[str, dict[str, object]] = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": f"chat {text}"}]},
        "/v1/responses": {"input": f"responses {text}"},
        "/v1/messages": {"messages": [{"role": "user", "content": f"messages {text}"}]},
    }

    async def run() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        async with LocalCluster(config_for(resolve_model("tiny"))) as cluster:
            await cluster.wait_ready()
            async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 60.0) as http:
                for path, body in bodies.items():
                    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
                    for salt in ("one", "other", "one"):
                        answer = await http.post(path, json={**body, limit: 16, "model": "tiny", "cache_salt": salt})
                        assert answer.status_code == 200, answer.text
                        found.setdefault(path, []).append(cached_of(answer.json()["usage"]))
                        await metrics_at_rest(cluster)
        return found

    for path, (first, other, again) in asyncio.run(run()).items():
        assert (first, other) == (0, 0), path
        assert again >= 64, path


def cached_of(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens", usage.get("cache_read_input_tokens", 0)))


def test_kv_of_weights_that_were_changed_in_place_is_not_used(folder: Path, tmp_path: Path) -> None:
    """An instance that is started again loads the new weights; the pool's memory is older."""
    served = tmp_path / "model"
    shutil.copytree(folder, served)
    newer = make_model("llama", tmp_path / "newer", seed=8)
    (prompt,) = prompts_of(folder, 90)

    async def run() -> tuple[list[Answer], list[str]]:
        async with LocalCluster(config_for(served)) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                answers = [*driver.submit(prompt, SAMPLING)]
                await driver.wait(answers)
                await metrics_at_rest(cluster)
                shutil.copy(newer / "model.safetensors", served / "model.safetensors")
                degraded: list[str] = []
                for role_id in ("prefill-0", "decode-0"):
                    before = cluster.peer(role_id).process.incarnation
                    cluster.kill(role_id)
                    await cluster.wait_restarted(role_id, before)
                    degraded += (await cluster.status()).degraded
                for _ in range(2):
                    answers += driver.submit(prompt, SAMPLING)
                    await driver.wait(answers)
                    await metrics_at_rest(cluster)
                return answers, degraded

    (before, after, again), degraded = asyncio.run(run())
    check(folder, [before])
    check(served, [after, again])
    assert before.tokens != after.tokens
    assert [answer.cached_tokens for answer in (before, after, again)] == [0, 0, 88]
    assert [line.partition(":")[0] for line in degraded] == ["decode-0"]
