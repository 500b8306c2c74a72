"""Norms, rotary embeddings and gated activations of a loaded model, compiled by torch if that is faster.

Each is a few small kernels in transformers, and one kernel when compiled. The arguments of a pass of the model are
recorded. The compiled function is compared with the eager one on them, timed as it would be replayed from a graph, and
kept only if it is faster. Intermediate values are rounded as the eager kernels round them. A model in fp32 is not
changed: its greedy tokens are exactly those of transformers.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config as inductor

logger = logging.getLogger(__name__)

_WORTH_IT = 0.95
_ROTARY = "apply_rotary_pos_emb"
_GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")

Function = Callable[..., Any]
Compile = Callable[[Function], Function]
Seconds = Callable[[Callable[[], object]], float]


@dataclass(slots=True)
class Part:
    """A function that a pass calls many times, always on tensors of the same shapes except for the number of rows."""

    name: str
    eager: Function
    install: Callable[[Function], None]
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # arguments of the first call

    def note(self, *args: Any, **kwargs: Any) -> Any:
        """The eager function, which records its arguments."""
        if self.call is None:
            self.call = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args), kwargs
        return self.eager(*args, **kwargs)


def compile_for_decode(function: Function) -> Function:
    """Compile with inductor, for any number of rows; every intermediate value is rounded to its own dtype."""
    inductor.compile_threads = 1  # no process pool for a few functions
    compiled: Function = torch.compile(function, options={"emulate_precision_casts": True})
    return compiled


def fuse(
    model: torch.nn.Module, run_pass: Callable[[], object], seconds: Seconds, compiler: Compile = compile_for_decode
) -> list[str]:
    """Compile the parts that are faster compiled; returns their names.

    `run_pass` computes a pass of the model with a typical number of rows; `seconds` measures a call on the device.
    """
    if next(model.parameters()).dtype == torch.float32:
        return []
    parts = [*_norms(model), *_rotaries(model), *_gated(model)]
    for part in parts:
        part.install(part.note)
    try:
        run_pass()
    finally:
        for part in parts:
            part.install(part.eager)
    kept = []
    for part in parts:
        try:
            replaced = part.call is not None and _replace(part, part.call, seconds, compiler)
        except Exception as error:  # no compiler, or an unsupported function: slower, but correct
            reason = " ".join(str(error).split())[:200]
            logger.warning("%s is not compiled: compilation fails (%s: %s)", part.name, type(error).__name__, reason)
            part.install(part.eager)
            continue
        if replaced:
            kept.append(part.name)
    return kept


def _replace(part: Part, call: tuple[tuple[Any, ...], dict[str, Any]], seconds: Seconds, compiler: Compile) -> bool:
    args, kwargs = call
    compiled = compiler(_own_code(part.eager))
    if not _alike(part.eager(*args, **kwargs), compiled(*args, **kwargs)):
        logger.warning("%s is not compiled: the compiled code gives different values", part.name)
        return False
    eager_s, compiled_s = (seconds(lambda run=run: run(*args, **kwargs)) for run in (part.eager, compiled))  # type: ignore[misc]
    logger.info("%s takes %.2f us, compiled %.2f us", part.name, 1e6 * eager_s, 1e6 * compiled_s)
    if compiled_s > _WORTH_IT * eager_s:
        return False
    part.install(compiled)
    return True


def _own_code(function: Function) -> Function:
    """A copy with its own code object: torch caches compiled code by that, and parts differ in their shapes."""
    if not isinstance(function, types.FunctionType):
        return function
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _alike(expected: Any, found: Any) -> bool:
    """Whether all values agree to two units in the last place (for small values: of a hundredth of the largest)."""
    if isinstance(expected, torch.Tensor):
        expected, found = (expected,), (found,)
    for ours, theirs in zip(found, expected, strict=True):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
        eps = 2 * torch.finfo(theirs.dtype).eps
        atol = eps * 0.01 * float(theirs.abs().max())
        if not torch.allclose(ours.float(), theirs.float(), rtol=eps, atol=atol):
            return False
    return True


def _norms(model: torch.nn.Module) -> list[Part]:
    """RMS norms, one part for each class and width; torch's own LayerNorm is already one kernel."""
    groups: dict[tuple[Any, torch.Size], list[torch.nn.Module]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor):
            groups.setdefault((type(module), weight.shape), []).append(module)
    return [
        Part(f"{kind.__name__} of {shape[-1]}", kind.forward, _method_installer(modules))
        for (kind, shape), modules in groups.items()
    ]


def _gated(model: torch.nn.Module) -> list[Part]:
    """The product of an activated gate and its input, in MLPs that consist of it and three matrices only."""
    modules: list[Any] = [module for module in model.modules() if all(hasattr(module, name) for name in _GATED)]
    if not modules:
        return []
    act = modules[0].act_fn

    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = act(gate) * up
        return product

    name = f"the gate of {type(modules[0]).__name__}"
    return [Part(name, gated, _gate_installer([module for module in modules if _is_plain(module, gated)]))]


def _is_plain(module: Any, gated: Function) -> bool:
    """Whether the module's own forward gives exactly what `_gate_installer` would replace it with."""
    weight = module.gate_proj.weight
    if weight.is_meta or type(module).__name__.endswith("Experts"):
        return False
    states = torch.linspace(-1.0, 1.0, 3 * weight.shape[1], device=weight.device).to(weight.dtype).view(1, 3, -1)
    expected = module(states)
    return isinstance(expected, torch.Tensor) and torch.equal(
        module.down_proj(gated(module.gate_proj(states), module.up_proj(states))), expected
    )


def _rotaries(model: torch.nn.Module) -> list[Part]:
    """The function in the model's own file that rotates queries and keys."""
    file = sys.modules[type(model).__module__]
    eager = getattr(file, _ROTARY, None)
    eager = getattr(eager, "eager", eager)  # another model of this process may have replaced it
    if not isinstance(eager, types.FunctionType):
        return []

    def install(function: Function) -> None:
        def rotary(*args: Any, **kwargs: Any) -> Any:
            return (eager if args[0].dtype == torch.float32 else function)(*args, **kwargs)

        rotary.eager = eager  # type: ignore[attr-defined]
        setattr(file, _ROTARY, eager if function is eager else rotary)

    return [Part(_ROTARY, eager, install)]


def _method_installer(modules: Sequence[torch.nn.Module]) -> Callable[[Function], None]:
    def install(function: Function) -> None:
        for module in modules:
            module.forward = types.MethodType(function, module)

    return install


def _gate_installer(modules: Sequence[Any]) -> Callable[[Function], None]:
    def forward_of(module: Any, function: Function) -> Function:
        def forward(states: torch.Tensor) -> Any:
            return module.down_proj(function(module.gate_proj(states), module.up_proj(states)))

        return forward

    def install(function: Function) -> None:
        for module in modules:
            module.forward = forward_of(module, function)

    return install
