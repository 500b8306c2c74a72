"""No policy learns how long an answer will be: neither by what it is declared to receive, nor by what it receives."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import typing
from collections.abc import Iterator

import pytest

from alignedserve.config import SchedulerConfig
from alignedserve.scheduler.colocated.base import InstanceScheduler
from alignedserve.scheduler.policies.base import BatchPolicy
from alignedserve.scheduler.policies.oracle import OraclePolicy
from alignedserve.scheduler.systems import SYSTEMS, Topology, policy_class, resolve
from alignedserve.testing.small_cell import Request, Shape, SmallCell

PROMPT, ANSWER = 200, 37  # tokens: nothing in the cell is as many as an answer, no KV as long as both together
TELLING = ("output", "answer", "final", "remaining")
CONTRACTS = [BatchPolicy, InstanceScheduler]
BLIND = [name for name, system in SYSTEMS.items() if system.topology is Topology.DISAGGREGATED and name != "oracle"]


def declared(contract: type) -> Iterator[tuple[str, object]]:
    """Name and type of every argument of every method, and of the fields of those that are dataclasses."""
    to_visit: list[tuple[str, object]] = []
    for _, method in inspect.getmembers(contract, inspect.isfunction):
        to_visit += typing.get_type_hints(method).items()
    seen: set[object] = set()
    while to_visit:
        name, kind = to_visit.pop()
        yield name, kind
        to_visit += [(name, part) for part in typing.get_args(kind)]
        if dataclasses.is_dataclass(kind) and kind not in seen:
            seen.add(kind)
            to_visit += typing.get_type_hints(kind).items()


@pytest.mark.parametrize("contract", CONTRACTS)
def test_no_argument_is_called_after_the_length_of_an_answer(contract: type) -> None:
    found = list(declared(contract))
    assert any(name == "kv_tokens" or name == "tokens" for name, _ in found)  # it does look into what is passed
    assert not [name for name, _ in found if any(word in name for word in TELLING)]


def test_only_an_oracle_is_told() -> None:
    assert OraclePolicy.NEEDS_OUTPUT_LENGTHS
    assert not any(policy_class(resolve(name)).NEEDS_OUTPUT_LENGTHS for name in BLIND)


def reachable(objects: list[object]) -> Iterator[object]:
    """Everything that these hold, but for classes, modules and functions."""
    seen: set[int] = set()
    to_visit = list(objects)
    while to_visit:
        found = to_visit.pop()
        if id(found) in seen or isinstance(found, type) or inspect.isroutine(found) or inspect.ismodule(found):
            continue
        seen.add(id(found))
        yield found
        to_visit += gc.get_referents(found)


@pytest.mark.parametrize("name", BLIND)
def test_nothing_that_a_policy_receives_holds_the_length_of_the_answer(name: str) -> None:
    roomy = dict.fromkeys(("pool_blocks", "prefill_cache", "decode_cache", "batch_buffer", "requests_buffer"), 2000)
    cell = SmallCell(Shape(scheduler=SchedulerConfig(policy=name, min_batch_requests=2, leaf_tokens=4), **roomy))
    policy = cell.core.policy
    received: list[object] = []
    for method, _ in inspect.getmembers(BatchPolicy, inspect.isfunction):
        if not method.startswith("_"):
            _spy(policy, method, received)
    for number in range(8):
        cell.submit([Request(f"r{number}", prompt=PROMPT, answer=ANSWER, most=100, group_id="")])
    cell.run()
    assert all(request.tokens == ANSWER for request in cell.requests.values())
    assert received
    lengths = {value for value in reachable(received) if isinstance(value, int)}
    assert PROMPT in lengths  # it does look into what is passed
    assert not lengths & {ANSWER, PROMPT + ANSWER}


def _spy(policy: BatchPolicy, method: str, received: list[object]) -> None:
    call = getattr(policy, method)

    def spied(*arguments: object) -> object:
        received.extend(arguments)
        return call(*arguments)

    setattr(policy, method, spied)
