"""Groups of ranks in processes of their own, which compute a model together over one store."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from alignedserve.engine.batch import ForwardItem
from alignedserve.engine.decoding import DecodeItem, DecodeStep
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.graphs.decode import GraphCounts, GraphDecode
from alignedserve.engine.graphs.staged import StagedGraphDecode
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.group import Groups
from alignedserve.engine.parallel.load import load_part
from alignedserve.engine.parallel.processes import runner_of
from alignedserve.engine.parallel.rendezvous import FileValues
from alignedserve.engine.parallel.runner import DrivenRunner, held_by
from alignedserve.engine.runner import allocate_cache
from alignedserve.engine.sampling.sampler import SampledToken, SampleRow
from alignedserve.errors import RankLostError
from alignedserve.ranks.degrees import Degrees, RankPlace
from alignedserve.request import SamplingParams
from support.graph_twins import TwinDevice

_multiprocessing: Any = torch.multiprocessing

BLOCK_SIZE = 4
BLOCKS = 64
CHUNK = 7
SILENT_S = 60.0


def generated_by_ranks(
    degrees: Degrees, folders: Sequence[Path], prompts: list[list[int]], count: int, work: Path, *, own: bool = False
) -> dict[str, list[list[int]]]:
    """Greedy answers of `count` tokens to each prompt, by model. `own`: each rank has a store of its own."""
    _run(degrees.ranks, _generating, degrees, list(folders), prompts, count, work, own)
    answers: dict[str, list[list[int]]] = json.loads((work / "answers.json").read_text())
    return answers


def captured_by_ranks(
    degrees: Degrees,
    folder: Path,
    prompts: list[list[int]],
    count: int,
    work: Path,
    sizes: tuple[int, ...] = (2, 4),
    failing: tuple[int, str] | None = None,
) -> tuple[list[list[int]], GraphCounts]:
    """The same of one model, decoded from captured passes of these sizes, and what the engine has counted.

    Without several stages each pass is launched before the last tokens are known. `failing`: a rank that fails at
    "memory" or "capture".
    """
    _run(degrees.ranks, _capturing, degrees, folder, prompts, count, work, sizes, failing)
    answers, counts = json.loads((work / "answers.json").read_text())
    return answers, GraphCounts(**counts)


def without_a_rank(degrees: Degrees, folder: Path, work: Path) -> str:
    """What rank 0 of 2 says of a pass in which rank 1 has left."""
    _run(2, _leaving, degrees, folder, work)
    return (work / "said").read_text()


def _run(ranks: int, what: Callable[..., None], *arguments: Any) -> None:
    """In processes that are forked from one with the imports, which take seconds."""
    multiprocessing.set_forkserver_preload([__name__])
    _multiprocessing.start_processes(what, arguments, nprocs=ranks, start_method="forkserver")


def _generating(
    rank: int, degrees: Degrees, folders: list[Path], prompts: list[list[int]], count: int, work: Path, own: bool
) -> None:
    answers = {}
    for folder in folders:
        runner = _runner(RankPlace(rank, degrees), folder, work, own)
        if rank:
            runner.follow()
        else:
            answers[folder.name] = _generate(runner, prompts, count, degrees.experts, own)
            runner.end()
    if rank == 0:
        (work / "answers.json").write_text(json.dumps(answers))


def _capturing(
    rank: int,
    degrees: Degrees,
    folder: Path,
    prompts: list[list[int]],
    count: int,
    work: Path,
    sizes: tuple[int, ...],
    failing: tuple[int, str] | None,
) -> None:
    def new_graph_device(_runner: DrivenRunner) -> TwinDevice:
        if failing == (rank, "memory"):
            raise RuntimeError("no memory")
        device = TwinDevice(records=degrees.tensor == 1)  # sums in host memory cannot be recorded
        if failing == (rank, "capture"):
            device.capture = _no_capture  # type: ignore[method-assign]
        return device

    DrivenRunner.new_graph_device = new_graph_device  # type: ignore[method-assign,assignment]
    runner = _runner(RankPlace(rank, degrees), folder, work, own=True)
    if rank:
        runner.follow()
        return
    answers: list[list[int]] = []
    blocks = [list(range(1 + number, BLOCKS, len(prompts))) for number in range(len(prompts))]
    device, progress = runner.new_graph_device(), lambda done, of: None
    engine: GraphDecode | StagedGraphDecode
    if degrees.stages > 1:
        engine = StagedGraphDecode(runner, device, sizes, progress)
    else:
        engine = GraphDecode(runner, EagerDecode(runner, overlaps=False), device, sizes, progress)
    engine.warm_up()
    assert engine.sizes == (() if failing else sizes)
    assert (engine.graph_memory_bytes > engine._buffers.nbytes) == (not failing)
    for prompt, own in zip(prompts, blocks, strict=True):
        answers.append([int(runner.forward([ForwardItem(prompt, 0, own)])[-1].argmax())])
    sampling = SamplingParams(temperature=0.0, max_tokens=count)
    rows = [SampleRow(sampling, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def launch(lane: Sequence[int], number: int, *, known: bool) -> DecodeStep:
        """Pass `number` of these requests, whose last tokens the host knows, or only the device."""
        items = [
            DecodeItem(
                rows[at],
                answers[at][-1] if known else None,
                row,
                len(prompts[at]) + number,
                blocks[at],
                number + 1,
            )
            for row, at in enumerate(lane)
        ]
        return engine.launch(items)

    passes = _in_lanes if degrees.stages > 1 else _in_a_chain
    passes(launch, answers, count, runner.depth)
    runner.end()
    (work / "answers.json").write_text(json.dumps([answers, asdict(engine.counts)]))


def _no_capture(run: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("cannot be captured")


def _in_a_chain(launch: Callable[..., DecodeStep], answers: list[list[int]], count: int, _depth: int) -> None:
    """Each pass is launched before the last one's tokens are known."""
    every = range(len(answers))
    step = launch(every, 0, known=True)
    for number in range(1, count - 1):
        after = launch(every, number, known=False)
        _take(step, answers)
        step = after
    _take(step, answers)


def _in_lanes(launch: Callable[..., DecodeStep], answers: list[list[int]], count: int, depth: int) -> None:
    """A pass for each lane is under way."""
    lanes = [range(number, len(answers), depth) for number in range(depth)]
    for number in range(count - 1):
        begun = [launch(lane, number, known=True) for lane in lanes]
        for lane, step in zip(lanes, begun, strict=True):
            _take(step, [answers[at] for at in lane])


def _take(step: DecodeStep, answers: Sequence[list[int]]) -> None:
    for answer, result in zip(answers, step.tokens(), strict=True):
        assert isinstance(result, SampledToken), result
        answer.append(result.token_id)


def _leaving(rank: int, degrees: Degrees, folder: Path, work: Path) -> None:
    runner = _runner(RankPlace(rank, degrees), folder, work)
    if rank:
        return
    try:
        runner.forward([ForwardItem([5, 6], 0, [0])])
    except RankLostError as error:
        (work / "said").write_text(f"{error.message}; {runner.device_fault() is error}")


def _runner(place: RankPlace, folder: Path, work: Path, own: bool = False) -> DrivenRunner:
    torch.set_num_threads(1)
    values = FileValues(str(work / f"{folder.name}.store"), place.degrees.ranks, SILENT_S)
    groups = Groups.connected(values, place, SILENT_S, SILENT_S)
    info = inspect_model(folder.name, folder, "float32", "cpu")
    file, shape = work / f"{folder.name}.cache", (BLOCKS, *info.geometry(BLOCK_SIZE).block_shape)
    if place.rank == 0:
        np.memmap(file, np.float32, "w+", shape=shape)
    loaded = load_part(info, place, groups, "cpu")
    groups.waits.meet()  # the file is there
    if own:
        each = BLOCKS // place.degrees.experts
        cache = allocate_cache(info.geometry(BLOCK_SIZE), each, "cpu", part=held_by(loaded, place))
        return runner_of(loaded, cache, place, groups, "torch", own=True)
    memory = np.memmap(file, np.float32, "r+", shape=shape)
    return runner_of(loaded, torch.from_numpy(memory), place, groups, "torch", own=False)


def _blocks_of(requests: int, ranks: int) -> list[list[int]]:
    """Blocks of each request, out of order. Request `i` has those of rank `i` modulo the number of ranks."""
    each = BLOCKS // ranks
    found = []
    for number in range(requests):
        rank, beside = number % ranks, -(-requests // ranks)
        found.append(list(range(rank * each + number // ranks, (rank + 1) * each, beside))[: each // beside][::-1])
    return found


def _generate(runner: DrivenRunner, prompts: list[list[int]], count: int, experts: int, apart: bool) -> list[list[int]]:
    """Prompts in chunks, then rows of one token together, in blocks out of order.

    Where ranks share experts and one store, a request goes from one to the next with each pass. In a prompt's passes
    the others have no work.
    """
    blocks = _blocks_of(len(prompts), experts if apart else 1)

    def rank_of(number: int, step: int) -> int:
        return (number if apart else number + step) % experts

    answers: list[list[int]] = []
    for prompt, own in zip(prompts, blocks, strict=True):
        for begin in range(0, len(prompt), CHUNK):
            chunk = prompt[begin : begin + CHUNK]
            written: list[int] = []
            last = begin + len(chunk) == len(prompt)
            rank = rank_of(len(answers), begin // CHUNK)
            logits = runner.forward([ForwardItem(chunk, begin, own, "last" if last else "none", rank)], written.append)
            assert written == list(range(runner.loaded.info.layers))
        answers.append([int(logits[-1].argmax())])
    lanes = [list(range(number, len(prompts), runner.depth)) for number in range(runner.depth)]
    while len(answers[0]) < count:
        begun = [
            runner.begin(
                [
                    ForwardItem(
                        [answers[at][-1]],
                        len(prompts[at]) + len(answers[at]) - 1,
                        blocks[at],
                        "last",
                        rank_of(at, len(answers[at])),
                    )
                    for at in lane
                ]
            )
            for lane in lanes
        ]
        for lane, wait in zip(lanes, begun, strict=True):
            for at, row in zip(lane, wait(), strict=True):
                answers[at].append(int(row.argmax()))
    return answers
