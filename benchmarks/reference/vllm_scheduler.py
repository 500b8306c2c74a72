"""Policy `vllm` against vLLM's own scheduler: both plan the passes of the real runs, over the same kernel times.

    python benchmarks/reference/vllm_scheduler.py --data ../shared/data

Needs a vLLM 0.19 that can be imported; it runs no model and needs no GPU. Its `AsyncScheduler` and block pool are those
of the engine, behind our contract of a colocated scheduler. Every pass must have the same prompt tokens and decodes,
and every token of every request the same time, to the last bit.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.colocated.base import (
    InstanceScheduler,
    MixedPlan,
    MixedRequest,
    Options,
    PlannedChunk,
    PlannedDecode,
)
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.systems import System, Topology, resolve
from alignedserve.simulator.report.results import RunResult

sys.path.insert(0, str(Path(__file__).parents[1]))
import groundtruth

TOKEN = 7  # of every answer; no prompt has it
LONGEST = 1 << 20  # prompts differ from their first token on


def configuration(options: Options, blocks: int, block_size: int) -> SimpleNamespace:
    """What the scheduler reads of a `VllmConfig`, for one device and a model of text."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            scheduler_reserve_full_isl=options["reserve_full_isl"],
            max_num_scheduled_tokens=None,
            long_prefill_token_threshold=0,
            enable_chunked_prefill=True,
            policy="fcfs",
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks=blocks,
            block_size=block_size,
            enable_prefix_caching=options["prefix_caching"],
            mamba_cache_mode="none",
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, max_model_len=LONGEST, enable_return_routed_experts=False
        ),
        observability_config=SimpleNamespace(kv_cache_metrics=False, enable_mfu_metrics=False),
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
    )


class VllmOwn(InstanceScheduler):
    """vLLM's `AsyncScheduler`, with one block more than our allocator: its null block."""

    OPTIONS: ClassVar[Options] = dict(resolve("vllm").options)

    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        blocks = allocator.available_blocks + 1
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        self._scheduler = AsyncScheduler(
            configuration(options, blocks, block_size),
            KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
            SimpleNamespace(should_advance=lambda request: False),
            block_size,
            mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda model: False),
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._planned: deque[Any] = deque()
        self._added = 0

    @property
    def depth(self) -> int:
        return 2

    def add(self, request: MixedRequest) -> None:
        self._added += 1
        prompt = [self._added * LONGEST + place for place in range(request.prompt_tokens)]
        most = request.max_total_tokens - request.prompt_tokens
        sampling = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0)
        name = request.key.request_id
        self._scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))

    def cancel(self, key: RequestKey) -> bool:
        raise AccountingError(f"{key} was cancelled, but the replayed runs cancel no request")

    def plan(self, now_s: float) -> MixedPlan:
        if not self._scheduler.has_requests():
            return MixedPlan()
        output = self._scheduler.schedule()
        plan = self._as_plan(output.num_scheduled_tokens, output.preempted_req_ids or ())
        if plan:
            self._planned.append(output)
        else:
            self._scheduler.update_from_output(output, ModelRunnerOutput([], {}))
        return plan

    def _as_plan(self, tokens: Mapping[str, int], preempted: Collection[str]) -> MixedPlan:
        chunks: list[PlannedChunk] = []
        decodes: list[PlannedDecode] = []
        for name, count in tokens.items():
            request = self._scheduler.requests[name]
            before, last = request.num_computed_tokens - count, not request.is_prefill_chunk
            known = request.num_tokens + request.num_output_placeholders - last
            if before == known - 1 >= request.num_prompt_tokens:
                decodes.append(PlannedDecode(RequestKey(name), before))
            else:
                chunks.append(PlannedChunk(RequestKey(name), before, count, last))
        return MixedPlan(tuple(chunks), tuple(decodes), tuple(map(RequestKey, preempted)))

    def done(self, plan: MixedPlan, finished: Collection[RequestKey]) -> None:
        output = self._planned.popleft()
        names, sampling = list(output.num_scheduled_tokens), {key.request_id for key in plan.sampling()}
        tokens = [[TOKEN] if name in sampling else [] for name in names]
        places = {name: place for place, name in enumerate(names)}
        self._scheduler.update_from_output(output, ModelRunnerOutput(names, places, tokens))

    def load(self) -> tuple[int, int]:
        return len(self._scheduler.requests), 0

    def check_integrity(self) -> None:
        """vLLM checks its own."""


def differences(ours: RunResult, own: RunResult) -> dict[str, int]:
    """How many passes and requests differ."""
    columns = ("start_s", "seconds", "decodes", "prefill_tokens", "shortest", "longest", "total")
    passes = [list(zip(*(getattr(one.steps, name) for name in columns), strict=True)) for one in (ours, own)]
    return {
        "passes": sum(a != b for a, b in zip(*passes, strict=False)) + abs(len(passes[0]) - len(passes[1])),
        "requests": sum(a.token_s != b.token_s for a, b in zip(ours.requests, own.requests, strict=True)),
        "preemptions": sum(a.preemptions != b.preemptions for a, b in zip(ours.requests, own.requests, strict=True)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=groundtruth.data_folder(), help="folder of the data files")
    data = parser.parse_args().data
    own_system = System(
        "vllm-own", Topology.COLOCATED, f"{__name__}:VllmOwn", "vLLM's own scheduler", {}, dict(VllmOwn.OPTIONS)
    )
    wrong = 0
    for run in groundtruth.RUNS:
        ours = groundtruth.simulated(data, run, leap=False)
        own = groundtruth.simulated(data, run, system=own_system, leap=False)
        found = differences(ours, own)
        told = ", ".join(f"{count} {what}" for what, count in found.items())
        print(
            f"{run}: {len(ours.steps.start_s)} passes, {ours.counters['preemptions']:.0f} preemptions; differ: {told}"
        )
        wrong += sum(found.values())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
