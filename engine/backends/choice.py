"""Which attention backend serves a model here: by name, or the fastest of those that can.

On a CPU it is `torch`. On a GPU each backend that refuses nothing computes one batch, which is compared with fp32, and
is then timed on shapes of this model: one that is wrong, or that copies the store, is left out with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from alignedserve.engine.backends.base import AttentionBackend, AttentionNeeds
from alignedserve.engine.backends.composite import CompositeBackend
from alignedserve.engine.backends.registry import BACKENDS
from alignedserve.engine.backends.trial import DECODE, PREFILL, SHAPES, Trial
from alignedserve.errors import ConfigError, UnsupportedModelError

log = logging.getLogger(__name__)

AUTO = "auto"
BY_NAME_ONLY = ("triton_no_split",)
"""Backends that are slower by design, for comparisons: taken when named, never by `auto`."""


@dataclass(frozen=True, slots=True)
class BackendCandidate:
    """A backend, why it cannot serve (None: it can), and the microseconds of one layer by kind of pass, if timed."""

    name: str
    refusal: str | None
    decode_us: float | None = None
    prefill_us: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The names of the backends that decode and prefill, and all that were looked at."""

    decode: str
    prefill: str
    candidates: tuple[BackendCandidate, ...]

    def describe(self) -> str:
        taken = self.decode if self.decode == self.prefill else f"{self.decode} to decode, {self.prefill} to prefill"
        timed = [c for c in self.candidates if c.decode_us is not None]
        figures = ", ".join(f"{c.name} {c.decode_us:.0f} and {c.prefill_us:.0f} µs" for c in timed)
        return f"attention by {taken}" + (f" (a layer's decode and prefill: {figures})" if figures else "")


def refusals(needs: AttentionNeeds) -> list[BackendCandidate]:
    """Every backend, and why it cannot serve `needs` here. Nothing is run."""
    return [BackendCandidate(name, _refusal(name, needs)) for name in BACKENDS.names()]


def open_backend(name: str, cache: torch.Tensor, needs: AttentionNeeds) -> AttentionBackend:
    """The backend called `name`, or for `auto` the fastest, over `cache`, a store that nobody uses yet.

    What was chosen once in this process for the same needs is taken again. Raises ConfigError for a name that is
    unknown or refuses `needs`, UnsupportedModelError for one that computes something else or copies the store.
    """
    needs = replace(needs, block_size=cache.shape[4])
    choice = _chosen.get((name, needs))
    if choice is None:
        choice = _chosen[name, needs] = choose(name, cache, needs)
        log.info("%s", choice.describe())
    decode = BACKENDS.get(choice.decode)(cache)
    if choice.decode == choice.prefill:
        return decode
    return CompositeBackend(decode, BACKENDS.get(choice.prefill)(cache))


_chosen: dict[tuple[str, AttentionNeeds], Choice] = {}


def choose(name: str, cache: torch.Tensor, needs: AttentionNeeds) -> Choice:
    """See `open_backend`."""
    if name != AUTO:
        _require(name, cache, needs)
        return Choice(name, name, (BackendCandidate(name, None),))
    candidates = {candidate.name: candidate for candidate in refusals(needs)}
    if needs.device == "cpu":
        return Choice("torch", "torch", tuple(candidates.values()))
    with Trial(cache, needs) as trial:
        for candidate in list(candidates.values()):
            if candidate.refusal is not None or candidate.name in BY_NAME_ONLY:
                continue
            measured = candidates[candidate.name] = measure(candidate.name, trial)
            if measured.refusal is not None:
                log.warning("attention backend %s is left out: %s", measured.name, measured.refusal)
    return pick(candidates.values())


def measure(name: str, trial: Trial, *, time: bool = True) -> BackendCandidate:
    """Try `name`, and time it if it is right; else the refusal says what was wrong."""
    backend = BACKENDS.get(name)
    try:
        fault = trial.fault(backend)
        if fault is not None or not time:
            return BackendCandidate(name, fault)
        decode_us, prefill_us = (
            sum(trial.microseconds(backend, shape) for shape in SHAPES if shape.kind == kind)
            for kind in (DECODE, PREFILL)
        )
    except torch.OutOfMemoryError:
        return BackendCandidate(name, "it wants more memory beside the store than there is")
    except Exception as error:  # whatever a library or a compiler raises that was not made for this device
        return BackendCandidate(name, f"it fails here: {' '.join(str(error).split())[:200]}")
    return BackendCandidate(name, None, decode_us, prefill_us)


def pick(candidates: Iterable[BackendCandidate]) -> Choice:
    """The fastest for each kind of pass of those that were timed. Raises UnsupportedModelError where none was."""
    candidates = tuple(candidates)
    decode = [(c.decode_us, c.name) for c in candidates if c.decode_us is not None]
    prefill = [(c.prefill_us, c.name) for c in candidates if c.prefill_us is not None]
    if not decode or not prefill:
        reasons = "; ".join(f"{c.name}: {c.refusal}" for c in candidates)
        raise UnsupportedModelError(f"no attention backend serves this model here ({reasons})")
    return Choice(min(decode)[1], min(prefill)[1], candidates)


def _require(name: str, cache: torch.Tensor, needs: AttentionNeeds) -> None:
    BACKENDS.get(name)  # raises for a name that there is not
    reason = _refusal(name, needs)
    if reason is not None:
        raise ConfigError(f"engine.attention: {name} cannot serve this here: {reason}")
    if needs.device == "cpu":
        return
    with Trial(cache, needs) as trial:
        wrong = measure(name, trial, time=False).refusal
    if wrong is not None:
        raise UnsupportedModelError(f"engine.attention: {name} cannot serve this here: {wrong}")


def _refusal(name: str, needs: AttentionNeeds) -> str | None:
    try:
        return BACKENDS.get(name).refusal(needs)
    except ImportError as error:
        return f"the package {error.name} is not installed"
