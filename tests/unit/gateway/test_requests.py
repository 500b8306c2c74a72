"""How a valid request is read: defaults, extensions, groups, models that lack a feature, and the API's description."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from alignedserve.control.convert import key_from_proto
from alignedserve.gateway.body.planning import derive_seed, plan_completion
from alignedserve.gateway.body.requests import ChatRequest, CompletionRequest, SamplingOptions, parse_completion
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import inference_pb2 as inf
from alignedserve.request import SamplingParams
from alignedserve.scheduler.process.messaging import request_meta
from support.fake_cluster import fake_model_info
from support.gateway_front import CHAT, COMPLETIONS, HI, Front


async def test_defaults_are_openais_and_the_models(front: Front) -> None:
    (spec,) = await front.submit(COMPLETIONS, {"prompt": "hi"})
    assert (spec.sampling.max_tokens, spec.sampling.temperature, spec.sampling.top_p) == (16, 1.0, 1.0)
    assert spec.sampling.eos_token_ids == (0, 5)
    front.model.info = fake_model_info(generation_defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 20.0})
    (spec,) = await front.submit(COMPLETIONS, {"prompt": "hi", "top_p": 0.5, "temperature": None})
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k) == (0.6, 0.5, 20)


async def test_a_chat_may_fill_what_is_left(front: Front) -> None:
    (spec,) = await front.submit(CHAT, {"messages": HI})
    assert len(spec.prompt_token_ids) + spec.sampling.max_tokens == 512
    front.model.capacity_tokens = 100
    (spec,) = await front.submit(CHAT, {"messages": HI})
    assert len(spec.prompt_token_ids) + spec.sampling.max_tokens == 100
    error = await front.error(CHAT, {"messages": HI, "max_tokens": 200})
    assert error["code"] == "context_length_exceeded"
    assert "this cluster can hold" in error["message"]


async def test_content_parts_are_one_text(front: Front) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    (spec,) = await front.submit(CHAT, {"messages": [{"role": "user", "content": parts}]})
    (same,) = await front.submit(CHAT, {"messages": HI})
    assert spec.prompt_token_ids == same.prompt_token_ids


async def test_nulls_mean_defaults(front: Front) -> None:
    names = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "logit_bias",
        "max_tokens",
        "stream",
        "logprobs",
        "echo",
        "best_of",
        "stream_options",
        "model",
        "user",
    )
    (spec,) = await front.submit(COMPLETIONS, {"prompt": "hi", **dict.fromkeys(names)})
    assert spec.sampling.max_tokens == 16


async def test_a_short_rest_shortens_the_default_only(front: Front) -> None:
    (spec,) = await front.submit(COMPLETIONS, {"prompt": [5] * 505})
    assert spec.sampling.max_tokens == 7
    await front.error(COMPLETIONS, {"prompt": [5] * 505, "max_tokens": 8})


async def test_prompts_and_answers_are_grouped(front: Front) -> None:
    specs = await front.submit(COMPLETIONS, {"prompt": [[7, 8], [9]], "n": 2, "seed": 11})
    assert [len(spec.prompt_token_ids) for spec in specs] == [2, 0, 1, 0], "the first of a group carries the prompt"
    assert [spec.group_size for spec in specs] == [2] * 4
    assert len({spec.group_id for spec in specs}) == 2
    assert len({spec.key.request_id for spec in specs}) == 4
    assert [spec.sampling.seed for spec in specs] == [11, derive_seed(11, 1)] * 2
    assert len({derive_seed(11, number) for number in range(16)}) == 16


async def test_a_request_without_a_seed_gets_one(front: Front) -> None:
    seeds = {(await front.submit(COMPLETIONS, {"prompt": "hi"}))[0].sampling.seed for _ in range(4)}
    assert len(seeds) == 4


async def test_extensions_reach_the_cluster(front: Front) -> None:
    body = {
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "stop_token_ids": [9],
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": "END",
        "logit_bias": {"7": -100, "8": 1.5},
        "logprobs": 3,
        "echo": True,
    }
    (spec,) = await front.submit(COMPLETIONS, {"prompt": "hi", **body})
    sampling = spec.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0, 0.1, 1.2)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.ignore_eos, sampling.stop) == (
        (9,),
        2,
        True,
        ("END",),
    )
    assert sampling.logit_bias == ((7, -100.0), (8, 1.5))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, 3)
    (spec,) = await front.submit(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2})
    assert (spec.sampling.logprobs, spec.sampling.prompt_logprobs) == (2, None)


BOTH = pytest.mark.parametrize(
    ("path", "base"), [(COMPLETIONS, {"prompt": "hi", "n": 2}), (CHAT, {"messages": HI, "n": 2})]
)


@BOTH
async def test_an_objective_for_the_wait_reaches_the_cluster_with_every_answer(
    front: Front, path: str, base: dict[str, Any]
) -> None:
    specs = await front.submit(path, {**base, "wait_objective_s": 2.5})
    specs += await front.submit(path, {**base, "wait_objective_s": None})
    metas = [request_meta(key_from_proto(head.key), head) for head in front.port.heads]
    for told in (specs, metas):
        assert [request.wait_objective_s for request in told] == [2.5, 2.5, 0.0, 0.0]


@BOTH
async def test_a_priority_reaches_the_cluster_with_every_answer(front: Front, path: str, base: dict[str, Any]) -> None:
    specs = await front.submit(path, {**base, "priority": -(2**63)})
    specs += await front.submit(path, {**base, "priority": None})
    metas = [request_meta(key_from_proto(head.key), head) for head in front.port.heads]
    for told in (specs, metas):
        assert [request.priority for request in told] == [-(2**63), -(2**63), 0, 0]


def test_an_option_of_a_body_is_one_of_a_call_over_grpc_and_of_the_cluster() -> None:
    """Only the name connects them."""
    options = SamplingOptions.model_fields.keys()
    assert options <= {field.name for field in inf.GenerateRequest.DESCRIPTOR.fields}
    assert options <= {field.name for field in dataclasses.fields(SamplingParams)}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {
        field.name for field in pb.SamplingParams.DESCRIPTOR.fields
    }


# ---- models without everything


async def test_a_model_without_a_tokenizer_takes_token_ids_only() -> None:
    front = Front(tokenizer=None, template=None)
    assert (await front.error(COMPLETIONS, {"prompt": "hi"}))["param"] == "prompt"
    assert (await front.error(COMPLETIONS, {"prompt": [5], "stop": "x"}))["param"] == "stop"
    assert "tokenizer" in (await front.error(CHAT, {"messages": HI}))["message"]
    assert await front.submit(COMPLETIONS, {"prompt": [5]})


async def test_a_model_without_a_template_has_no_chat() -> None:
    front = Front(template=None)
    assert "--chat-template" in (await front.error(CHAT, {"messages": HI}))["message"]


async def test_before_the_model_is_known_nothing_is_accepted() -> None:
    front = Front(info=None)
    answer = await front.client.post(COMPLETIONS, json={"prompt": "hi"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "unavailable"


async def test_a_full_gateway_says_when_to_come_back(front: Front) -> None:
    held = [
        front.ledger.open(await plan_completion(front.model, parse_completion({"prompt": "a", "n": 16})))
        for _ in range(4)
    ]
    answer = await front.client.post(COMPLETIONS, json={"prompt": "hi"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    front.ledger.close(held[0])
    await front.submit(COMPLETIONS, {"prompt": "hi"})


# ---- the description


def fields_of(schema: dict[str, Any]) -> set[str]:
    return set(schema["properties"])


async def test_the_description_names_every_field_that_is_read(front: Front) -> None:
    document = (await front.client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    completion, chat = schemas["CompletionRequest"], schemas["ChatRequest"]
    assert fields_of(completion) == set(CompletionRequest.model_fields)
    assert fields_of(chat) == set(ChatRequest.model_fields)
    assert completion["properties"]["n"] == {
        "type": ["integer", "null"],
        "minimum": 1,
        "maximum": 16,
        "default": 1,
        "description": "Number of answers to each prompt.",
    }
    assert (completion["required"], chat["required"]) == (["prompt"], ["messages"])
    references = {value for value in json.dumps(document).split('"') if value.startswith("#/")}
    assert {reference.rpartition("/")[2] for reference in references} <= set(schemas)


async def test_the_shipped_clients_types_fit_the_description(front: Front) -> None:
    """Our description of the reply includes the fields that openai's types require."""
    document = (await front.client.get("/openapi.json")).json()
    required = {name for name, field in ChatCompletion.model_fields.items() if field.is_required()}
    assert required <= fields_of(document["components"]["schemas"]["ChatCompletion"])
