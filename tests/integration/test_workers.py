"""What requests can ask for, through the real workers in plain processes (one cluster for all tests here)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.errors import InvalidRequestError
from alignedserve.request import BATCH_PRIORITY, SamplingParams
from alignedserve.testing.models import make_model, make_tokenizer
from alignedserve.testing.reference import greedy, load_reference, logprobs, random_prompts
from support.driver import Driver
from support.held import wait_nothing_held

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
VOCAB_SIZE = 400


@dataclass
class Served:
    cluster: LocalCluster
    driver: Driver
    reference: PreTrainedModel
    folder: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = make_model("llama", tmp_path_factory.mktemp("model"), seed=3, vocab_size=VOCAB_SIZE)
    make_tokenizer(folder, vocab_size=VOCAB_SIZE)
    config = from_tree(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1, "verify": True},
            "prefill": {"token_budget": 64},
            "supervisor": {"heartbeat_s": 0.1},
        }
    )
    async with LocalCluster(config) as cluster:
        await cluster.wait_ready()
        async with Driver(cluster.address("scheduler-0"), cluster.token) as driver:
            yield Served(cluster, driver, load_reference(folder), folder)


async def test_every_stage_of_a_request_is_timed(served: Served) -> None:
    (answer,) = await served.driver.generate([list(range(2, 90))], GREEDY)

    assert answer.error is None
    assert answer.stopwatch is not None
    stages = ["queue", "prefill", "pool", "prefetch", "handover", "decode"]
    assert set(answer.stopwatch.spent_s) == set(stages)
    assert (answer.prefill_id, answer.decode_id) == ("prefill-0", "decode-0")
    told = [[step[0] for step in watch.steps] + [watch.stage] for watch in answer.told]  # what is over, and what is not
    assert told == [stages[:3], stages, [*stages, "decode"]]


async def test_answers_to_one_prompt_are_each_their_own(served: Served) -> None:
    prompt = random_prompts([70], VOCAB_SIZE, seed=5)[0]
    sampling = SamplingParams(temperature=1.0, seed=41, max_tokens=20, ignore_eos=True)

    together = served.driver.submit(prompt, sampling, n=4)
    await served.driver.wait(together)
    alone = [served.driver.submit(prompt, sampling.with_seed(41 + index))[0] for index in range(4)]
    await served.driver.wait(alone)

    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert len({tuple(a.tokens) for a in together}) == 4
    await wait_nothing_held(served.cluster, 1.0)


async def test_a_seeded_request_does_not_depend_on_its_company(served: Served) -> None:
    prompts = random_prompts([9, 200, 33, 57, 120, 1], VOCAB_SIZE, seed=6)
    sampling = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=77, max_tokens=16, ignore_eos=True)

    together = await served.driver.generate(prompts, sampling)
    alone = [(await served.driver.generate([prompt], sampling))[0] for prompt in prompts]

    assert [a.tokens for a in together] == [a.tokens for a in alone]


async def test_answers_without_hurry_are_exact_although_others_come_between(served: Served) -> None:
    prompts = random_prompts([40 + 7 * number for number in range(16)], VOCAB_SIZE, seed=12)
    long = replace(GREEDY, max_tokens=48)
    alone = await served.driver.generate(prompts, long)
    backlog = [served.driver.submit(prompt, long, priority=BATCH_PRIORITY)[0] for prompt in prompts]
    await served.driver.wait_tokens(backlog[:4], 3)
    plain = [served.driver.submit(prompt, GREEDY)[0] for prompt in prompts[:3]]
    await served.driver.wait([*backlog, *plain])

    assert [answer.tokens for answer in backlog] == [answer.tokens for answer in alone]
    assert [answer.tokens for answer in plain] == [answer.tokens[:24] for answer in alone[:3]]
    await wait_nothing_held(served.cluster, 1.0)


async def test_logprobs_are_the_models(served: Served) -> None:
    prompt = random_prompts([40], VOCAB_SIZE, seed=8)[0]

    (answer,) = await served.driver.generate([prompt], replace(GREEDY, logprobs=3, prompt_logprobs=2))

    truth = logprobs(served.reference, prompt + answer.tokens)
    for index, (token, entry) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        row = truth[len(prompt) - 1 + index]
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [token for token, _ in entry.top] == torch.topk(row, 3).indices.tolist()
    assert len(answer.prompt_logprobs) == len(prompt) - 1
    for index, entry in enumerate(answer.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(truth[index][prompt[index + 1]]), abs=1e-4)


async def test_a_prompt_alone_can_be_scored(served: Served) -> None:
    prompt = random_prompts([150], VOCAB_SIZE, seed=9)[0]

    (answer,) = await served.driver.generate([prompt], replace(GREEDY, max_tokens=0, prompt_logprobs=0))

    assert (answer.tokens, answer.finish_reason) == ([], "length")
    assert len(answer.prompt_logprobs) == 149


async def test_one_token_needs_no_decode(served: Served) -> None:
    prompt = random_prompts([20], VOCAB_SIZE, seed=10)[0]

    (answer,) = await served.driver.generate([prompt], replace(GREEDY, max_tokens=1))

    assert answer.tokens == greedy(served.reference, prompt, 1)
    assert answer.decode_id == ""


async def test_stop_token_and_stop_string_end_a_request(served: Served) -> None:
    from tokenizers import Tokenizer

    prompt = random_prompts([30], VOCAB_SIZE, seed=12)[0]
    expected = greedy(served.reference, prompt, 24)
    tokenizer = Tokenizer.from_file(str(served.folder / "tokenizer.json"))
    at = next(i for i in range(4, 24) if expected[i] not in expected[:i])
    text = tokenizer.decode(expected)
    stop = next(text[i : i + 3] for i in range(5, len(text) - 3) if text.isascii() or text[i : i + 3].isascii())

    (by_token,) = await served.driver.generate([prompt], replace(GREEDY, stop_token_ids=(expected[at],)))
    (by_text,) = await served.driver.generate([prompt], replace(GREEDY, stop=(stop,)))

    assert (by_token.tokens, by_token.finish_reason) == (expected[: at + 1], "stop")
    assert by_text.finish_reason == "stop"
    assert by_text.tokens == expected[: len(by_text.tokens)]
    assert stop in tokenizer.decode(by_text.tokens)
    assert stop not in tokenizer.decode(by_text.tokens[:-1])


async def test_a_cancelled_request_holds_nothing_and_disturbs_no_other(served: Served) -> None:
    prompts = random_prompts([60, 61, 62, 63, 250, 64], VOCAB_SIZE, seed=13)
    long = replace(GREEDY, max_tokens=200)
    kept = [served.driver.submit(prompt, GREEDY)[0] for prompt in prompts]
    gone = [served.driver.submit(prompt, long)[0] for prompt in prompts]
    await served.driver.wait_tokens(gone)

    served.driver.cancel(gone)
    await served.driver.wait(kept)

    for prompt, answer in zip(prompts, kept, strict=True):
        assert answer.tokens == greedy(served.reference, prompt, 24, answer.tokens)
    await wait_nothing_held(served.cluster, 1.0)
    assert max(len(answer.tokens) for answer in gone) < long.max_tokens


async def test_a_request_that_fits_nowhere_is_refused(served: Served) -> None:
    longest = served.driver.max_request_tokens

    (answer,) = await served.driver.generate([[5] * (longest + 1)], replace(GREEDY, max_tokens=1))

    assert isinstance(answer.error, InvalidRequestError)
    assert longest > 1000
