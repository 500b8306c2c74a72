"""Texts to tokens so that nobody else waits: long ones by turns, a piece at a time, in a few threads of their own.

What is too long by its bytes alone is refused before. Tokenising stops with the piece in which the limit is passed, or
the request cancelled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from alignedserve.text import Prompt, PromptEncoder, dividing

LONG_TEXT = 8192  # characters; shorter ones are tokenised at once
_COARSE_CHARACTERS = 16  # a token, where a text cannot be divided, and nothing is proven of how many tokens it has
_THREADS = max(1, (os.cpu_count() or 1) // 4)  # one is enough for a few million tokens a minute

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else `tokenizers` hands each text to threads of its own
_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="long-text")
_undivided = ThreadPoolExecutor(1, thread_name_prefix="undivided-text")  # others do not wait for those

T = TypeVar("T")


class TooManyTokens(Exception):  # noqa: N818  (no error of its own: the caller knows what the limit is of)
    """`least`: the prompt has at least so many tokens. `characters`, if not 0: so many; its tokens are not known."""

    def __init__(self, least: int, characters: int = 0) -> None:
        super().__init__(least, characters)
        self.least = least
        self.characters = characters


async def in_turn(function: Callable[[], T], threads: Executor = _threads) -> T:
    """Runs something long beside the event loop; at most a few at a time, first come, first served."""
    return await asyncio.get_running_loop().run_in_executor(threads, function)


def check_size(encoder: PromptEncoder, text: str, most: int) -> None:
    """Raises TooManyTokens where it can be told from the text's size. Costs next to nothing."""
    if len(text) <= most:
        return
    if (least := encoder.least_tokens(text)) > most:
        raise TooManyTokens(least)
    if not encoder.divisible and len(text) > max(dividing.MOST_UNBROKEN, most * _COARSE_CHARACTERS):
        raise TooManyTokens(0, len(text))


async def tokenise(encoder: PromptEncoder, prompts: Sequence[Prompt], most: int, *, around: bool) -> list[list[int]]:
    """The tokens of each. Raises TooManyTokens for one that has more than `most`, InvalidRequestError."""
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
