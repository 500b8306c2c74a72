"""Ranks that compute a model together: the same tokens as one process, each with its part of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from alignedserve.engine.batch import ForwardItem
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.checkpoint import Checkpoint
from alignedserve.engine.parallel.cuts import Cut, Ranks
from alignedserve.engine.parallel.sharded import ShardedModel
from alignedserve.engine.parallel.steps import from_words, to_words
from alignedserve.errors import ConfigError, ModelError, UnsupportedModelError
from alignedserve.ranks.degrees import Degrees, RankPlace
from alignedserve.testing.models import KINDS, draw_weights, make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from alignedserve.weights.files import weight_files
from support.ranks import captured_by_ranks, generated_by_ranks, without_a_rank

VOCAB_SIZE = 203  # which no number of ranks here divides
NEW_TOKENS = 12
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    shape = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
    return [make_model(kind, base / kind, seed=41, **shape) for kind in KINDS]


def check(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """They are the greedy ones of `transformers`."""
    reference = load_reference(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == greedy(reference, prompt, NEW_TOKENS, answer), folder.name


@pytest.mark.parametrize(
    ("tensor", "stages", "own"),
    [
        (2, 1, False),
        (1, 2, True),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(1, 2, False, marks=pytest.mark.slow),
        pytest.param(4, 1, False, marks=pytest.mark.slow),
        pytest.param(4, 1, True, marks=pytest.mark.slow),
        pytest.param(1, 3, False, marks=pytest.mark.slow),
        pytest.param(2, 2, False, marks=pytest.mark.slow),
        pytest.param(2, 2, True, marks=pytest.mark.slow),
    ],
)
def test_every_architecture_gives_the_same_tokens(
    tensor: int, stages: int, own: bool, folders: list[Path], tmp_path: Path
) -> None:
    """Over one store or stores of their own.

    Four ranks are more than there are KV heads in most of these models. Of three stages some have one layer.
    """
    prompts = random_prompts((19, 5, 30), VOCAB_SIZE, seed=42)
    found = generated_by_ranks(Degrees(tensor, stages), folders, prompts, NEW_TOKENS, tmp_path, own=own)
    for folder in folders:
        check(folder, prompts, found[folder.name])


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(2),
        Degrees(1, 2),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (Degrees(4), Degrees(1, 3), Degrees(2, 2))),
    ],
)
def test_captured_passes_of_ranks_give_the_same_tokens(degrees: Degrees, folders: list[Path], tmp_path: Path) -> None:
    """The others get the inputs of each, and rank 0's tokens within it or, between stages, before it."""
    folder, prompts = folders[KINDS.index("llama")], random_prompts((19, 5, 30), VOCAB_SIZE, seed=49)
    found, counts = captured_by_ranks(degrees, folder, prompts, NEW_TOKENS, tmp_path)
    assert counts.replays == (NEW_TOKENS - 1) * degrees.stages  # of each lane
    check(folder, prompts, found)


def test_lanes_larger_than_the_captured_passes_are_computed_beside_them(folders: list[Path], tmp_path: Path) -> None:
    folder, prompts = folders[KINDS.index("gemma2")], random_prompts((19, 5, 30), VOCAB_SIZE, seed=50)
    found, counts = captured_by_ranks(Degrees(1, 2), folder, prompts, NEW_TOKENS, tmp_path, sizes=(1,))
    assert counts.eager == counts.replays == NEW_TOKENS - 1
    check(folder, prompts, found)


@pytest.mark.parametrize(
    ("degrees", "failing"),
    [
        (Degrees(1, 2), (1, "capture")),
        (Degrees(2), (1, "memory")),
        *(pytest.param(Degrees(1, 2), each, marks=pytest.mark.slow) for each in ((0, "capture"), (1, "memory"))),
    ],
)
def test_where_one_rank_cannot_capture_all_decode_without_graphs(
    degrees: Degrees, failing: tuple[int, str], folders: list[Path], tmp_path: Path
) -> None:
    folder, prompts = folders[KINDS.index("llama")], random_prompts((19, 5, 30), VOCAB_SIZE, seed=51)
    found, counts = captured_by_ranks(degrees, folder, prompts, NEW_TOKENS, tmp_path, failing=failing)
    assert counts.replays == 0
    check(folder, prompts, found)


def write_model(kind: str, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A checkpoint whose tensors `change` has changed."""
    make_model(kind, folder, seed=44, vocab_size=VOCAB_SIZE, max_position_embeddings=64, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_glm(folder: Path) -> Path:
    """A mixture whose routers have a buffer in the checkpoint."""
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=48, n_shared_experts=1, first_k_dense_replace=1, num_mtp_layers=0,
        max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed=45, std=0.15)
    with torch.no_grad():
        biases = [each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for number, bias in enumerate(biases):
            bias.copy_(torch.tensor([0.9, 0.0, -0.9, 0.4]).roll(number))
    assert len(biases) == 2
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("degrees", [Degrees(2), pytest.param(Degrees(1, 2), marks=pytest.mark.slow)])
def test_ranks_read_a_checkpoint_as_one_process_does(degrees: Degrees, tmp_path: Path) -> None:
    """Tied weights may be stored under either name, or under both with different values; then they are not tied.

    Ranks need not divide the widths of MLPs.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    small = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
    noise = 0.15 * torch.randn((VOCAB_SIZE, 64), generator=torch.Generator().manual_seed(46))
    folders = [
        write_model("llama", tmp_path / "head", lambda found: found.update({head: found.pop(embedding)})),
        write_model("llama", tmp_path / "both", lambda found: found.update({head: found[embedding].clone()})),
        write_model("llama", tmp_path / "untied", lambda found: found.update({head: noise})),
        write_glm(tmp_path / "glm"),
        *(
            make_model(kind, tmp_path / kind, seed=48, intermediate_size=100, **small)
            for kind in ("opt", "phi3", "mixtral", "gpt_oss")
        ),
    ]
    prompts = random_prompts((19, 5), VOCAB_SIZE, seed=47)
    found = generated_by_ranks(degrees, folders, prompts, NEW_TOKENS, tmp_path)
    for folder in folders:
        check(folder, prompts, found[folder.name])


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(4)])
def test_models_beyond_the_fifteen_with_plans_of_ours(degrees: Degrees, tmp_path: Path) -> None:
    """One KV head for all queries; experts whose weights are transposed."""
    shapes = {
        "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
        "aria_text": {
            **SMALL, "num_hidden_layers": 3, "moe_num_experts": 4, "moe_topk": 2, "max_position_embeddings": 64,
        },
    }  # fmt: skip
    folders = [tmp_path / kind for kind in shapes]
    for folder in folders:
        config = AutoConfig.for_model(
            folder.name, vocab_size=VOCAB_SIZE, bos_token_id=0, pad_token_id=0, eos_token_id=1, **shapes[folder.name]
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        draw_weights(model, seed=52, std=0.15)
        model.save_pretrained(folder)
    prompts = random_prompts((19, 5), VOCAB_SIZE, seed=53)
    found = generated_by_ranks(degrees, folders, prompts, NEW_TOKENS, tmp_path)
    for folder in folders:
        check(folder, prompts, found[folder.name])


MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize(
    ("experts", "own"),
    [(2, False), (2, True), *(pytest.param(4, own, marks=pytest.mark.slow) for own in (False, True))],
)
def test_mixtures_give_the_same_tokens_where_ranks_share_experts(
    experts: int, own: bool, folders: list[Path], tmp_path: Path
) -> None:
    """Over one store, or over a store of each rank's own."""
    mixtures = [folder for folder in folders if folder.name in MIXTURES]
    assert len(mixtures) == len(MIXTURES)
    prompts = random_prompts((19, 5, 30), VOCAB_SIZE, seed=43)
    found = generated_by_ranks(Degrees(experts=experts), mixtures, prompts, NEW_TOKENS, tmp_path, own=own)
    for folder in mixtures:
        check(folder, prompts, found[folder.name])


def test_ranks_hold_their_own_experts_and_all_else(folders: list[Path]) -> None:
    folder = folders[KINDS.index("mixtral")]
    info = inspect_model("mixtral", folder, "float32", "cpu")
    parts = [ShardedModel(info, RankPlace(rank, Degrees(experts=2)), torch.device("cpu")).model for rank in range(2)]
    whole = dict(load_reference(folder).named_parameters())
    for part, begin in zip(parts, (0, 2), strict=True):
        for name, parameter in part.named_parameters():
            expected = whole[name][begin : begin + 2] if ".experts." in name else whole[name]
            assert torch.equal(parameter, expected), name
    held = sum(parameter.nbytes for part in parts for parameter in part.parameters())
    assert held == 2 * (info.weight_bytes - info.expert_bytes) + info.expert_bytes


def test_experts_that_ranks_cannot_share_are_refused_with_what_fits(folders: list[Path]) -> None:
    mixture = inspect_model("mixtral", folders[KINDS.index("mixtral")], "float32", "cpu")
    with pytest.raises(ConfigError, match=r"has 4 experts: 3 ranks cannot share them \(that fit: 1, 2, 4\)"):
        ShardedModel(mixture, RankPlace(0, Degrees(experts=3)), torch.device("cpu"))
    dense = inspect_model("llama", folders[KINDS.index("llama")], "float32", "cpu")
    with pytest.raises(ConfigError, match="llama has no experts"):
        ShardedModel(dense, RankPlace(0, Degrees(experts=2)), torch.device("cpu"))


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(1, 2), Degrees(experts=2)])
def test_a_rank_that_has_left_ends_the_pass_and_the_instance(
    degrees: Degrees, folders: list[Path], tmp_path: Path
) -> None:
    kind = "llama" if degrees.experts == 1 else "mixtral"
    said = without_a_rank(degrees, folders[KINDS.index(kind)], tmp_path)
    assert "rank 0 of 2 has lost another rank" in said
    assert said.endswith("; True")  # as a fault that only another process mends


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(4), Degrees(1, 2), Degrees(2, 2)])
def test_ranks_hold_each_weight_once_but_small_ones(degrees: Degrees, folders: list[Path]) -> None:
    size = degrees.ranks
    for folder in folders:
        info = inspect_model(folder.name, folder, "float32", "cpu")
        whole = sum(parameter.numel() for parameter in load_reference(folder).parameters())
        parts = [ShardedModel(info, RankPlace(rank, degrees), torch.device("cpu")).model for rank in range(size)]
        held = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
        assert degrees.stages > 1 or len(set(held)) == 1
        # Positions, norms, routers, KV heads held by several; tied embeddings in the first and the last stage.
        most = 1.6 if degrees.stages == 1 else 2.2
        assert max(held) < whole / size * most, folder.name
        assert sum(held) < whole * most, folder.name


def test_of_a_mixture_the_experts_that_a_token_chooses_count(tmp_path: Path) -> None:
    """Its first layer is dense, and costs as much as the others: half of their experts are chosen."""
    folder = make_model(
        "qwen3_moe", tmp_path / "m", seed=1, num_hidden_layers=4, mlp_only_layers=[0], intermediate_size=96,
        moe_intermediate_size=48, num_experts=64, num_experts_per_tok=2, vocab_size=8, max_position_embeddings=64,
    )  # fmt: skip
    info = inspect_model("m", folder, "float32", "cpu")
    parts = [ShardedModel(info, RankPlace(rank, Degrees(1, 2)), torch.device("cpu")).layers for rank in range(2)]
    assert parts == [range(2), range(2, 4)]


def test_heads_that_ranks_cannot_share_are_refused_with_what_fits(folders: list[Path]) -> None:
    info = inspect_model("llama", folders[KINDS.index("llama")], "float32", "cpu")
    with pytest.raises(ConfigError, match=r"4 query heads and 2 KV heads: 3 ranks cannot share them .*fit: 1, 2, 4\)"):
        Ranks(info, 0, 3).require()


def test_a_checkpoint_that_lacks_a_tensor_or_has_another_shape_is_refused(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "m", seed=1, vocab_size=VOCAB_SIZE)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with Checkpoint(weight_files(folder, {}), model) as checkpoint:
        assert checkpoint.read("model.layers.9.mlp.up_proj.weight", torch.Size((96, 64)), Cut()) is None
        with pytest.raises(ModelError, match=r"in the shape \[96, 64\]; the model needs \[95, 64\]"):
            checkpoint.read("model.layers.0.mlp.up_proj.weight", torch.Size((95, 64)), Cut())


@pytest.mark.parametrize(
    "kind",
    [
        "apertus",  # scalars and persistent buffers
        "granitemoe",  # other names
        "hrm_text",  # gate and up in one product, which the model has in two
        "mixtral",  # experts one by one
    ],
)
def test_what_transformers_saves_is_read_by_the_models_names(kind: str, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "num_local_experts": 11, "vocab_size": VOCAB_SIZE} | SMALL
    config = AutoConfig.for_model(kind, **shape)
    model = AutoModelForCausalLM.from_config(config)
    draw_weights(model, seed=9, std=0.1)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    with Checkpoint(weight_files(tmp_path, {}), empty) as checkpoint:
        for name, expected in model.state_dict().items():
            found = checkpoint.read(name, expected.shape, Cut())
            assert found is not None, name
            assert torch.equal(found, expected), name


def test_layers_whose_kv_heads_differ_are_not_cut(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "mimo_v2_flash", num_hidden_layers=2, swa_num_key_value_heads=4, swa_num_attention_heads=4, v_head_dim=16,
        swa_head_dim=16, swa_v_head_dim=16, head_dim=16, n_routed_experts=4, moe_intermediate_size=32,
        layer_types=["full_attention", "sliding_attention"], vocab_size=VOCAB_SIZE, **SMALL,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    info = inspect_model("m", tmp_path, "float32", "cpu")
    with pytest.raises(UnsupportedModelError, match=r"cannot share model.layers.1.self_attn.k_proj.weight: it is 64 "):
        ShardedModel(info, RankPlace(0, Degrees(2)), torch.device("cpu"))


def test_a_cut_reads_its_ranges_and_fills_up_with_zeros() -> None:
    tensor = torch.arange(12.0).view(6, 2)
    zeros = torch.zeros(1, 2)
    assert torch.equal(Cut(0, ((1, 2), (4, 5)), 4).of(tensor), torch.cat((tensor[1:2], zeros, tensor[4:5], zeros)))
    assert torch.equal(Cut(1, ((1, 2),), 1).of(tensor), tensor[:, 1:])
    assert not Cut(zero=True).of(tensor).any()


def test_items_travel_as_integers() -> None:
    items = [
        ForwardItem([5, 6, 7], 0, [3, 1], "all"),
        ForwardItem([9], 12, [4, 2, 0, 7], rank=3),
        ForwardItem([1, 2], 4, [8, 9], "none"),
    ]
    words = to_words(items)
    assert words.dtype == np.int64
    assert from_words(words) == items
