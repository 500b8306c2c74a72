"""One instance's GPU memory at start: free memory, plan, and use by the model. Does nothing on a CPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from alignedserve.batch_size import LEAST
from alignedserve.config import Config
from alignedserve.device_memory import DECODE, DeviceMemory, RanksHere, RoleMemory, advice, fixed_parts
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import Sampler, SampleRow
from alignedserve.errors import ResourceError
from alignedserve.memory import describe_bytes
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import devices_in
from alignedserve.request import SamplingParams
from alignedserve.sizing import StorePlan

logger = logging.getLogger(__name__)

TRIAL_BYTES = 16 << 30

# The common settings that take the most memory.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, seed=1)


class Meter(Protocol):
    """Measures the used memory of a device, in bytes."""

    def look(self) -> tuple[int, int]:
        """Free and total memory of the whole device."""

    def allocated(self) -> int:
        """Memory in tensors of this process."""

    def peak(self) -> int:
        """The most that was allocated since the last call of `allocated`."""

    def trim(self) -> None:
        """Return cached, unused memory to the device."""


class CudaMeter:
    """A `Meter` of torch's allocator on the first of the devices. `look`: of the one with the least free memory."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = [torch.device(device) for device in devices]
        self._device = self._devices[0]

    def look(self) -> tuple[int, int]:
        free, total = min(torch.cuda.mem_get_info(device) for device in self._devices)
        return int(free), int(total)

    def allocated(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def trim(self) -> None:
        torch.cuda.empty_cache()


class InstanceMemory:
    """`gauges` are sent with every heartbeat, so that the supervisor can divide the device before weights are loaded.

    `device`: as in `RoleSettings`. `meter`: by default torch's on a GPU; None on a CPU, where this class does nothing.
    """

    def __init__(self, role: str, instance: str, device: str, config: Config, meter: Meter | None = None) -> None:
        self.gauges: dict[str, float] = {}
        self._role, self._instance, self._device, self._config = role, instance, device, config
        self._meter = meter or (CudaMeter(devices_in(device)) if device.startswith("cuda") else None)
        self._memory: DeviceMemory | None = None
        self._planned: RoleMemory | None = None

    def look(self) -> None:
        """Record the device's memory, before anything is loaded on it."""
        if self._meter is None:
            return
        free, total = self._meter.look()
        self._memory = DeviceMemory(self._instance, self._device, total, free)
        self.gauges = self._memory.gauges()

    def expect(self, info: ModelInfo) -> None:
        """Estimate the model's memory, before stores are planned for the cluster."""
        if self._memory is not None:
            budget = self._memory.budget(self._config, sharers=1)
            ranks = RanksHere.of(self._config, self._role, self._device)
            self._planned = RoleMemory(budget, fixed_parts(self._config, info, self._role, ranks))

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an out-of-memory error of the device into a ResourceError that lists its use and what to change."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._ran_out(error) from error
        except ResourceError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise self._ran_out(error.__cause__) from error
            raise

    def check(
        self,
        loaded: LoadedModel,
        plan: StorePlan,
        make_runner: Callable[[torch.Tensor], ModelRunner],
        weight_bytes: int | None = None,
    ) -> None:
        """Compare the plan with the loaded weights and a pass of the largest size, before stores are created.

        `make_runner`: creates a runner over a small store of the plan's geometry. `weight_bytes`: of several ranks, on
        the fullest device; what their passes take is not measured. Raises ResourceError if the blocks do not fit.
        """
        if self._meter is None or self._memory is None or self._role not in plan.devices:
            return
        planned = self._planned = plan.devices[self._role]
        if weight_bytes is None:
            weights = self._meter.allocated()
            cache = plan.decode_cache if self._role == DECODE else plan.prefill_cache
            config = replace(self._config, decode=self._config.decode.running(plan.max_running))
            activations = self._largest_pass(config, loaded, plan.block_size, cache, make_runner)
        else:
            weights, activations = weight_bytes, planned.parts["activations"]
        found = {"weights": weights, "activations": activations}
        for name, size in found.items():
            log = logger.warning if size > planned.parts[name] else logger.info
            log("%s take %s, %s were planned", name, describe_bytes(size), describe_bytes(planned.parts[name]))
        self._planned = planned.measured(**found)
        self._planned.require_room(self._role, self._memory)

    def note_graphs(self, size: float) -> None:
        """Record the memory of graphs and their buffers, once they are captured."""
        if self._planned is None or "CUDA graphs" not in self._planned.parts or not size:
            return
        planned = self._planned.parts["CUDA graphs"]
        log = logger.warning if size > planned else logger.info
        log("CUDA graphs take %s, %s were planned", describe_bytes(int(size)), describe_bytes(planned))

    def _largest_pass(
        self,
        config: Config,
        loaded: LoadedModel,
        block_size: int,
        cache_blocks: int,
        make_runner: Callable[[torch.Tensor], ModelRunner],
    ) -> int:
        """Bytes beside weights and store in the largest passes of this role, including sampling.

        The store is half of the planned cache, up to TRIAL_BYTES: attention backends may be tested and timed in it.
        """
        assert self._meter is not None
        geometry = loaded.info.geometry(block_size)
        passes = largest_passes(config, self._role, loaded.info.max_positions, block_size)
        blocks = 1 + max(block for items in passes for item in items for block in item.block_ids)
        blocks = max(blocks, min(cache_blocks // 2, TRIAL_BYTES // geometry.block_bytes))
        store = allocate_cache(geometry, blocks, loaded.device)
        runner, sampler = make_runner(store), Sampler()
        before = self._meter.allocated()
        for items in passes:
            rows = [SampleRow(_SAMPLING, [0], []) for _ in items]
            sampler.sample(runner.forward(items), rows)
        taken = self._meter.peak() - before
        del runner, store
        self._meter.trim()
        return taken

    def _ran_out(self, error: BaseException) -> ResourceError:
        reason = str(error).split(". ")[0]
        if self._memory is None or self._planned is None:
            return ResourceError(f"{self._instance} on {self._device} ran out of memory during its start: {reason}")
        return ResourceError(
            f"{self._instance} on {self._device} ran out of memory during its start ({reason}); the plan was "
            f"{self._planned.describe()} GiB, and {describe_bytes(self._memory.free_bytes)} of "
            f"{describe_bytes(self._memory.total_bytes)} were free before" + advice([self._role])
        )


def largest_passes(config: Config, role: str, max_positions: int, block_size: int) -> list[list[ForwardItem]]:
    """Passes of the largest number of tokens: for a prefill instance in few prompts, and in as many as are sampled.

    Decode rows all read block 0, and what they write there is discarded.
    """
    if role == DECODE:
        return [[ForwardItem([0], block_size - 1, [0]) for _ in range(config.decode.max_running or LEAST)]]
    budget = config.prefill.pass_tokens
    prompts = min(config.prefill.max_requests, max(1, budget // 2))
    few = -(-budget // max_positions)
    return [_prompts(budget, count, block_size) for count in sorted({few, max(few, prompts)})]


def _prompts(tokens: int, count: int, block_size: int) -> list[ForwardItem]:
    """`tokens` in `count` prompts of nearly equal lengths, each in its own blocks."""
    items: list[ForwardItem] = []
    used = 0
    for number in range(count):
        length = tokens * (number + 1) // count - tokens * number // count
        blocks = -(-length // block_size)
        items.append(ForwardItem([0] * length, 0, list(range(used, used + blocks))))
        used += blocks
    return items
