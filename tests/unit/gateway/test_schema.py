"""The HTTP API under schemathesis, from its own description: no 5xx, no hang, and answers match the description."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from alignedserve.gateway.http.request_schemas import request_schemas
from support.fake_cluster import FakeCluster
from support.gateway import running_gateway
from support.machines import FACTOR

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
REFUSED = {"checks": {"negative_data_rejection": {"expected-statuses": ["4xx"]}}}  # 413: a body may be drawn too large
ANSWER_WITHIN_S = 20.0
EXAMPLES = round(10 * FACTOR)  # an operation; `make test-all` draws three times as many
TAME = {
    "model": "tiny",
    "prompt": [5, 6, 7],
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "max_output_tokens": 4,
    "input": "hi",
    "max_completion_tokens": 4,
    "min_tokens": 0,
    "timeout_s": 5,
    "wait_objective_s": 2.5,
    "priority": -3,
    "logit_bias": {"7": 1},
    "stop_token_ids": [9],
    "seed": 1,
    "tools": None,
    "tool_choice": None,
    "text": None,
    "reasoning": None,
    "thinking": None,
    "output_config": None,
    "include": None,
    "system": "hi",
    "response_format": None,
    "add_generation_prompt": None,
    "continue_final_message": None,
}


def serve(url: Future[str], stop: Future[None], folder: str) -> None:
    """A gateway in front of a counting cluster, in its own event loop."""

    async def run() -> None:
        async with FakeCluster() as cluster, running_gateway(cluster, batches={"folder": folder}) as gateway:
            url.set_result(gateway.url)
            await asyncio.wrap_future(stop)

    try:
        asyncio.run(run())
    except BaseException as error:
        if url.done():
            raise
        url.set_exception(error)


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    url: Future[str] = Future()
    stop: Future[None] = Future()
    folder = str(tmp_path_factory.mktemp("batches") / "store")
    thread = threading.Thread(target=serve, args=(url, stop, folder))
    thread.start()
    try:
        config = schemathesis.Config.from_dict(REFUSED)
        yield schemathesis.openapi.from_url(f"{url.result(30.0)}/openapi.json", config=config)
    finally:
        stop.set_result(None)
        thread.join(30.0)
    assert not thread.is_alive()


def ask_everything(operation: Any, mode: GenerationMode) -> Counter[int]:
    """Call one operation EXAMPLES times, check each answer, and count the statuses."""
    seen: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), tame=st.booleans())
    def ask(case: Any, tame: bool) -> None:
        if tame and isinstance(case.body, dict):  # the requested fields keep valid values; all others are arbitrary
            case.body |= {name: value for name, value in TAME.items() if name in case.body}
        answer = case.call(timeout=ANSWER_WITHIN_S)
        seen[answer.status_code] += 1
        case.validate_response(
            answer, checks=[*CHECKS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS
        )

    ask()
    return seen


def test_whatever_is_asked_is_answered_as_described(description: Any) -> None:
    operations = [found.ok() for found in description.get_all_operations()]
    asked = {operation.label: ask_everything(operation, GenerationMode.POSITIVE) for operation in operations}

    paths = description.raw_schema["paths"].values()
    assert len(asked) == sum(len(item.keys() & {"get", "post", "delete"}) for item in paths)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert asked[f"POST {path}"][200] > 0
        assert asked[f"POST {path}"][400] > 0


def test_bodies_that_are_not_as_described_are_refused(description: Any) -> None:
    for found in description.get_all_operations():
        operation = found.ok()
        if operation.body:
            # A caller without an admin key is refused before its body is read.
            refusal = 403 if "403" in operation.definition.raw["responses"] else 400
            assert ask_everything(operation, GenerationMode.NEGATIVE)[refusal] > 0, operation.label


def test_an_optional_field_may_be_null_whatever_its_kind() -> None:
    """As its description says: a list of choices that lacks null would exclude it."""
    bodies = request_schemas()
    for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest"):
        for field, schema in bodies[name]["properties"].items():
            if field not in bodies[name].get("required", []):
                kinds = schema.get("anyOf", [schema])
                assert any("null" in kind.get("type", ()) and "enum" not in kind for kind in kinds), (name, field)
    (choice, null) = bodies["ChatRequest"]["properties"]["reasoning_effort"]["anyOf"]
    assert (choice["enum"][0], null) == ("none", {"type": "null"})
