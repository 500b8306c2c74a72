"""Chooses the attention backend for a model here: by name, or the fastest that can serve it.

On a CPU it is `torch`. On a GPU each backend that can serve the model computes one batch, which is compared with fp32,
and is then timed on shapes of this model. A backend that is wrong, or copies the store, is skipped with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
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
"""Backends that are slower by design, for comparisons: used when named, never by `auto`."""


@dataclass(frozen=True, slots=True)
class BackendCandidate:
    """A backend, why it cannot serve (None: it can), and microseconds of one layer by kind of pass, if timed."""

    name: str
    refusal: str | None
    decode_us: float | None = None
    prefill_us: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The names of the backends for decode and prefill, and all candidates."""

    decode: str
    prefill: str
    candidates: tuple[BackendCandidate, ...]

    def describe(self) -> str:
        taken = self.decode if self.decode == self.prefill else f"{self.decode} for decode, {self.prefill} for prefill"
        timed = [c for c in self.candidates if c.decode_us is not None]
        figures = ", ".join(f"{c.name} {c.decode_us:.0f} and {c.prefill_us:.0f} µs" for c in timed)
        return f"attention backend: {taken}" + (f" (a layer's decode and prefill: {figures})" if figures else "")


def refusals(needs: AttentionNeeds) -> list[BackendCandidate]:
    """Every backend, with the reason if it cannot serve `needs` here. It runs none of them."""
    return [BackendCandidate(name, _refusal(name, needs)) for name in BACKENDS.names()]


Agree = Callable[[Sequence[BackendCandidate]], Sequence[BackendCandidate]]
"""Makes what this process has measured what all ranks of its instance have."""


def open_backend(name: str, cache: torch.Tensor, needs: AttentionNeeds, agree: Agree | None = None) -> AttentionBackend:
    """The backend called `name`, or for `auto` the fastest, over `cache`, a store that is not in use yet.

    A choice is reused in this process for the same needs, unless ranks have to `agree` each time. Raises ConfigError
    for a name that is unknown or cannot serve `needs`, and UnsupportedModelError for a backend with wrong results or
    that copies the store.
    """
    needs = replace(needs, block_size=cache.shape[4])
    choice = _chosen.get((name, needs)) if agree is None else None
    if choice is None:
        choice = _chosen[name, needs] = choose(name, cache, needs, agree)
        log.info("%s", choice.describe())
    decode = BACKENDS.get(choice.decode)(cache)
    if choice.decode == choice.prefill:
        return decode
    return CompositeBackend(decode, BACKENDS.get(choice.prefill)(cache))


_chosen: dict[tuple[str, AttentionNeeds], Choice] = {}


def choose(name: str, cache: torch.Tensor, needs: AttentionNeeds, agree: Agree | None = None) -> Choice:
    """See `open_backend`. `agree` is called where several backends are timed."""
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
                log.warning("attention backend %s is not used: %s", measured.name, measured.refusal)
    measured_here = tuple(candidates.values())
    return pick(measured_here if agree is None else agree(measured_here))


def measure(name: str, trial: Trial, *, time: bool = True) -> BackendCandidate:
    """Test `name`, and time it if its results are right; otherwise the refusal names the fault."""
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
        return BackendCandidate(name, "it needs more memory beside the store than is free")
    except Exception as error:  # any error of a library or compiler that was not built for this device
        return BackendCandidate(name, f"it fails here: {' '.join(str(error).split())[:200]}")
    return BackendCandidate(name, None, decode_us, prefill_us)


def pick(candidates: Iterable[BackendCandidate]) -> Choice:
    """The fastest timed backend for each kind of pass. Raises UnsupportedModelError if none was timed."""
    candidates = tuple(candidates)
    decode = [(c.decode_us, c.name) for c in candidates if c.decode_us is not None]
    prefill = [(c.prefill_us, c.name) for c in candidates if c.prefill_us is not None]
    if not decode or not prefill:
        reasons = "; ".join(f"{c.name}: {c.refusal}" for c in candidates)
        raise UnsupportedModelError(f"no attention backend serves this model here ({reasons})")
    return Choice(min(decode)[1], min(prefill)[1], candidates)


def _require(name: str, cache: torch.Tensor, needs: AttentionNeeds) -> None:
    BACKENDS.get(name)  # raises for an unknown name
    reason = _refusal(name, needs)
    if reason is not None:
        raise ConfigError(f"engine.attention: {name} cannot serve this model here: {reason}")
    if needs.device == "cpu":
        return
    with Trial(cache, needs) as trial:
        wrong = measure(name, trial, time=False).refusal
    if wrong is not None:
        raise UnsupportedModelError(f"engine.attention: {name} cannot serve this model here: {wrong}")


def _refusal(name: str, needs: AttentionNeeds) -> str | None:
    try:
        return BACKENDS.get(name).refusal(needs)
    except ImportError as error:
        return f"the package {error.name} is not installed"
