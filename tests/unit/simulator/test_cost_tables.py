"""Cost models from folders of measured tables: the sum of their parts, tensor parallelism, experts, clear errors."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.known import known_device
from alignedserve.scheduler.cost.load import default_hardware, load_parts, load_rank_cost, load_step_cost
from alignedserve.scheduler.cost.step import ChunkShape
from support.measured_tables import RTX, TABLES, needs_tables

MADE_UP_SKEW = "0,n<=2,few,short,kp=0,0.25\n0,n>2,few,short,kp=0,0.125\n0,n>2,many,short,kp=0,0.5\n"
SHAPE = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
LARGE = {**SHAPE, "kv_heads": 4, "head_dim": 128}  # as much KV as a store's blocks can count


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small tables of a made-up model."""
    write = {
        "dense.csv": "layer,tokens,time_us\nembedding,1,1\nembedding,100,2\nqkv_proj,1,10\nqkv_proj,100,20\n"
        "layernorm,1,3\nlayernorm,100,3\n",
        "per_sequence.csv": "layer,sequences,time_us\nlm_head,1,5\nlm_head,10,5\nsampler,1,1\nsampler,10,2\n",
        "attention.csv": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"
        + "".join(f"0,0,{n},{kv},{4 + n * kv / 16}\n" for n in (1, 2, 4) for kv in (16, 64, 128))
        + "".join(f"{t},{c},0,0,{4 + t / 4 + c / 8}\n" for t in (16, 64) for c in (0, 64))
        + "".join(
            f"{t},{c},{n},{kv},{4 + t / 4 + c / 8 + n * kv / 8}\n"
            for t in (16, 64)
            for c in (0, 64)
            for n in (1, 4)
            for kv in (16, 128)
        ),
        "skew_fit.csv": "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha\n" + MADE_UP_SKEW,
        "meta.yaml": "model: someone/made-up\ngpu: NVIDIA H100\nskew_fit:\n  bucket_axes:\n"
        "    n_bins: [0, 2, 1000000]\n    n_labels: [n<=2, n>2]\n"
        "    skew_rate_bins: [-0.01, 0.5, 1.01]\n    skew_rate_labels: [few, many]\n"
        "    kv_big_bins: [0, 1024, 1000000]\n    kv_big_labels: [short, long]\n"
        "    kp_bins: [-1, 0, 1000]\n    kp_labels: [kp=0, kp>0]\n",
    }
    for name, text in write.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_pass_is_the_sum_of_its_parts(folder: Path) -> None:
    cost = load_step_cost(folder, **SHAPE)
    dense = 1.0 + 2 * (10.0 + 2 * 3.0)  # one token: embedding once, two layers with two norms each
    assert cost.step_s((), [64]) == pytest.approx((dense + 6.0 + 2 * (4 + 64 / 16)) * 1e-6, rel=1e-12)
    dense = 1.0 + 15 / 99 + 2 * (10.0 + 10 * 15 / 99 + 6.0)
    assert cost.step_s([ChunkShape(16, 64)], []) == pytest.approx((dense + 6.0 + 2 * (4 + 4 + 8)) * 1e-6, rel=1e-12)
    assert cost.step_s((), ()) == 0.0
    assert cost.balanced_step_s((), ()) == 0.0


def test_alpha_says_how_much_of_the_way_to_the_longest(folder: Path) -> None:
    cost = load_step_cost(folder, **SHAPE)
    lengths = [16, 16, 16, 128]  # mean 44; a quarter is long: alpha 0.125
    bubble = cost.step_s((), lengths) - cost.balanced_step_s((), lengths)
    assert bubble == pytest.approx(2 * 0.125 * (4 * (128 - 44) / 16) * 1e-6)
    lengths = [16, 128, 128, 128]  # three quarters: alpha 0.5
    bubble = cost.step_s((), lengths) - cost.balanced_step_s((), lengths)
    assert bubble == pytest.approx(2 * 0.5 * (4 * (128 - 100) / 16) * 1e-6)


def test_chunks_and_decodes_share_a_pass(folder: Path) -> None:
    cost = load_step_cost(folder, **SHAPE)
    alone = cost.step_s([ChunkShape(16)], [])
    beside = cost.step_s([ChunkShape(16)], [128] * 4)
    more_tokens = 4 / 99 * (1 + 2 * 10) + 4 / 9  # dense and sampling
    assert beside - alone == pytest.approx((2 * 4 * 128 / 8 + more_tokens) * 1e-6)
    two = cost.step_s([ChunkShape(16, 64), ChunkShape(16)], [])
    more_tokens = 16 / 99 * (1 + 2 * 10) + 1 / 9
    assert two - cost.step_s([ChunkShape(16, 64)], []) == pytest.approx((0.0 + more_tokens) * 1e-6), (
        "the launch counts once"
    )


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (
            "dense.csv",
            lambda text: text.replace("qkv_proj,100,20", "qkv_proj,100,fast"),
            r"dense.csv:5: column 'time_us'",
        ),
        ("dense.csv", lambda text: text.replace("qkv_proj,100,20", "qkv_proj,100"), r"dense.csv:5: 2 values"),
        (
            "dense.csv",
            lambda text: text.replace("qkv_proj,100,20", "qkv_proj,100,nan"),
            r"dense.csv:5: column 'time_us'",
        ),
        ("attention.csv", lambda text: text.replace("n_decode", "decodes"), r"attention.csv:1: no column 'n_decode'"),
        ("attention.csv", lambda text: text.splitlines()[0] + "\n", r"attention.csv: the table has no rows"),
        ("per_sequence.csv", lambda _: "", r"per_sequence.csv: the table is empty"),
        ("skew_fit.csv", lambda text: text.replace("n>2,many", "n>9,many"), r"skew_fit.csv:4: column 'n_label'"),
        ("skew_fit.csv", lambda text: text.replace("0.125", "x"), r"skew_fit.csv:3: column 'alpha'"),
        ("meta.yaml", lambda text: text + "\n  broken: [", r"meta.yaml:\d+:\d+"),
        ("meta.yaml", lambda text: text.replace("n_bins", "m_bins"), r"meta.yaml: skew_fit.bucket_axes needs n_bins"),
    ],
)
def test_a_broken_table_is_named_with_line_and_column(
    folder: Path, name: str, change: Callable[[str], str], told: str
) -> None:
    (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(ConfigError, match=told):
        load_step_cost(folder, **SHAPE)


def test_a_folder_that_lacks_a_table_or_a_shape_says_so(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"shape of model 'someone/made-up' is not known; add it.*layers, heads"):
        load_step_cost(folder)
    (folder / "dense.csv").unlink()
    with pytest.raises(ConfigError, match=r"has no dense\.csv"):
        load_step_cost(folder, **SHAPE)


def test_the_shape_of_an_unknown_model_and_the_size_of_an_unknown_gpu_stand_in_meta_yaml(folder: Path) -> None:
    meta = folder / "meta.yaml"
    known = meta.read_text().replace("NVIDIA H100", "Some GPU")
    meta.write_text(f"{known}shape: {json.dumps(SHAPE)}\n")
    assert load_step_cost(folder).describe().items() >= SHAPE.items()
    with pytest.raises(ConfigError, match=r"no_split needs sm_count.*meta\.yaml"):
        load_step_cost(folder, "no_split")
    meta.write_text(f"{known}shape: {json.dumps(SHAPE)}\nsm_count: 10\n")
    assert load_step_cost(folder, "no_split").describe()["options"]["sm_count"] == 10
    for wrong, told in (("{layers: 0}", "layers must be a whole"), ("{rows: 2}", "some of layers"), ("7", "some of")):
        meta.write_text(f"{known}shape: {wrong}\n")
        with pytest.raises(ConfigError, match=told):
            load_step_cost(folder)


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("Qwen/Qwen3-32B", 64),
        ("Qwen/Qwen3-4B-Instruct-2507", 36),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 32),
        ("meta-llama/Llama-2-13b-chat-hf", 40),
        ("mistralai/Mistral-7B-Instruct-v0.3", 32),
        ("facebook/opt-30b", 48),
    ],
)
def test_tables_of_a_known_model_need_no_shape(folder: Path, model: str, layers: int) -> None:
    meta = folder / "meta.yaml"
    meta.write_text(meta.read_text().replace("someone/made-up", model))
    assert load_step_cost(folder).describe()["layers"] == layers


def test_experts_add_the_time_of_as_many_as_are_active_on_average(folder: Path) -> None:
    dense = [load_step_cost(folder, **SHAPE).step_s((), [64] * count) for count in (1, 2, 100)]
    rows = ((1, 2, 10), (2, 2, 12), (2, 4, 20), (100, 2, 30), (100, 4, 40), (100, 8, 60))
    text = "".join(f"{tokens},{active},{us}\n" for tokens, active, us in rows)
    (folder / "moe.csv").write_text(f"tokens,activated_experts,time_us\n{text}")
    costs = [load_step_cost(folder, **SHAPE).step_s((), [64] * count) for count in (1, 2, 100)]
    more = [(cost - before) * 1e6 / SHAPE["layers"] for cost, before in zip(costs, dense, strict=True)]
    assert more == pytest.approx([10, 12 + 8 * 0.75, 60])  # two tokens: 8 (1 - (6 / 8) ** 2) = 3.5 experts of 2 to 4


@pytest.mark.parametrize(
    ("architecture", "model"), [("qwen3_moe", "someone/made-up"), ("", "Qwen/Qwen3-30B-A3B"), ("", "Mixtral-8x7B-v0.1")]
)
def test_a_mixture_without_times_of_its_experts_is_refused(folder: Path, architecture: str, model: str) -> None:
    meta, dense = folder / "meta.yaml", folder / "dense.csv"
    text = meta.read_text().replace("someone/made-up", model)
    meta.write_text(text + (f"architecture: {architecture}\n" if architecture else ""))
    with pytest.raises(ConfigError, match=r"has no moe.csv, but .* is a mixture of experts: .* would take no time"):
        load_parts(folder, SHAPE)
    dense.write_text(dense.read_text() + "experts,1,9\nexperts,100,9\n")
    load_parts(folder, SHAPE)


def test_ranks_share_the_experts(folder: Path) -> None:
    """Two ranks: four tokens of both activate half of those that they would activate of all experts."""
    text = "".join(f"{t},{a},{10 * a + t}\n" for t in (1, 2, 8, 512) for a in (2, 4, 8))
    (folder / "moe.csv").write_text(f"tokens,activated_experts,time_us\n{text}")
    layers = SHAPE["layers"]
    links = {"collective_bandwidth": 1e9, "collective_latency_s": 1e-5}
    rank = load_rank_cost(folder, 2, **links, **SHAPE).parts.dense
    alone = load_step_cost(folder, **SHAPE).parts.dense
    two = 8 * (1 - (6 / 8) ** 2), 4 * (1 - (6 / 8) ** 4)

    def exchange_us(tokens: int) -> float:
        row_bytes = 2 * 4 * 8 * 2  # a token's states of two bytes a value go to two experts
        return 2 * layers * 1e6 * (1e-5 + 0.5 * tokens * row_bytes / 1e9)

    assert alone.at(2) - rank.at(2) == pytest.approx(layers * 10 * (two[0] - two[1]) - exchange_us(2))
    assert alone.at(512) - rank.at(512) == pytest.approx(layers * 10 * 4 - exchange_us(512))
    assert load_rank_cost("a100-opt-13b", 2).describe() == load_step_cost("a100-opt-13b").describe()


@pytest.mark.parametrize(("degree", "shape"), [(3, SHAPE), (4, {**SHAPE, "kv_heads": 3})])
def test_a_model_that_cannot_be_divided_says_so(folder: Path, degree: int, shape: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"cannot be divided by {degree} devices"):
        load_step_cost(folder, tensor_parallel=degree, **shape)


def test_the_share_of_a_device_takes_collectives_besides(folder: Path) -> None:
    links = {"collective_bandwidth": 1e9, "collective_latency_s": 1e-5}
    alone = load_step_cost(folder, **SHAPE)
    shared = load_step_cost(folder, tensor_parallel=2, vocab=1000, **links, **SHAPE)
    seconds = shared.step_s((), [64] * 3) - alone.step_s((), [64] * 3)
    hidden_bytes, logits_bytes = 4 * 8 * 2, 1000 * 2
    reduces = 2 * SHAPE["layers"] * (1e-5 + 2 * 0.5 * 3 * hidden_bytes / 1e9)
    assert seconds == pytest.approx(reduces + 1e-5 + 0.5 * 3 * logits_bytes / 1e9)
    assert shared.parts.shape.heads == 2
    at_once = load_step_cost(folder, tensor_parallel=2, vocab=1000, **{**links, "collective_latency_s": 0}, **SHAPE)
    assert shared.step_s((), [64] * 3) - at_once.step_s((), [64] * 3) == pytest.approx(5 * 1e-5)
    assert shared.describe()["source"]["tensor_parallel"] == 2
    sizes = {
        name: default_hardware(folder, tensor_parallel=degree, **SHAPE) for name, degree in (("one", 1), ("two", 2))
    }
    assert sizes["one"]["kv_bytes_per_token"] == sizes["two"]["kv_bytes_per_token"]


@pytest.mark.parametrize(
    ("name", "told", "degree"), [("m-tp2", {}, 2), ("m-tp2", {"tensor_parallel": 1}, 1), ("m", {}, 1)]
)
def test_the_degree_is_an_option_or_stands_in_the_folders_name(
    folder: Path, name: str, told: dict[str, int], degree: int
) -> None:
    named = Path(shutil.copytree(folder, folder / name))
    parts = load_parts(named, {**SHAPE, **told})
    assert parts.shape.heads == SHAPE["heads"] // degree


def test_a_degree_of_zero_is_refused_and_another_than_the_folder_s_is_noted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: Path(shutil.copytree(folder, folder.parent / name)) for name in ("m-tp0", "m-tp2")}
    with pytest.raises(ConfigError, match="-tp0 is no degree of tensor parallelism"):
        load_parts(names["m-tp0"], SHAPE)
    meta = names["m-tp2"] / "meta.yaml"
    meta.write_text(f"{meta.read_text()}shape: {json.dumps(LARGE)}\n")
    for degree, told in (("1", True), ("2", False)):
        out, _ = simulated(capsys, "--cost-model", names["m-tp2"], "--tensor-parallel", degree)
        assert (f"note: --tensor-parallel {degree}, but the folder's name says -tp2" in out) is told


def simulated(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> tuple[str, str]:
    """stdout and stderr of a short run."""
    trace = "mix:short=1,requests=4,short_max=90,output_min=2,output_max=9"
    assert main(["simulate", "--trace", trace, *map(str, arguments)]) == status
    said = capsys.readouterr()
    return said.out, said.err


@pytest.mark.parametrize(("name", "told"), [("m-tp2", ()), ("m", ("--tensor-parallel", 2))])
def test_the_link_of_an_unknown_gpu_is_given_by_hardware(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, told: tuple[object, ...]
) -> None:
    named, file = Path(shutil.copytree(folder, folder / name)), folder / "machine.toml"
    meta = (folder / "meta.yaml").read_text().replace("NVIDIA H100", "Frobnicator 9000")
    (named / "meta.yaml").write_text(f"{meta}shape: {json.dumps(LARGE)}\n")
    arguments = ("--cost-model", named, *told)
    _, error = simulated(capsys, *arguments, status=2)
    assert "give the bytes/s of a device's link in collectives (collective_bandwidth, a key of --hardware)" in error
    printed, note = simulated(capsys, *arguments, "--print-hardware")
    assert "\n# kv_tokens = " in printed
    assert "\n# collective_bandwidth = " in printed
    assert re.search(r"note: .*GPU.* is unknown.*kv_tokens = \d+ is assumed; give it by --hardware", note)
    file.write_text(printed)
    simulated(capsys, *arguments, "--hardware", file, status=2)  # what is assumed is not given
    makespans = []
    for bandwidth in (1e9, 1e6):
        file.write_text(f"kv_tokens = 4096\npool_tokens = 65536\ncollective_bandwidth = {bandwidth}\n")
        out, error = simulated(capsys, *arguments, "--hardware", file, "--json")
        assert "assumed" not in error
        makespans.append(json.loads(out)["aligned"]["makespan_s"])
    assert makespans[0] < makespans[1]


def test_prefill_instances_may_have_another_degree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meta = folder / "meta.yaml"
    meta.write_text(meta.read_text().replace("someone/made-up", "meta-llama/Llama-3.1-8B"))
    other = Path(shutil.copytree(folder, folder / "other-tp2"))
    both = ("--cost-model", folder, "--prefill-cost-model", other)
    printed, _ = simulated(capsys, *both, "--print-hardware")
    hardware = tomllib.loads(printed)
    assert hardware["prefill_kv_tokens"] > 2 * hardware["kv_tokens"]
    same, apart = (json.loads(simulated(capsys, *options, "--json")[0]) for options in (("--cost-model", folder), both))
    assert apart["aligned"]["ttft_mean_s"] > same["aligned"]["ttft_mean_s"]  # by the collectives
    assert apart["run"]["configuration"]["prefill_cost"]["source"]["tensor_parallel"] == 2
    out, _ = simulated(capsys, *both, "--policy", "aligned,vllm")
    assert "note: vllm: prompts are computed with --cost-model too" in out
    _, error = simulated(capsys, "--cost-model", folder, "--prefill-cost-model", "a100-opt-13b", status=2)
    assert "both must be of one model" in error


def test_weights_that_do_not_fit_are_an_error_unless_the_capacity_is_given(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta, file = folder / "meta.yaml", folder / "machine.toml"
    meta.write_text(meta.read_text().replace("someone/made-up", "meta-llama/Llama-3.1-70B"))
    told = (
        r"weights do not fit 1 device: meta-llama/Llama-3.1-70B has 130 GiB.*--tensor-parallel.*kv_tokens.*--hardware"
    )
    with pytest.raises(ConfigError, match=told):
        default_hardware(folder)
    file.write_text("kv_tokens = 4096\n")
    for more, status in (((), 2), (("--tensor-parallel", 4), 0), (("--hardware", file), 0)):
        _, error = simulated(capsys, "--cost-model", folder, *more, status=status)
        assert ("weights do not fit" in error) is bool(status)
        assert "assumed" not in error


@pytest.mark.parametrize(
    ("name", "memory_gib"),
    [
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80),
        ("NVIDIA A100-SXM4", 80),
        ("Tesla V100-SXM2-16GB", 16),
        ("NVIDIA GH200 480GB", 141),
    ],
)
def test_a_devices_memory_is_that_in_its_name(name: str, memory_gib: int) -> None:
    device = known_device(name)
    assert device is not None
    assert device.memory_gib == memory_gib


def test_without_axes_in_meta_yaml_the_labels_are_the_bounds(folder: Path) -> None:
    (folder / "meta.yaml").write_text("model: someone/made-up\ngpu: NVIDIA H100\nskew_fit:\n  enabled: false\n")
    header = "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha\n"
    rows = "0,n<=2,sr<=50%,kvB<=1k,kp=0,0.25\n0,n>2,sr>50%,kvB>1k,kp<=2k,0.5\n"
    (folder / "skew_fit.csv").write_text(header + rows)
    assert load_parts(folder, SHAPE).skew.bounds == {
        "chunk_tokens": [],
        "requests": [2.0],
        "long_share": [0.5],
        "longest": [1024.0],
        "cached_tokens": [0.0, 2048.0],
    }
    for label, told in (("many", "'many', which is no bound"), ("n>3", "without an upper bound")):
        (folder / "skew_fit.csv").write_text(header + rows.replace("n>2", label))
        with pytest.raises(ConfigError, match=told):
            load_parts(folder, SHAPE)


@needs_tables
def test_measured_folders_of_every_kind_load_as_they_are() -> None:
    """Labels give the same buckets as meta.yaml where it has them; half the model takes more than half the time."""
    folders = TABLES.parent
    whole, half = (load_step_cost(folders / f"{RTX}{suffix}") for suffix in ("", "-tp2"))
    assert load_parts(folders / "rtx4090-llama-3.1-8b").skew.bounds == whole.parts.skew.bounds
    assert half.parts.shape.heads == whole.parts.shape.heads // 2
    for lengths in ([500] * 4, [1000] * 64, [2000] * 256):
        assert 0.5 < half.step_s((), lengths) / whole.step_s((), lengths) < 0.75
    sizes = default_hardware(folders / "rtx4090-llama-3.1-8b")
    assert sizes["kv_tokens"] == pytest.approx(2588 * 16, rel=0.05)  # what the real run had
    experts = load_step_cost(folders / "rtxpro6000-qwen3-30b-a3b")
    assert experts.step_s((), [500]) < whole.step_s((), [500]) < experts.step_s((), [500] * 64)
