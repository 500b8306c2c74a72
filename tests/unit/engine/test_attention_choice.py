"""The choice of an attention backend: by name, by each backend's limits, by trial, and by time."""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from alignedserve.config import EngineConfig
from alignedserve.engine.backends import choice
from alignedserve.engine.backends.base import AttentionNeeds, AttentionOptions
from alignedserve.engine.backends.choice import (
    AUTO,
    BackendCandidate,
    Choice,
    choose,
    measure,
    open_backend,
    pick,
    refusals,
)
from alignedserve.engine.backends.composite import CompositeBackend
from alignedserve.engine.backends.registry import BACKENDS
from alignedserve.engine.backends.torch_backend import TorchBackend
from alignedserve.engine.backends.trial import Trial
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.parallel.backends import agreed
from alignedserve.engine.parallel.group import RankGroup
from alignedserve.engine.parallel.rendezvous import FileValues
from alignedserve.errors import ConfigError, UnsupportedModelError
from alignedserve.registry import Registry
from alignedserve.testing.attention import paged_case
from alignedserve.testing.models import make_model
from alignedserve.transfer.paired.addresses import GroupStore

NEEDS = AttentionNeeds("cpu", "float32", heads=4, kv_heads=2, head_dim=16, block_size=16)
HERE = "alignedserve.engine.backends"


def store(blocks: int = 80) -> torch.Tensor:
    return torch.zeros(blocks, 2, 2, 2, 16, 16)


class Wrong(TorchBackend):
    """Ignores the window and the sinks."""

    def attend(self, layer: int, query: Any, key: Any, value: Any, options: AttentionOptions) -> torch.Tensor:
        return super().attend(layer, query, key, value, replace(options, sliding_window=None, sinks=None))


class Unmerged(TorchBackend):
    """Attends to what requests share as if it were all."""

    def _attend_shared(self, *args: Any) -> torch.Tensor:
        return super()._attend_shared(*args) * 1.1


class Broken(TorchBackend):
    def begin(self, batch: Any) -> None:
        raise RuntimeError("no kernel image is available")


class Refusing(TorchBackend):
    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        return f"blocks have {needs.block_size} tokens"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[Any]:
    entries = {
        "torch": f"{HERE}.torch_backend:TorchBackend",
        "absent": "alignedserve_no_such_package.backend:Backend",
        **{cls.__name__.lower(): f"tests_attention_choice:{cls.__name__}" for cls in (Wrong, Broken, Refusing)},
    }
    registry: Registry[Any] = Registry("attention backend", entries)
    own = {cls.__name__.lower(): cls for cls in (Wrong, Broken, Refusing)}
    looked_up = registry.get
    monkeypatch.setattr(registry, "get", lambda name: own.get(name) or looked_up(name))
    monkeypatch.setattr(choice, "BACKENDS", registry)
    monkeypatch.setattr(choice, "_chosen", {})
    return registry


def test_every_backend_can_be_named_in_the_configuration() -> None:
    (key,) = (field for field in fields(EngineConfig) if field.name == "attention")
    assert set(key.metadata["choices"]) == {AUTO, *BACKENDS.names()}


def test_on_a_cpu_torch_serves_without_being_timed() -> None:
    backend = open_backend(AUTO, store(2), NEEDS)
    assert type(backend) is TorchBackend


@pytest.mark.parametrize("name", sorted(set(BACKENDS.names()) - {"torch"}))
def test_a_named_backend_that_needs_a_gpu_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.attention: {name} cannot serve this model here: .+"):
        open_backend(name, store(2), NEEDS)


def test_a_refusal_knows_the_stores_own_block_size(registry: Registry[Any]) -> None:
    with pytest.raises(ConfigError, match="blocks have 16 tokens"):
        open_backend("refusing", store(2), replace(NEEDS, block_size=4))


def test_a_backend_whose_package_is_absent_says_so(registry: Registry[Any]) -> None:
    reasons = {candidate.name: candidate.refusal for candidate in refusals(NEEDS)}
    assert reasons["absent"] == "the package alignedserve_no_such_package is not installed"
    assert reasons["torch"] is None


@pytest.mark.parametrize("options", [{}, {"sliding_window": True}, {"sinks": True}, {"softcap": True}], ids=str)
def test_a_trial_finds_no_fault_in_the_reference(options: dict[str, bool]) -> None:
    with Trial(store(), replace(NEEDS, **options)) as trial:
        assert trial.fault(TorchBackend) is None


@pytest.mark.parametrize("option", ["sliding_window", "sinks"])
def test_a_backend_that_ignores_an_option_is_found_out(option: str, registry: Registry[Any]) -> None:
    with Trial(store(), replace(NEEDS, **{option: True})) as trial:
        assert "its result has an error of" in str(measure("wrong", trial, time=False).refusal)
    with Trial(store(), NEEDS) as trial:
        assert measure("wrong", trial, time=False).refusal is None


def test_a_backend_that_is_wrong_over_shared_blocks_is_found_out() -> None:
    with Trial(store(), NEEDS) as trial:
        assert "over blocks that requests share its result has an error of" in str(trial.fault(Unmerged))


def test_a_backend_that_fails_is_left_out_with_its_reason(registry: Registry[Any]) -> None:
    with Trial(store(), NEEDS) as trial:
        assert measure("broken", trial).refusal == "it fails here: no kernel image is available"


def test_a_trial_fits_a_small_store_and_leaves_it_empty() -> None:
    cache = store(9)
    with Trial(cache, NEEDS) as trial:
        assert trial.fault(TorchBackend) is None
        assert bool(cache.any())
    assert not bool(cache.any())


def test_the_fastest_of_each_kind_of_pass_is_taken() -> None:
    taken = pick(
        [
            BackendCandidate("a", None, decode_us=10.0, prefill_us=900.0),
            BackendCandidate("b", None, decode_us=20.0, prefill_us=500.0),
            BackendCandidate("c", "it copies the store"),
        ]
    )
    assert (taken.decode, taken.prefill) == ("a", "b")
    assert taken.describe().startswith("attention backend: a for decode, b for prefill (")
    with pytest.raises(UnsupportedModelError, match="c: it copies the store"):
        pick([BackendCandidate("c", "it copies the store")])


def test_of_two_backends_each_serves_the_passes_that_it_was_taken_for() -> None:
    case = paged_case([(1, 20), (6, 3)], heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32)
    alone = paged_case([(1, 20)], heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32)
    options = AttentionOptions(0.25)
    for one, decode, prefill in ((case, Broken, TorchBackend), (alone, TorchBackend, Broken)):
        backend = CompositeBackend(decode(one.cache), prefill(one.cache))
        backend.begin(one.batch)
        found = backend.attend(1, one.query, one.key, one.value, options)
        torch.testing.assert_close(found.double(), one.expected(options)[0], rtol=0.0, atol=1e-5)
        assert backend.captures is decode.captures


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("llama", (False, False, False)),
        ("mistral", (True, False, False)),
        ("gemma2", (True, True, False)),
        ("gpt_oss", (True, False, True)),
    ],
)
def test_what_a_model_needs_is_found_while_it_is_probed(
    kind: str, found: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    needs = load_model(inspect_model("m", make_model(kind, tmp_path, seed=0), "auto", "cpu"), "cpu").needs
    assert (needs.sliding_window, needs.softcap, needs.sinks) == found
    assert (needs.heads, needs.kv_heads, needs.head_dim, needs.dtype, needs.device) == (4, 2, 16, "float32", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_backends_are_tried_and_timed() -> None:
    needs = AttentionNeeds("cuda", "bfloat16", heads=32, kv_heads=8, head_dim=128, block_size=16)
    cache = torch.zeros(6000, 2, 8, 2, 16, 128, dtype=torch.bfloat16, device="cuda")
    chosen = choose(AUTO, cache, needs)
    taken = {candidate.name: candidate for candidate in chosen.candidates}
    assert taken["triton"].refusal is None
    assert taken["torch"].refusal is None
    assert taken[chosen.decode].decode_us == min(c.decode_us for c in chosen.candidates if c.decode_us)
    assert not bool(cache.any())


class Quick(TorchBackend):
    """What ranks choose between, in the test below."""


class Slow(TorchBackend):
    """See Quick."""


RANK_TIMES = {  # by rank: microseconds of a layer's decode and prefill
    0: {"torch": (9.0, 90.0), "quick": (1.0, 80.0), "slow": (4.0, 10.0)},
    1: {"torch": (9.0, 90.0), "quick": (8.0, 20.0), "slow": (5.0, 30.0)},
    2: {"torch": (9.0, 90.0), "quick": (2.0, 20.0), "slow": (3.0, 95.0)},
}


def choices_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: dict[int, dict[str, str]]
) -> dict[int, Choice | Exception]:
    """What each of three ranks chooses, in threads. `faults`: by rank and backend."""
    own = {"torch": TorchBackend, "quick": Quick, "slow": Slow}
    registry: Registry[Any] = Registry("attention backend", dict.fromkeys(own, f"{HERE}.torch_backend:TorchBackend"))
    monkeypatch.setattr(registry, "get", own.__getitem__)
    monkeypatch.setattr(choice, "BACKENDS", registry)
    here = threading.local()

    def measured(name: str, trial: Trial) -> BackendCandidate:
        if (fault := faults.get(here.rank, {}).get(name)) is not None:
            return BackendCandidate(name, fault)
        return BackendCandidate(name, None, *RANK_TIMES[here.rank][name])

    monkeypatch.setattr(choice, "measure", measured)
    found: dict[int, Choice | Exception] = {}

    def choose_in(rank: int) -> None:
        here.rank = rank
        values = FileValues(str(tmp_path / "ranks"), 3, 30.0)
        group = RankGroup(GroupStore(values, "waits", 30.0), rank, 3, 30.0)
        try:
            found[rank] = choose(AUTO, store(2), replace(NEEDS, device="cuda"), partial(agreed, group))
        except UnsupportedModelError as error:
            found[rank] = error

    threads = [threading.Thread(target=choose_in, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return found


def test_ranks_choose_the_backend_whose_slowest_rank_is_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, rank 0 would take "quick" for decode and "slow" for prefill."""
    found = choices_of_ranks(tmp_path, monkeypatch, {})
    assert len(found) == 3
    for chosen in found.values():
        assert isinstance(chosen, Choice)
        assert (chosen.decode, chosen.prefill) == ("slow", "quick")
        assert chosen.candidates == next(iter(found.values())).candidates  # type: ignore[union-attr]


def test_a_backend_that_one_rank_has_not_proved_is_used_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {1: {"slow": "its result has an error of 2"}, 2: {"quick": "it fails here"}}
    found = choices_of_ranks(tmp_path, monkeypatch, faults)
    assert [(each.decode, each.prefill) for each in found.values() if isinstance(each, Choice)] == [("torch",) * 2] * 3
    said = [{each.name: each.refusal for each in found[rank].candidates} for rank in range(3)]  # type: ignore[union-attr]
    assert said[0] == {"torch": None, "quick": "it is not used in rank 2", "slow": "it is not used in rank 1"}
    assert said[1]["slow"] == "its result has an error of 2"


def test_ranks_that_have_no_backend_in_common_all_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {0: {"torch": "it fails here"}, 1: {"slow": "it fails here"}, 2: {"quick": "it fails here"}}
    found = choices_of_ranks(tmp_path, monkeypatch, faults)
    assert [type(found[rank]) for rank in range(3)] == [UnsupportedModelError] * 3
    assert "slow: it is not used in rank 1" in str(found[0])


def test_on_a_cpu_ranks_have_nothing_to_agree_on() -> None:
    def never(_own: Any) -> Any:
        raise AssertionError("there is one backend")

    assert choose(AUTO, store(2), NEEDS, never).decode == "torch"
