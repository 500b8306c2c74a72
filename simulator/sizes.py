"""The capacities of the stores of a simulated cell."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.config import Config
from alignedserve.simulator.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Sizes:
    """Capacities in blocks. Configured values take priority; otherwise the hardware's shares divide the memory."""

    pool: int
    decode_cache: int
    prefill_cache: int
    batch_buffer: int
    requests_buffer: int

    @classmethod
    def plan(cls, config: Config, hardware: Hardware) -> Sizes:
        memory = hardware.kv_tokens // hardware.block_size
        at_prefill = (hardware.prefill_kv_tokens or hardware.kv_tokens) // hardware.block_size
        batch = requests = 0
        if config.cluster.prefetch:
            batch = config.prefill.batch_buffer_blocks or int(hardware.batch_buffer_share * at_prefill)
            requests = config.prefill.requests_buffer_blocks or int(hardware.requests_buffer_share * at_prefill)
        return cls(
            pool=hardware.pool_tokens // hardware.block_size,
            decode_cache=config.decode.cache_blocks or memory,
            prefill_cache=config.prefill.cache_blocks or max(0, at_prefill - batch - requests),
            batch_buffer=batch,
            requests_buffer=requests,
        )
