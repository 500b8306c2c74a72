"""Groups of ranks in processes of their own, which compute a model together over one store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing

from alignedserve.engine.batch import ForwardItem
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.group import Groups
from alignedserve.engine.parallel.load import load_part
from alignedserve.engine.parallel.processes import runner_of
from alignedserve.engine.parallel.runner import DrivenRunner
from alignedserve.errors import RankLostError
from alignedserve.ranks.degrees import Degrees, RankPlace

_dist: Any = torch.distributed  # untyped
_multiprocessing: Any = torch.multiprocessing

BLOCK_SIZE = 4
BLOCKS = 64
CHUNK = 7
SILENT_S = 60.0


def generated_by_ranks(
    degrees: Degrees, folders: Sequence[Path], prompts: list[list[int]], count: int, work: Path
) -> dict[str, list[list[int]]]:
    """Greedy answers of `count` tokens to each prompt, by model."""
    _multiprocessing.spawn(_generating, (degrees, list(folders), prompts, count, work), nprocs=degrees.ranks)
    answers: dict[str, list[list[int]]] = json.loads((work / "answers.json").read_text())
    return answers


def without_a_rank(degrees: Degrees, folder: Path, work: Path) -> str:
    """What rank 0 of 2 says of a pass in which rank 1 has left."""
    _multiprocessing.spawn(_leaving, (degrees, folder, work), nprocs=2)
    return (work / "said").read_text()


def _generating(
    rank: int, degrees: Degrees, folders: list[Path], prompts: list[list[int]], count: int, work: Path
) -> None:
    answers = {}
    for folder in folders:
        runner = _runner(RankPlace(rank, degrees), folder, work)
        if rank:
            runner.follow()
        else:
            answers[folder.name] = _generate(runner, prompts, count, degrees.experts)
            runner.end()
    if rank == 0:
        (work / "answers.json").write_text(json.dumps(answers))


def _leaving(rank: int, degrees: Degrees, folder: Path, work: Path) -> None:
    runner = _runner(RankPlace(rank, degrees), folder, work)
    if rank:
        return
    try:
        runner.forward([ForwardItem([5, 6], 0, [0])])
    except RankLostError as error:
        (work / "said").write_text(f"{error.message}; {runner.device_fault() is error}")


def _runner(place: RankPlace, folder: Path, work: Path) -> DrivenRunner:
    torch.set_num_threads(1)
    store = _dist.FileStore(str(work / f"{folder.name}.store"), place.degrees.ranks)
    store.set_timeout(timedelta(seconds=SILENT_S))
    groups = Groups.connected(store, place, SILENT_S, SILENT_S)
    info = inspect_model(folder.name, folder, "float32", "cpu")
    file, shape = work / f"{folder.name}.cache", (BLOCKS, *info.geometry(BLOCK_SIZE).block_shape)
    if place.rank == 0:
        np.memmap(file, np.float32, "w+", shape=shape)
    loaded = load_part(info, place, groups, "cpu")
    groups.waits.meet()  # the file is there
    memory = np.memmap(file, np.float32, "r+", shape=shape)
    return runner_of(loaded, torch.from_numpy(memory), place, groups, "torch")


def _generate(runner: DrivenRunner, prompts: list[list[int]], count: int, experts: int) -> list[list[int]]:
    """Prompts in chunks, then rows of one token together, in blocks out of order.

    Where ranks share experts, a request goes from one to the next with each pass; in a prompt's others have no work.
    """
    each = BLOCKS // len(prompts)
    blocks = [list(range(number, BLOCKS, len(prompts)))[:each][::-1] for number in range(len(prompts))]
    answers: list[list[int]] = []
    for prompt, own in zip(prompts, blocks, strict=True):
        for begin in range(0, len(prompt), CHUNK):
            chunk = prompt[begin : begin + CHUNK]
            written: list[int] = []
            last = begin + len(chunk) == len(prompt)
            rank = (len(answers) + begin // CHUNK) % experts
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
                        (at + len(answers[at])) % experts,
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
