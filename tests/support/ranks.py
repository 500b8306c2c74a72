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
from alignedserve.engine.parallel.cuts import Ranks
from alignedserve.engine.parallel.group import RankGroup
from alignedserve.engine.parallel.load import load_part
from alignedserve.engine.parallel.runner import RankRunner
from alignedserve.errors import RankLostError

_dist: Any = torch.distributed  # untyped
_multiprocessing: Any = torch.multiprocessing

BLOCK_SIZE = 4
BLOCKS = 64
CHUNK = 7
SILENT_S = 60.0


def generated_by_ranks(
    size: int, folders: Sequence[Path], prompts: list[list[int]], count: int, work: Path
) -> dict[str, list[list[int]]]:
    """Greedy answers of `count` tokens to each prompt, by model, of `size` ranks."""
    _multiprocessing.spawn(_generating, (size, list(folders), prompts, count, work), nprocs=size)
    answers: dict[str, list[list[int]]] = json.loads((work / "answers.json").read_text())
    return answers


def without_a_rank(folder: Path, work: Path) -> str:
    """What rank 0 says of a pass in which rank 1 has left."""
    _multiprocessing.spawn(_leaving, (folder, work), nprocs=2)
    return (work / "said").read_text()


def _generating(rank: int, size: int, folders: list[Path], prompts: list[list[int]], count: int, work: Path) -> None:
    answers = {}
    for folder in folders:
        runner = _runner(rank, size, folder, work)
        if rank:
            runner.follow()
        else:
            answers[folder.name] = _generate(runner, prompts, count)
            runner.end()
    if rank == 0:
        (work / "answers.json").write_text(json.dumps(answers))


def _leaving(rank: int, folder: Path, work: Path) -> None:
    runner = _runner(rank, 2, folder, work)
    if rank:
        return
    try:
        runner.forward([ForwardItem([5, 6], 0, [0])])
    except RankLostError as error:
        (work / "said").write_text(f"{error.message}; {runner.device_fault() is error}")


def _runner(rank: int, size: int, folder: Path, work: Path) -> RankRunner:
    torch.set_num_threads(1)
    store = _dist.FileStore(str(work / f"{folder.name}.store"), size)
    store.set_timeout(timedelta(seconds=SILENT_S))
    waits, sums = (RankGroup(_dist.PrefixStore(name, store), rank, size, SILENT_S) for name in ("waits", "sums"))
    info = inspect_model(folder.name, folder, "float32", "cpu")
    file, shape = work / f"{folder.name}.cache", (BLOCKS, *info.geometry(BLOCK_SIZE).block_shape)
    if rank == 0:
        np.memmap(file, np.float32, "w+", shape=shape)
    loaded = load_part(info, sums, "cpu")  # after this the file is there
    memory = np.memmap(file, np.float32, "r+", shape=shape)
    return RankRunner(loaded, torch.from_numpy(memory), Ranks(info, rank, size), waits, sums, "torch")


def _generate(runner: RankRunner, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Prompts in chunks, then rows of one token together, in blocks out of order."""
    each = BLOCKS // len(prompts)
    blocks = [list(range(number, BLOCKS, len(prompts)))[:each][::-1] for number in range(len(prompts))]
    answers: list[list[int]] = []
    for prompt, own in zip(prompts, blocks, strict=True):
        for begin in range(0, len(prompt), CHUNK):
            chunk = prompt[begin : begin + CHUNK]
            written: list[int] = []
            last = begin + len(chunk) == len(prompt)
            logits = runner.forward([ForwardItem(chunk, begin, own, "last" if last else "none")], written.append)
            assert written == list(range(runner.loaded.info.layers))
        answers.append([int(logits[-1].argmax())])
    while len(answers[0]) < count:
        items = [
            ForwardItem([answer[-1]], len(prompt) + len(answer) - 1, own)
            for prompt, answer, own in zip(prompts, answers, blocks, strict=True)
        ]
        for answer, row in zip(answers, runner.forward(items), strict=True):
            answer.append(int(row.argmax()))
    return answers
