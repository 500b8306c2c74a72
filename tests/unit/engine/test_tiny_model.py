"""The bundled model: its files agree with each other and need neither torch nor a network."""

from __future__ import annotations

import json
import struct
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

FOLDER = Path(str(resources.files("alignedserve"))) / "models" / "tiny"
BYTES_LIMIT = 10_000_000
TEXTS = [
    "",
    "Return a list containing the names of the files in the directory.",
    "  leading and trailing spaces  ",
    "def f(x):\n\tif x:\n        return 'a'  # comment\n\n\n",
    "naïve café, Füße, Ελληνικά, кириллица, 漢字かな, العربية",
    "emoji 🙂👩‍👩‍👧‍👦🇫🇷, combining e\u0301, zero\u200bwidth, nul \x00, \r\n",
    "don't 1234567890 !@#$%^&*() <|not a token|>",
]


def read_json(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return value


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def render(messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    template = environment.from_string((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def test_the_folder_is_small_and_names_no_path_of_the_machine_that_made_it() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < BYTES_LIMIT
    for file in FOLDER.iterdir():
        if file.suffix in {".json", ".jinja"} and file.name != "tokenizer.json":
            text = file.read_text(encoding="utf-8")
            assert not any(path in text for path in ("/tmp", "/root", "/home", "/work"))
            assert "_name_or_path" not in text


def test_the_config_is_a_llama_of_8192_positions_with_grouped_heads_and_tied_embeddings() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 8192
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"]
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    assert config["tie_word_embeddings"] is True
    assert read_json("tokenizer_config.json")["model_max_length"] == 8192


def test_the_weights_are_bfloat16_and_have_the_shapes_the_config_says(tokenizer: Tokenizer) -> None:
    config = read_json("config.json")
    with (FOLDER / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    layers = {name.split(".")[2] for name in header if name.startswith("model.layers.")}
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert header["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert len(layers) == config["num_hidden_layers"]
    assert "lm_head.weight" not in header  # tied
    assert tokenizer.get_vocab_size() == config["vocab_size"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding_and_gets_no_special_tokens(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert special.isdisjoint(ids)


def test_every_byte_has_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    for point in range(0x800):
        assert tokenizer.decode(tokenizer.encode(chr(point)).ids) == chr(point)


def test_the_end_tokens_of_text_and_of_turn_both_stop_a_generation(tokenizer: Tokenizer) -> None:
    generation, config = read_json("generation_config.json"), read_json("config.json")
    end_of_text, end_of_turn = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|end|>")
    assert generation["eos_token_id"] == [end_of_text, end_of_turn]
    assert config["eos_token_id"] == end_of_text
    assert read_json("tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    assert generation["pad_token_id"] == config["pad_token_id"] == tokenizer.token_to_id("<|pad|>")


def test_a_conversation_renders_to_markers_that_are_single_tokens(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What does len do?"},
    ]
    prompt = render(messages)
    assert prompt == (
        "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|>"
        "<|user|>What does len do?<|end|><|assistant|>"
    )
    tokens = tokenizer.encode(prompt).tokens
    assert [token for token in tokens if token.startswith("<|")] == [
        *("<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>", "<|end|>"),
        *("<|user|>", "<|end|>", "<|assistant|>"),
    ]
    assert render(messages, add_generation_prompt=False) == prompt.removesuffix("<|assistant|>")


def test_a_content_of_parts_renders_their_text_and_none_renders_nothing() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    assert render(messages, add_generation_prompt=False) == "<|user|>one two<|end|><|assistant|><|end|>"


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(TemplateError, match="wizard"):
        render([{"role": "wizard", "content": "Hi"}])
