"""`alignedserve serve` with a model as a hub's cache holds it: links, shards, and Python code of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.broken_models import SHARD, edit_json, shards

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

NAME = "org/own"
REVISION = "5" * 40
CODE = {
    "configuration_own.py": """
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own"
""",
    "modeling_own.py": """
from pathlib import Path
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

Path({marker!r}).touch()


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, input_ids=None, logits_to_keep=0, **rest):
        output = super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **rest)
        output.logits = output.logits.roll(1, dims=-1)
        return output
""",
}
"""A Llama, but that each token's logit is its predecessor's."""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Is there once code of the folder has been executed."""
    return tmp_path / "executed"


@pytest.fixture
def folder(tmp_path: Path, marker: Path) -> Path:
    """The model, as its author would upload it."""
    folder = make_model("llama", tmp_path / "uploaded", seed=21, max_shard_size=SHARD)
    assert len(shards(folder)) > 2
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_json(folder / "config.json", model_type="own", architectures=["OwnForCausalLM"], auto_map=classes)
    for name, text in CODE.items():
        (folder / name).write_text(text.format(marker=str(marker)))
    return folder


@pytest.fixture
def hub(tmp_path: Path, folder: Path) -> Mapping[str, str | None]:
    """The environment of a machine that has it in its cache, and no network."""
    home = tmp_path / "hub"
    model = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = model / "snapshots" / REVISION
    for made in (snapshot, model / "refs", model / "blobs"):
        made.mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    for file in folder.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(model / "blobs" / blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob))
    elsewhere = dict.fromkeys(("HF_HUB_CACHE", "HF_MODULES_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"))
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **elsewhere}


def test_code_that_is_not_trusted_is_not_run_and_the_start_says_so(hub: Mapping[str, str | None], marker: Path) -> None:
    server = ServeProcess("--model", NAME, environment=hub)
    server.start()
    assert server.process.wait(60.0) == 2
    (line,) = server.output.splitlines()
    assert line.startswith("alignedserve: error: ")
    assert "does not know model_type 'own'; the model's own code runs only with --trust-remote-code" in line
    assert not marker.exists()


def test_a_known_model_is_loaded_without_the_code_beside_it(folder: Path, marker: Path) -> None:
    edit_json(folder / "config.json", model_type="llama")
    loaded = load_model(inspect_model("own", folder, "auto", "cpu"), "cpu")
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert not marker.exists()


@pytest.mark.slow
def test_trusted_code_serves_shards_behind_links(hub: Mapping[str, str | None], folder: Path, marker: Path) -> None:
    snapshot = Path(str(hub["HF_HOME"]), "hub", "models--org--own", "snapshots", REVISION)
    plain = folder.with_name("plain")
    plain.mkdir()
    for file in snapshot.glob("*.json*"):
        (plain / file.name).write_bytes(file.read_bytes())
    for file in snapshot.glob("*.safetensors"):
        (plain / file.name).symlink_to(file.resolve())
    edit_json(plain / "config.json", model_type="llama", auto_map=None)
    reference = load_reference(plain)
    with torch.no_grad():
        reference.lm_head.weight.copy_(reference.lm_head.weight.roll(1, dims=0))  # type: ignore[operator, union-attr]
    prompts = random_prompts((5, 90, 33), 512, seed=22)

    with ServeProcess("--model", NAME, "--trust-remote-code", environment=hub) as server:
        body = {"model": "own", "prompt": prompts, "max_tokens": 12, "temperature": 0}
        answer = server.post("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
    assert marker.exists()
    assert [choice["token_ids"] for choice in answer["choices"]] == [greedy(reference, p, 12) for p in prompts]
