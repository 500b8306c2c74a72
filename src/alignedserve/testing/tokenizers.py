"""Small tokenizers of the families of served models, trained on demand, and text that is hard to split."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_END}"
QWEN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_END}"
QWEN_35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

WORDS = (
    *("Return", "the", "list", "of", "values,", "or", "raise", "a", "KeyError", "if", "it", "isn't", "there."),
    *("日本語の文字列、これは", "漢字仮名交じり文である。", "Ελληνικά", "русский", "текст"),
)
FRAGMENTS = (
    *WORDS, " ", " ", "  ", "     ", " " * 41, "\n", "\n\n", "\r\n", "\t", "\u3000", "\u00a0", "a\nb", "!\n\n", "/\n/",
    "12", "3.1415926535", "1234567890123", "a1b2c3d4", "deadBEEF00", "½", "a" * 37, "ab" * 23, "AAAA" * 9, "aBcD" * 5,
    "漢" * 29, "漢字" * 11, "한국어", "\u1112\u1161\u11ab", "ไทย", "हिन्दी", "é" * 17, "e\u0301", "u\u0308\u0308",
    "\u0301", "。。。", "====", "-" * 33, "'s", "'", "''''''", "don't", "I'LL", "? !", "/path/to//file", "<b>", "_",
    "x_y", "</s>", "<s>", "<|im_end|>", "<|im", "<think>", "▁", "▁▁", "🙂", "👩\u200d👩\u200d👧", "\x00", "\x1f", "İ",
    "ß", "ŉ", "ǅ", "ﬁ", "．", "：", "「a」",
    "<tool_call>", "＜tool_call＞", "<\u212a\u037ex>", "\u1fefa`", "x_ý", "a≯", "a．b", "a b", " <mask>", "\t\t\t",
)  # fmt: skip
_CORPUS = [" ".join(WORDS)] * 8 + ["".join(FRAGMENTS), "aaaa aaaa abab 12 123 1234 ==== ----  漢字漢字 don't I'll"] * 4
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def _byte_level(splitter: Any, normalizer: Any = None, **options: Any) -> Backend:
    backend = Backend(models.BPE(**options))
    backend.normalizer = normalizer
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, max_token_length=16, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _split(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentence_pieces(normalizer: Any, splitter: Any) -> Backend:
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizer
    backend.pre_tokenizer = splitter or pre_tokenizers.Metaspace(prepend_scheme="first")  # splits words for training
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, max_token_length=16, special_tokens=specials, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    plain = Backend(backend.model)  # a new one, in which the bytes are not added tokens
    plain.normalizer, plain.pre_tokenizer = normalizer, splitter
    return plain


def _unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _word_pieces() -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(
        _CORPUS, trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]"], show_progress=False)
    )
    return backend


def _with(backend: Backend, *tokens: AddedToken) -> Backend:
    backend.add_tokens(list(tokens))
    return backend


def _normalized(normalizer: Any, *tokens: str) -> Backend:
    backend = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer)
    return _with(backend, *(AddedToken(text, normalized=True) for text in tokens))


_MARK = normalizers.Replace(" ", "▁")
FAMILIES: dict[str, Callable[[], Backend]] = {
    "gpt2": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2-prefix": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "neox": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()),
    "starcoder": lambda: _byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    ),
    "llama3": lambda: _byte_level(_split(LLAMA_3), ignore_merges=True),
    "qwen": lambda: _byte_level(_split(QWEN), normalizers.NFC()),
    "qwen35": lambda: _byte_level(_split(QWEN_35), normalizers.NFC()),
    "nfc-normalized": lambda: _normalized(normalizers.NFC(), "<tool_call>", "x_y z", "a b"),
    "nfc-made": lambda: _normalized(normalizers.NFC(), "<K;x>", "`a`"),
    "nfd-normalized": lambda: _normalized(normalizers.NFD(), "<tool_call>", "x_y", "a>"),
    "nfkc-normalized": lambda: _normalized(normalizers.NFKC(), "<tool_call>", "a.b"),
    "lower": lambda: _byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]),
    ),
    "lstrip": lambda: _with(_byte_level(pre_tokenizers.ByteLevel(False)), AddedToken("<mask>", lstrip=True)),
    "o200k": lambda: _byte_level(_split(O200K)),
    "unknown": lambda: _byte_level(_split(r"\w+ ?\w*|\W+")),
    "llama2": lambda: _sentence_pieces(normalizers.Sequence([normalizers.Prepend("▁"), _MARK]), None),
    "mistral": lambda: _sentence_pieces(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "gemma": lambda: _sentence_pieces(_MARK, pre_tokenizers.Split(" ", "merged_with_previous")),
    "metaspace-words": lambda: _sentence_pieces(None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "unigram": _unigram,
    "bert": _word_pieces,
}


@cache
def family(name: str) -> str:
    """The `tokenizer.json` of a family, with special tokens, two other added tokens, and a BOS token."""
    backend = FAMILIES[name]()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("\n\n\n", normalized=False)])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    return backend.to_str()
