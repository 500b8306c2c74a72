"""Requests that begin alike hold the same blocks of a decode cache, and decode to the same tokens as alone."""

from __future__ import annotations

import queue
import random
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config import DecodeConfig
from alignedserve.control.convert import spec_to_proto
from alignedserve.decode_worker.chains import chain_of
from alignedserve.decode_worker.held import Outcome
from alignedserve.decode_worker.loop import DecodeLoop
from alignedserve.engine.backends.torch_backend import TorchBackend
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey, RequestSpec, SamplingParams
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.testing.models import make_model
from alignedserve.transfer.completion import Completion
from support.scripted_cell import ScriptedCell
from support.scripted_decode import Script

BLOCK_SIZE, BLOCKS, VOCAB, REQUESTS, SHARED = 8, 60, 400, 5, 4


def stored_requests(salts: Sequence[bytes]) -> list[pb.StoredRequest]:
    draw = random.Random(3)
    common = [draw.randrange(2, VOCAB) for _ in range(SHARED * BLOCK_SIZE)]
    found = []
    for number, salt in enumerate(salts):
        prompt = common + [draw.randrange(2, VOCAB) for _ in range(1 + 3 * number)]
        spec = RequestSpec(RequestKey(str(number)), prompt, SamplingParams(temperature=0.0, max_tokens=12))
        spec.output_token_ids, spec.cache_salt = [5], salt
        found.append(pb.StoredRequest(spec=spec_to_proto(spec), kv_tokens=len(prompt), store_id="pool"))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_model("llama", tmp_path_factory.mktemp("model"), seed=2, vocab_size=VOCAB, eos_token_id=1)
    return load_model(inspect_model("test", Path(folder), "float32", "cpu"), "cpu")


def serve(model: LoadedModel, requests: list[pb.StoredRequest], *, caches: bool) -> tuple[list[list[int]], list[int]]:
    """Each request's tokens, and how many blocks it found in the cache when it joined."""
    runner = ModelRunner(model, allocate_cache(model.info.geometry(BLOCK_SIZE), BLOCKS, "cpu"))
    allocator = BlockAllocator(BLOCKS, "cache")
    scheduler = IterationScheduler(DecodeConfig(), allocator, BLOCK_SIZE)
    outcomes = queue.SimpleQueue[Outcome]()
    resident_blocks: list[int] = []

    def pull(stored: pb.StoredRequest, block_ids: Sequence[int], resident: int, *, settled: bool = False) -> Completion:
        """Compute what a copy would bring."""
        resident_blocks.append(resident)
        start = resident * BLOCK_SIZE
        runner.forward([ForwardItem(list(stored.spec.prompt_token_ids)[start:], start, list(block_ids), "none")])
        copied = Completion("hand-over")
        copied.finish()
        return copied

    chains = partial(chain_of, block_size=BLOCK_SIZE, caches=caches)
    loop = DecodeLoop("decode-0", EagerDecode(runner), scheduler, None, pull, outcomes.put, chain_of=chains)
    loop.offer(BufferKind.BATCH, 1, requests)
    loop.start()
    answers: list[list[int]] = [[] for _ in requests]
    ended = 0
    try:
        while ended < len(requests):
            outcome = outcomes.get(timeout=30.0)
            assert outcome.fatal is None
            for _, event in outcome.events:
                answers[int(event.key.request_id)] += event.token_ids
                ended += bool(event.finish_reason)
    finally:
        loop.stop()
    scheduler.check_integrity()
    assert scheduler.holds_nothing()
    assert allocator.free_blocks == BLOCKS
    return answers, resident_blocks


def test_requests_that_begin_alike_share_blocks_and_attention(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_passes = []
    attend_shared = TorchBackend._attend_shared

    def counted(self: TorchBackend, layer: int, *args: object) -> object:
        shared_passes.append(layer)
        return attend_shared(self, layer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchBackend, "least_saved_bytes", 0.0)
    monkeypatch.setattr(TorchBackend, "_attend_shared", counted)
    salts = [b""] * (REQUESTS - 1) + [b"another tenant's"]
    alone, resident = serve(model, stored_requests(salts), caches=False)
    assert not any(resident)
    assert not shared_passes
    together, resident = serve(model, stored_requests(salts), caches=True)
    assert sorted(resident) == [0, 0] + [SHARED] * (REQUESTS - 2)  # the first of each salt finds nothing
    assert len(shared_passes) >= 8 * model.info.layers
    assert together == alone


def test_without_a_prefix_cache_only_answers_to_one_prompt_share() -> None:
    one, other, third = stored_requests([b"", b"", b"s"])
    assert chain_of(one, BLOCK_SIZE, caches=False) is None
    chains = [chain_of(each, BLOCK_SIZE, caches=True) for each in (one, other, third)]
    assert all(chain is not None and chain.blocks == SHARED for chain in chains)
    assert chains[0] == chains[1] != chains[2]
    one.spec.group_id = other.spec.group_id = "g"
    one.spec.group_size = other.spec.group_size = 2
    assert chain_of(one, BLOCK_SIZE, caches=False) == chain_of(other, BLOCK_SIZE, caches=False) is not None


def test_none_waits_for_the_grammar_of_a_request_that_begins_alike() -> None:
    cell = ScriptedCell(16, 4, None, DecodeConfig(join_iterations=1), caches=True)
    first, second = (cell.add(Script(number, [11] * 8 + [number + 20], 5)) for number in range(2))
    compiling: Future[Any] = Future()
    loop: Any = cell.loop
    loop._compiling = lambda stored: compiling if stored.spec.key.request_id == "0" else None
    cell.offer(first)
    cell.offer(second)
    cell.turn()
    assert [pull.stored.spec.key.request_id for pull in cell.pulls] == ["0"]  # the other waits for its copy
    cell.end_pull()
    cell.turn()
    assert [pull.stored.spec.key.request_id for pull in cell.pulls] == ["1"]
    assert cell.shared_blocks == 2
    cell.end_pull()
    for _ in range(4):
        cell.turn()
    assert len(first.tokens) == 1
    assert len(second.tokens) > 1
    compiling.set_result(None)
    cell.settle()
    cell.check_ended()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_answer_of_a_cancelled_request_is_cached(*, overlap: bool) -> None:
    cell = ScriptedCell(16, 4, overlap, DecodeConfig(join_iterations=1), caches=True)
    client = cell.add(Script(1, [11] * 9, 30))
    cell.offer(client)
    cell.turn()
    cell.end_pull()
    while len(client.tokens) < 6:
        cell.turn()
    cell.cancel(client)
    cell.turn()
    (ending,) = cell.endings
    assert ending.first_block == 2
    assert ending.tokens == [*client.script.prompt, *client.tokens][:12]
    cell.settle()
    cell.check_ended()
