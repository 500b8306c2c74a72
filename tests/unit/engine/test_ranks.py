"""Ranks that compute a model together: the same tokens as one process, each with its part of the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from alignedserve.engine.batch import ForwardItem
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.checkpoint import Checkpoint
from alignedserve.engine.parallel.cuts import Cut, Ranks
from alignedserve.engine.parallel.sharded import ShardedModel
from alignedserve.engine.parallel.steps import from_words, to_words
from alignedserve.errors import ConfigError, ModelError
from alignedserve.testing.models import KINDS, make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from alignedserve.weights.files import weight_files
from support.ranks import generated_by_ranks, without_a_rank

VOCAB_SIZE = 203  # which no number of ranks here divides
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    shape = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
    return [make_model(kind, base / kind, seed=41, **shape) for kind in KINDS]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_architecture_gives_the_same_tokens(size: int, folders: list[Path], tmp_path: Path) -> None:
    """Four ranks are more than there are KV heads in most of these models."""
    prompts = random_prompts((19, 5, 30), VOCAB_SIZE, seed=42)
    found = generated_by_ranks(size, folders, prompts, NEW_TOKENS, tmp_path)
    for folder in folders:
        reference = load_reference(folder)
        for prompt, answer in zip(prompts, found[folder.name], strict=True):
            assert answer == greedy(reference, prompt, NEW_TOKENS, answer), folder.name


def test_a_rank_that_has_left_ends_the_pass_and_the_instance(folders: list[Path], tmp_path: Path) -> None:
    said = without_a_rank(folders[KINDS.index("llama")], tmp_path)
    assert "rank 0 of 2 has lost another rank" in said
    assert said.endswith("; True")  # as a fault that only another process mends


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_each_weight_once_but_small_ones(size: int, folders: list[Path]) -> None:
    for folder in folders:
        info = inspect_model(folder.name, folder, "float32", "cpu")
        whole = sum(parameter.numel() for parameter in load_reference(folder).parameters())
        parts = [ShardedModel(info, rank, size, torch.device("cpu")).model for rank in range(size)]
        held = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
        assert len(set(held)) == 1
        assert held[0] < whole / size * 1.6, folder.name  # positions, norms, routers, and KV heads held by several


def test_heads_that_ranks_cannot_share_are_refused_with_what_fits(folders: list[Path]) -> None:
    info = inspect_model("llama", folders[KINDS.index("llama")], "float32", "cpu")
    with pytest.raises(ConfigError, match=r"4 query heads and 2 KV heads: 3 ranks cannot share them .*fit: 1, 2, 4\)"):
        Ranks(info, 0, 3).require()


def test_a_checkpoint_that_lacks_a_tensor_or_has_another_shape_is_refused(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "m", seed=1, vocab_size=VOCAB_SIZE)
    with Checkpoint(weight_files(folder, {}), "model") as checkpoint:
        assert checkpoint.read("model.layers.9.mlp.up_proj.weight", torch.Size((96, 64)), Cut()) is None
        with pytest.raises(ModelError, match=r"in the shape \[96, 64\]; the model needs \[95, 64\]"):
            checkpoint.read("model.layers.0.mlp.up_proj.weight", torch.Size((95, 64)), Cut())


def test_a_cut_reads_its_ranges_and_fills_up_with_zeros() -> None:
    tensor = torch.arange(12.0).view(6, 2)
    assert torch.equal(Cut(0, ((1, 2), (4, 6)), 4).of(tensor), torch.cat((tensor[1:2], tensor[4:6], torch.zeros(1, 2))))
    assert torch.equal(Cut(1, ((1, 2),), 1).of(tensor), tensor[:, 1:])
    assert not Cut(zero=True).of(tensor).any()


def test_items_travel_as_integers() -> None:
    items = [
        ForwardItem([5, 6, 7], 0, [3, 1], "all"),
        ForwardItem([9], 12, [4, 2, 0, 7]),
        ForwardItem([1, 2], 4, [8, 9], "none"),
    ]
    words = to_words(items)
    assert words.dtype == np.int64
    assert from_words(words) == items
