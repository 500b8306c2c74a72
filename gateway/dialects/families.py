"""All dialects, by the names of `--tool-parser` and `--reasoning-parser`."""

from __future__ import annotations

from alignedserve.gateway.dialects.base import ReasoningDialect, ToolDialect
from alignedserve.gateway.dialects.deepseek import DeepseekV3, DeepseekV31
from alignedserve.gateway.dialects.gemma import FunctionGemma, Gemma4
from alignedserve.gateway.dialects.glm import Glm45, Glm47
from alignedserve.gateway.dialects.harmony import Harmony
from alignedserve.gateway.dialects.hermes import Hermes
from alignedserve.gateway.dialects.kimi import KimiK2
from alignedserve.gateway.dialects.llama import Llama3Json
from alignedserve.gateway.dialects.mistral import Mistral
from alignedserve.gateway.dialects.pythonic import Pythonic
from alignedserve.gateway.dialects.qwen_coder import Qwen3Coder

TOOLS: dict[str, ToolDialect] = {
    dialect.name: dialect
    for dialect in (
        Llama3Json(),
        Hermes(),
        Qwen3Coder(),
        DeepseekV3(),
        DeepseekV31(),
        Mistral(),
        Glm45(),
        Glm47(),
        KimiK2(),
        Harmony(),
        Gemma4(),
        FunctionGemma(),
        Pythonic(),
    )
}
_THINK = ("<think>", "</think>")
REASONING: dict[str, ReasoningDialect] = {
    dialect.name: dialect
    for dialect in (
        ReasoningDialect("deepseek_r1", *_THINK, begun=True),
        ReasoningDialect("deepseek_v3", *_THINK),
        ReasoningDialect("qwen3", *_THINK),
        ReasoningDialect("glm45", *_THINK),
        ReasoningDialect("kimi_k2", *_THINK),
        ReasoningDialect("kimi", "◁think▷", "◁/think▷"),
        ReasoningDialect("mistral", "[THINK]", "[/THINK]"),
        ReasoningDialect("gemma4", "<|channel>thought\n", "<channel|>", tokens=("<|channel>", "<channel|>")),
        ReasoningDialect("harmony", "<|channel|>analysis<|message|>", "<|end|>"),
    )
}
OTHER_NAMES = {"qwen": "hermes", "gpt_oss": "harmony", "openai": "harmony", "gemma": "gemma4"}
"""Spellings of other servers."""
TEMPLATE = "response_template"  # the tokenizer's own, with the parser of `transformers`
AUTO, NONE = "auto", "none"
