"""Fill in the middle: how models that were trained for it are asked for the text between two texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from alignedserve.text.encoder import Prompt, PromptEncoder

if TYPE_CHECKING:
    from alignedserve.text.tokenizer import Tokenizer


class InfillTokens(NamedTuple):
    """The tokens of a family. `suffix_first`: the suffix is written before the prefix, and nothing between."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False

    def parts(self, prefix: Prompt, suffix: str) -> tuple[Prompt | str, ...]:
        """The prompt in order; a string is a token's, a Prompt is text."""
        if self.suffix_first:
            return self.suffix, Prompt(suffix), self.prefix, prefix
        return self.prefix, prefix, self.suffix, Prompt(suffix), self.middle


FAMILIES = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    InfillTokens("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)


def infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """The family whose tokens are all in the vocabulary; None if there is none."""

    def has(text: str) -> bool:
        return not text or tokenizer.backend.token_to_id(text) is not None

    return next((one for one in FAMILIES if has(one.prefix) and has(one.suffix) and has(one.middle)), None)


def infill_prompt(tokens: InfillTokens, encoder: PromptEncoder, prefix: Prompt, suffix: str) -> Prompt:
    """The prompt that asks for the text between `prefix` and `suffix`."""
    text, specials = "", list[tuple[int, int]]()
    for part in tokens.parts(prefix, suffix):
        own = encoder.special_in(part) if isinstance(part, str) else part
        specials += [(begin + len(text), end + len(text)) for begin, end in own.specials]
        text += own.text
    return Prompt(text, tuple(specials))
