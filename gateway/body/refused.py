"""What other servers can do and this one cannot (yet): refused by name, never ignored, when it would change a result.

Each entry names the field, what it asks for, and the values with which it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.failures import UnsupportedFeatureError

_NOTHING: tuple[Any, ...] = ([], {}, "", False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """`harmless`: values (beside null) that ask for nothing more than what happens anyway."""

    field: str
    feature: str
    harmless: tuple[Any, ...] = _NOTHING

    def check(self, value: Any, where: str) -> None:
        """Raises UnsupportedFeatureError where the value, which is not null, asks for something."""
        if not any(type(value) is type(entry) and value == entry for entry in self.harmless):
            raise UnsupportedFeatureError(f"{where} is not supported: {self.feature}", param=where)


_TEXT_FORMAT = ({"type": "text"},)
_OFF = ("none", "auto")  # without tools neither does anything
_ONE = (1, 1.0)
_ZERO = (0, 0.0)

_BOTH = (
    Refusal("tools", "there are no tool calls", ([],)),
    Refusal("tool_choice", "there are no tool calls", _OFF),
    Refusal("functions", "there are no function calls", ([],)),
    Refusal("function_call", "there are no function calls", _OFF),
    Refusal("response_format", "there is no structured output, only text", _TEXT_FORMAT),
    Refusal("structured_outputs", "there is no structured output"),
    Refusal("guided_json", "there is no structured output", ()),  # {} asks for JSON of any kind
    Refusal("guided_regex", "there is no structured output"),
    Refusal("guided_choice", "there is no structured output"),
    Refusal("guided_grammar", "there is no structured output"),
    Refusal("json_schema", "there is no structured output"),
    Refusal("regex", "there is no structured output"),
    Refusal("grammar", "there is no structured output"),
    Refusal("ebnf", "there is no structured output"),
    Refusal("structural_tag", "there is no structured output"),
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
    Refusal("allowed_token_ids", "there is no list of allowed tokens; use logit_bias", ()),
    Refusal("bad_words", "there are no bad words; use logit_bias"),
    Refusal("no_repeat_ngram_size", "there is no n-gram penalty", _ZERO),
    Refusal("typical_p", "there is no typical sampling", _ONE),
    Refusal("mirostat", "there is no mirostat sampling", _ZERO),
    Refusal("dry_multiplier", "there is no DRY sampling", _ZERO),
    Refusal("xtc_probability", "there is no XTC sampling", _ZERO),
    Refusal("prompt_logprobs", "log-probabilities of a prompt come with echo and logprobs of /v1/completions", ()),
    Refusal("truncate_prompt_tokens", "prompts are never cut", ()),
    Refusal("skip_special_tokens", "special tokens are never part of the text; see return_token_ids", (True,)),
    Refusal("spaces_between_special_tokens", "special tokens are never part of the text", (True,)),
    Refusal("include_stop_str_in_output", "a stop string is never part of the text", (False,)),
    Refusal("prompt_embeds", "there are no embeddings as prompts"),
    Refusal("multi_modal_data", "the models here read text only"),
    Refusal("mm_processor_kwargs", "the models here read text only"),
    Refusal("images", "the models here read text only"),
    Refusal("parallel_tool_calls", "there are no tool calls", (True, False)),  # without tools neither does anything
    Refusal("reasoning_effort", "a model reasons as it was trained to", ()),
    Refusal("reasoning", "a model reasons as it was trained to", ({},)),
    Refusal("include_reasoning", "reasoning is not separated from the text", (True,)),
    Refusal("separate_reasoning", "reasoning is not separated from the text", (False,)),
    Refusal("enable_thinking", "the chat template takes no arguments", ()),
    Refusal("thinking_token_budget", "a model reasons as it was trained to; max_tokens bounds the answer", ()),
    Refusal("chat_template_kwargs", "the chat template takes no arguments"),
    Refusal("verbosity", "a model writes as it was trained to; max_tokens bounds the answer", ("medium",)),
    Refusal("priority", "there are no priorities; see wait_objective_s", _ZERO),
    Refusal("cache_salt", "requests share no KV cache: leave it out", ("",)),
    Refusal("stop_regex", "an answer ends at strings only; use stop", ("", [])),
    Refusal("no_stop_trim", "a stop string is never part of the text", (False,)),
    Refusal("input_ids", "token ids are given as the prompt of /v1/completions", ()),
    Refusal("choice", "there is no structured output"),
    Refusal("guided_whitespace_pattern", "there is no structured output", ("",)),
    Refusal("guided_decoding_backend", "there is no structured output", ("", "auto")),
    Refusal("logprob_token_ids", "log-probabilities are of the most likely tokens only; see logprobs", ([],)),
    Refusal("return_tokens_as_token_ids", "log-probabilities show tokens as text; see return_token_ids", (False,)),
    Refusal("truncation_side", "prompts are never cut", ("left", "right")),  # either way nothing is cut
    Refusal("repetition_detection", "there is no detection of repetitions; use repetition_penalty", ({},)),
)

_COMPLETION = (
    *_BOTH,
    Refusal("suffix", "there is no insertion before a suffix", ("",)),
    Refusal("add_special_tokens", "a text prompt gets the tokens that the model's tokenizer adds; "
            "send token ids for other ones", (True,)),
    Refusal("messages", "messages belong to /v1/chat/completions"),
)  # fmt: skip

_CHAT = (
    *_BOTH,
    Refusal("best_of", "there is no best_of in chat", _ONE),
    Refusal("echo", "there is no echo in chat", (False,)),
    Refusal("suffix", "there is no insertion before a suffix", ("",)),
    Refusal("prompt", "a prompt belongs to /v1/completions"),
    Refusal("modalities", "the models here write text only", (["text"], [])),
    Refusal("audio", "the models here write text only"),
    Refusal("web_search_options", "there is no web search", ()),
    Refusal("chat_template", "the chat template is the server's: --chat-template FILE"),
    Refusal("documents", "the chat template takes no documents"),
    Refusal("add_generation_prompt", "the answer is always a new turn", (True,)),
    Refusal("continue_final_message", "the answer is always a new turn", (False,)),
    Refusal("add_special_tokens", "the chat template writes all special tokens", (False,)),
    Refusal("allow_special_tokens", "what a message says is text; /v1/completions takes special tokens", (False,)),
)

# Fields of a message that the chat template would not see.
_MESSAGE = (
    Refusal("tool_calls", "there are no tool calls"),
    Refusal("function_call", "there are no tool calls"),
    Refusal("reasoning_content", "a message says only its content"),
    Refusal("reasoning", "a message says only its content"),
    Refusal("refusal", "a message says only its content"),
    Refusal("audio", "the models here read text only"),
)


def _by_field(entries: Iterable[Refusal]) -> Mapping[str, Refusal]:
    return {entry.field: entry for entry in entries}


COMPLETION, CHAT, MESSAGE = _by_field(_COMPLETION), _by_field(_CHAT), _by_field(_MESSAGE)


def refused_names() -> list[str]:
    """Every field of a body that is refused by name, for documentation."""
    return sorted({*COMPLETION, *CHAT, "best_of"})
