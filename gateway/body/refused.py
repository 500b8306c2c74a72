"""Fields of other servers' APIs that this server does not support. A field that would change the result is refused.

Each entry has the field's name, the reason for the refusal, and the values that have no effect and are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.failures import UnsupportedFeatureError

NOTHING: tuple[Any, ...] = ([], {}, "", False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """`harmless`: values, in addition to null, that match the server's behavior and are therefore accepted."""

    field: str
    feature: str
    harmless: tuple[Any, ...] = NOTHING

    def check(self, value: Any, where: str) -> None:
        """Raises UnsupportedFeatureError unless the value, which is not null, is one of `harmless`."""
        if not any(type(value) is type(entry) and value == entry for entry in self.harmless):
            raise UnsupportedFeatureError(f"{where} is not supported: {self.feature}", param=where)


_OFF = ("none", "auto")  # without tools, both have no effect
_ONE = (1, 1.0)
_ZERO = (0, 0.0)

_BOTH = (
    Refusal("lora", "there are no LoRA adapters"),
    Refusal("lora_path", "there are no LoRA adapters"),
    Refusal("lora_request", "there are no LoRA adapters"),
    Refusal("adapter", "there are no LoRA adapters"),
    Refusal("adapters", "there are no LoRA adapters"),
    Refusal("adapter_id", "there are no LoRA adapters"),
    Refusal("use_beam_search", "there is no beam search", (False,)),
    Refusal("num_beams", "there is no beam search", _ONE),
    Refusal("length_penalty", "there is no beam search", _ONE),
    Refusal("early_stopping", "there is no beam search", (False,)),
    Refusal("logits_processors", "there are no logits processors"),
    Refusal("logit_processors", "there are no logits processors"),
    Refusal("custom_logit_processor", "there are no logits processors"),
    Refusal("typical_p", "there is no typical sampling", _ONE),
    Refusal("mirostat", "there is no mirostat sampling", _ZERO),
    Refusal("dry_multiplier", "there is no DRY sampling", _ZERO),
    Refusal("xtc_probability", "there is no XTC sampling", _ZERO),
    Refusal("prompt_embeds", "there are no embeddings as prompts"),
    Refusal("multi_modal_data", "this server reads text only"),
    Refusal("mm_processor_kwargs", "this server reads text only"),
    Refusal("images", "this server reads text only"),
    Refusal("reasoning", "there are no options for reasoning", ({},)),
    Refusal("verbosity", "there is no option for verbosity; a limit of tokens bounds the answer", ("medium",)),
    Refusal("stop_regex", "there are no regular expressions as stop conditions; use stop", ("", [])),
    Refusal("input_ids", "token ids are given as the prompt of /v1/completions", ()),
    Refusal("guided_decoding_backend", "the server's engine.grammar chooses the library", ("", "auto")),
    Refusal("max_length", "use max_tokens", ()),
    Refusal("mirostat_mode", "there is no mirostat sampling", _ZERO),
    Refusal("thinking", "there are no options for reasoning", ({"type": "disabled"},)),
    Refusal("return_hidden_states", "hidden states are not returned", (False,)),
    Refusal("repetition_detection", "there is no detection of repetitions; use repetition_penalty", ({},)),
)

_COMPLETION = (
    *_BOTH,
    Refusal("functions", "tools belong to /v1/chat/completions", ([],)),
    Refusal("function_call", "tools belong to /v1/chat/completions", _OFF),
    Refusal("tools", "tools belong to /v1/chat/completions", ([],)),
    Refusal("tool_choice", "tools belong to /v1/chat/completions", _OFF),
    Refusal("parallel_tool_calls", "tools belong to /v1/chat/completions", (True, False)),  # both have no effect
    Refusal("reasoning_effort", "reasoning belongs to /v1/chat/completions", ()),
    Refusal("include_reasoning", "reasoning belongs to /v1/chat/completions", (True,)),
    Refusal("separate_reasoning", "reasoning belongs to /v1/chat/completions", (False,)),
    Refusal("enable_thinking", "chat templates belong to /v1/chat/completions", ()),
    Refusal("thinking_token_budget", "reasoning belongs to /v1/chat/completions", ()),
    Refusal("chat_template_kwargs", "chat templates belong to /v1/chat/completions"),
    Refusal("add_special_tokens", "a text prompt gets the tokens that the model's tokenizer adds; "
            "send token ids to choose them yourself", (True,)),
    Refusal("messages", "messages belong to /v1/chat/completions"),
)  # fmt: skip

_CHAT = (
    *_BOTH,
    Refusal("best_of", "there is no best_of in chat", _ONE),
    Refusal("echo", "there is no echo in chat", (False,)),
    Refusal("suffix", "there is no insertion before a suffix", ("",)),
    Refusal("prompt", "a prompt belongs to /v1/completions"),
    Refusal("modalities", "this server writes text only", (["text"], [])),
    Refusal("audio", "this server writes text only"),
    Refusal("web_search_options", "there is no web search", ()),
    Refusal("chat_template", "the server sets the chat template: --chat-template FILE"),
    Refusal("documents", "the chat template takes no documents"),
    Refusal("add_special_tokens", "the chat template writes all special tokens", (False,)),
    Refusal("allow_special_tokens", "message content is plain text; /v1/completions accepts special tokens", (False,)),
)

# Fields of a message that the chat template would not receive.
_MESSAGE = (
    Refusal("refusal", "only the content of a message is read"),
    Refusal("audio", "this server reads text only"),
)


def _by_field(entries: Iterable[Refusal]) -> Mapping[str, Refusal]:
    return {entry.field: entry for entry in entries}


COMPLETION, CHAT, MESSAGE = _by_field(_COMPLETION), _by_field(_CHAT), _by_field(_MESSAGE)


def refused_names() -> list[str]:
    """Names of all fields of a body that are refused, for the documentation."""
    return sorted({*COMPLETION, *CHAT})
