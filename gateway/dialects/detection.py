"""Finds a model's dialects: by what its chat template writes, then by its architecture."""

from __future__ import annotations

from collections.abc import Sequence

_PYTHON_CALLS = "[func_name1("
_TOOLS: Sequence[tuple[str, str]] = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("tool_declare<|im_middle|>", "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("</arg_key><arg_value>", "glm47"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    (_PYTHON_CALLS, "pythonic"),
)
_REASONING: Sequence[tuple[str, str]] = (
    ("[THINK]", "mistral"),
    ("◁think▷", "kimi"),
    ("<|channel>", "gemma4"),
)
_DEEPSEEK, _DEEPSEEK_FENCE = "<｜tool▁calls▁begin｜>", "```json"
HARMONY = "harmony"  # the dialect of gpt-oss
_HARMONY = ("<|channel|>", "<|message|>")
_LLAMA = ("llama", "mllama", "llama4")


def tool_dialect_of(template: str, architecture: str) -> str:
    """The name of the dialect of tool calls; "" if the template writes no tools. `architecture`: its `model_type`."""
    if all(mark in template for mark in _HARMONY):
        return HARMONY
    if "tools" not in template:
        return ""
    if _DEEPSEEK in template:
        return "deepseek_v3" if _DEEPSEEK_FENCE in template else "deepseek_v31"
    of_json = architecture in _LLAMA and '"parameters"' in template
    for mark, name in _TOOLS:
        if mark in template:
            return "llama3_json" if name == "pythonic" and of_json and _PYTHON_CALLS not in template else name
    return "llama3_json" if of_json else ""


def reasoning_dialect_of(template: str, architecture: str) -> str:
    """The name of the dialect of reasoning; "" if the template knows none."""
    if all(mark in template for mark in _HARMONY):
        return HARMONY
    for mark, name in _REASONING:
        if mark in template:
            return name
    if "<think>" not in template and "</think>" not in template:
        return ""
    if "<arg_key>" in template or architecture.startswith("glm"):
        return "glm45"
    if "<|tool_calls_section_begin|>" in template:
        return "kimi_k2"
    return "deepseek_v3" if "<｜Assistant｜>" in template else "qwen3"
