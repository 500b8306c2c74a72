"""No policy learns the length of an answer, neither from declared nor from received values."""

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
from alignedserve.scheduler.ranks.base import Placement
from alignedserve.scheduler.systems import SYSTEMS, Topology, policy_class, resolve, scheduler_class
from alignedserve.simulator.colocated import simulate_colocated
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.workload import Arrival, Workload
from alignedserve.testing.linear_cost import LinearStepCost
from support.small_cell import Request, Shape, SmallCell

PROMPT, ANSWER = 200, 37  # tokens: no other number in the cell equals an answer's length, no KV equals both together
TELLING = ("output", "answer", "final", "remaining")
LONGEST = 300, 60  # the longest request's prompt and answer: colocated systems are told a rounded sum of both
BLOCKS = 30  # fewer than an answer's tokens, so that no block id equals them
CONTRACTS = [BatchPolicy, InstanceScheduler, Placement]
COLOCATED = [name for name, system in SYSTEMS.items() if system.topology is Topology.COLOCATED]
BLIND = [name for name, system in SYSTEMS.items() if system.topology is Topology.DISAGGREGATED and name != "oracle"]


def declared(contract: type) -> Iterator[tuple[str, object]]:
    """Name and type of every argument of every method, and of the fields of dataclasses among them."""
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
    assert any(name == "kv_tokens" or name == "tokens" for name, _ in found)  # the check does see the arguments
    assert not [name for name, _ in found if any(word in name for word in TELLING)]


def test_only_an_oracle_is_told() -> None:
    assert OraclePolicy.NEEDS_OUTPUT_LENGTHS
    assert not any(policy_class(resolve(name)).NEEDS_OUTPUT_LENGTHS for name in BLIND)


def reachable(objects: list[object]) -> Iterator[object]:
    """Everything reachable from these objects, except classes, modules and functions."""
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
    assert PROMPT in lengths  # the check does see the arguments
    assert not lengths & {ANSWER, PROMPT + ANSWER}


def _spy(policy: BatchPolicy, method: str, received: list[object]) -> None:
    call = getattr(policy, method)

    def spied(*arguments: object) -> object:
        received.extend(arguments)
        return call(*arguments)

    setattr(policy, method, spied)


def replay(name: str, answers: list[int], *, leap: bool) -> None:
    """One request for each answer, all at once, on one instance with room for two; and a last one, the longest."""
    longest_prompt, longest_answer = LONGEST
    requests = [(PROMPT, answer) for answer in answers] + [(longest_prompt, longest_answer)]
    arrivals = tuple(Arrival(f"r{number}", 0.0, *request) for number, request in enumerate(requests))
    hardware = Hardware(block_size=16, kv_tokens=16 * BLOCKS, kv_bytes_per_token=1, pool_tokens=0)
    result = simulate_colocated(Workload(arrivals), resolve(name), {}, hardware, LinearStepCost(), leap=leap)
    assert [len(one.token_s) for one in result.requests] == [*answers, longest_answer]


def numbers(objects: list[object]) -> set[int]:
    return {value for value in reachable(objects) if isinstance(value, int)}


@pytest.mark.parametrize("leap", [False, True])
@pytest.mark.parametrize("name", COLOCATED)
def test_nothing_that_a_colocated_system_receives_holds_the_length_of_an_answer(
    name: str, leap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of each call, and the system's own state once every request has arrived."""
    received: set[int] = set()
    kept: set[int] = set()

    def note(scheduler: InstanceScheduler, method: str, arguments: tuple[object, ...]) -> None:
        received.update(numbers(list(arguments)))
        if method == "plan" and not kept:
            kept.update(numbers([vars(scheduler)]))

    _listen(name, note, monkeypatch)
    replay(name, [ANSWER] * 7, leap=leap)
    for lengths in received, kept:
        assert {PROMPT, LONGEST[0]} <= lengths  # the check does see arguments and state
        assert not lengths & {ANSWER, PROMPT + ANSWER, LONGEST[1], sum(LONGEST)}


@pytest.mark.parametrize("name", COLOCATED)
def test_a_colocated_system_decides_the_same_until_an_answer_ends_whatever_its_length(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []

    def note(scheduler: InstanceScheduler, method: str, arguments: tuple[object, ...]) -> None:
        if method != "__init__":
            told.append((method, repr(arguments)))

    _listen(name, note, monkeypatch)
    replay(name, [ANSWER] * 7, leap=False)
    one = list(told)
    until = next(at for at, (method, said) in enumerate(one) if method == "done" and not said.endswith("[])"))
    assert until > ANSWER
    told.clear()
    replay(name, [ANSWER + 11] * 7, leap=False)
    assert told[:until] == one[:until]
    assert told != one


def _listen(
    name: str, note: typing.Callable[[InstanceScheduler, str, tuple[object, ...]], None], patch: pytest.MonkeyPatch
) -> None:
    """Call `note` before each method of the system's contract."""
    kind = scheduler_class(resolve(name))
    for method, _ in inspect.getmembers(InstanceScheduler, inspect.isfunction):
        call = getattr(kind, method)

        def listened(self: InstanceScheduler, *arguments: object, method=method, call=call) -> object:  # type: ignore[no-untyped-def]
            note(self, method, arguments)
            return call(self, *arguments)

        patch.setattr(kind, method, listened)
