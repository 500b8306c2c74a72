"""Tokenises prompts without delaying other requests: pieces of long texts take turns in a few dedicated threads.

A text whose size alone shows that it has too many tokens is refused before it is tokenised. Tokenisation stops at the
piece that exceeds the limit, or when the request is cancelled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from alignedserve.text import Prompt, PromptEncoder, dividing

LONG_TEXT = 8192  # characters; shorter texts are tokenised directly in the event loop
_COARSE_CHARACTERS = 16  # characters allowed for each token of the limit, where a text cannot be divided
_THREADS = max(1, (os.cpu_count() or 1) // 4)  # each tokenises a few million tokens a minute

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else `tokenizers` starts threads of its own
_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="long-text")
_undivided = ThreadPoolExecutor(1, thread_name_prefix="undivided-text")  # so that other texts do not wait

T = TypeVar("T")


class TooManyTokens(Exception):  # noqa: N818  (never reaches the client: the caller converts it)
    """The prompt exceeds the limit. `least`: its number of tokens, at least. `characters`, if not 0: its number of
    characters; the number of tokens is then unknown.
    """

    def __init__(self, least: int, characters: int = 0) -> None:
        super().__init__(least, characters)
        self.least = least
        self.characters = characters


async def in_turn(function: Callable[[], T], threads: Executor = _threads) -> T:
    """Runs a long function outside the event loop's thread, in `threads`, in the order of the calls."""
    return await asyncio.get_running_loop().run_in_executor(threads, function)


def check_size(encoder: PromptEncoder, text: str, most: int) -> None:
    """Raises TooManyTokens if the text's size shows that it has more than `most` tokens. Takes negligible time."""
    if len(text) <= most:
        return
    if (least := encoder.least_tokens(text)) > most:
        raise TooManyTokens(least)
    if not encoder.divisible and len(text) > max(dividing.MOST_UNBROKEN, most * _COARSE_CHARACTERS):
        raise TooManyTokens(0, len(text))


async def tokenise(encoder: PromptEncoder, prompts: Sequence[Prompt], most: int, *, around: bool) -> list[list[int]]:
    """The token ids of each prompt. Raises TooManyTokens if a prompt has more than `most`; InvalidRequestError.

    `around`: whether the special tokens that the tokenizer adds before and after a text are added.
    """
    for prompt in prompts:
        check_size(encoder, prompt.text, most)
        if len(prompt.specials) > most:
            raise TooManyTokens(len(prompt.specials))
    if sum(len(prompt.text) for prompt in prompts) <= LONG_TEXT:
        return [encoder.encode(prompt, around=around) for prompt in prompts]
    return [await _tokenise_in_turn(encoder, prompt, most, around=around) for prompt in prompts]


async def _tokenise_in_turn(encoder: PromptEncoder, prompt: Prompt, most: int, *, around: bool) -> list[int]:
    tokens: list[int] = []
    pieces = encoder.pieces(prompt, around=around, unbroken=most * _COARSE_CHARACTERS)
    threads = _threads
    while (piece := await in_turn(partial(next, pieces, None), threads)) is not None:
        threads = _threads if piece else _undivided
        tokens += piece
        if len(tokens) > most:
            raise TooManyTokens(len(tokens))
    return tokens
