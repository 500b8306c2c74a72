"""lm-eval on a task of its own: through this server it gives the numbers of its `hf` model on the same weights.

`MODEL_FOLDER` has the weights. torch and transformers are those of `FURTHER_PACKAGES`, a folder of installed packages.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.append(os.environ["FURTHER_PACKAGES"])

import lm_eval
import torch
from checks import MODEL, check, main
from load_checks import command, documented

torch.set_num_threads(1)
FOLDER = os.environ["MODEL_FOLDER"]
TOLERANCE = 2e-3  # of the logarithm of a probability
QUESTIONS = [
    {"text": "Return a list of", "choices": [" all", " the", " zebras"], "answer": 0},
    {"text": "Raise a ValueError if", "choices": [" the", " purple", " value"], "answer": 0},
    {"text": "This function returns the number", "choices": [" of", " upon", " if the"], "answer": 0},
    {"text": "Open the file and", "choices": [" return it.", " read", " Q"], "answer": 1},
    {"text": "def main(", "choices": ["self", "):", " of the"], "answer": 1},
    {"text": "Is the object a", "choices": [" string?", " list", " Tuesday"], "answer": 1},
]
TEXTS = [
    {"text": "Return the value of the named attribute of an object. If the attribute does not exist, raise an error."},
    {"text": "A list is a mutable sequence.\n\nIts items are separated by commas and enclosed in brackets; ünïcödé."},
]


@cache
def tasks() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Choices and perplexity, and one for generated text; their data lies in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="lm-eval-"))
    for name, rows in (("questions", QUESTIONS), ("texts", TEXTS)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def task(name: str, data: str, **fields: Any) -> dict[str, Any]:
        files = {"data_files": {"test": str(folder / f"{data}.jsonl")}}
        return {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **fields}

    measures = [{"metric": "acc"}, {"metric": "acc_norm"}]
    choices = task("choices", "questions", output_type="multiple_choice", doc_to_text="{{text}}",
                   doc_to_choice="{{choices}}", doc_to_target="{{answer}}", target_delimiter="",
                   metric_list=measures)  # fmt: skip
    rolling = task("rolling", "texts", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
                   metric_list=[{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}])  # fmt: skip
    written = task("written", "questions", output_type="generate_until", doc_to_text="{{text}}", doc_to_target="",
                   generation_kwargs={"until": ["\n\n"], "do_sample": False, "max_gen_toks": 24},
                   metric_list=[{"metric": "exact_match"}])  # fmt: skip
    return [choices, rolling], written


def evaluate(model: str, arguments: dict[str, Any], wanted: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    found: Any = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=wanted, log_samples=True, bootstrap_iters=0, **options
    )
    return dict(found)


def answers(found: dict[str, Any], task: str) -> list[Any]:
    """What the model said to each request, in the order of the task's documents."""
    return [said[0] for sample in sorted(found["samples"][task], key=lambda one: one["doc_id"])
            for said in sample["resps"]]  # fmt: skip


def through_the_server(url: str, **arguments: Any) -> dict[str, Any]:
    return {"model": MODEL, "base_url": f"{url}/v1/completions", "tokenizer": FOLDER, **arguments}


@cache
def truth() -> dict[str, Any]:
    scored, written = tasks()
    model = {"pretrained": FOLDER, "dtype": "float32", "device": "cpu"}
    return evaluate("hf", model, [*scored, written], batch_size=1)


@check
def the_numbers_are_those_of_its_own_model(url: str) -> None:
    choices, rolling = tasks()[0]
    expected = truth()
    ways: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({}, [choices, rolling]),
        ({"num_concurrent": 2, "batch_size": 4}, [choices, rolling]),
        ({"tokenized_requests": False}, [choices]),  # rolling begins with a special token, spelled: that is text here
    ]
    for way, wanted in ways:
        found = evaluate("local-completions", through_the_server(url, **way), wanted)
        for task in (one["task"] for one in wanted):
            for name, value in expected["results"][task].items():
                if isinstance(value, float):
                    assert math.isclose(found["results"][task][name], value, abs_tol=TOLERANCE), (way, task, name)
            pairs = zip(answers(found, task), answers(expected, task), strict=True)
            assert all(math.isclose(_sum(a), _sum(b), abs_tol=TOLERANCE) for a, b in pairs), (way, task)
        greedy = [str(said[1]) for said in answers(found, "choices")]
        assert greedy == [str(said[1]) for said in answers(expected, "choices")], way
        assert {"True", "False"} == set(greedy), "the comparison says little"


def _sum(said: Any) -> float:
    """The log-likelihood that an answer has: alone, or with whether its tokens are the likeliest."""
    return float(said if isinstance(said, float | str) else said[0])


@check
def generated_text_is_that_of_its_own_model(url: str) -> None:
    _, written = tasks()
    expected = answers(truth(), "written")
    assert any(expected)
    for way in ({}, {"num_concurrent": 2, "batch_size": 3}):
        found = evaluate("local-completions", through_the_server(url, **way), [written])
        assert answers(found, "written") == expected, way


@check
def chat_generates(url: str) -> None:
    _, written = tasks()
    arguments = {"model": MODEL, "base_url": f"{url}/v1/chat/completions", "num_concurrent": 3}
    found = evaluate("local-chat-completions", arguments, [written], apply_chat_template=True)
    said = answers(found, "written")
    assert len(said) == len(QUESTIONS)
    assert all(isinstance(text, str) and "\n\n" not in text for text in said)
    assert any(said)


@check
def the_documented_command_runs(url: str) -> None:
    """It prints the numbers of the task; its task file is ours."""
    (choices, _), folder = tasks()[0], Path(tempfile.mkdtemp(prefix="lm-eval-"))
    (file := folder / "choices.yaml").write_text(json.dumps(choices), encoding="utf-8")  # JSON is YAML
    words = documented(url, "lm_eval", tasks=file)
    done = subprocess.run([*command("lm_eval"), *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if "|acc " in line.replace("| ", "|")]
    assert f"{truth()['results']['choices']['acc,none']:.4f}" in line


if __name__ == "__main__":
    main()
