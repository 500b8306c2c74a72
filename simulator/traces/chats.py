"""Synthetic conversations of several turns. They name the blocks of their prompts, for prefix caches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from alignedserve.errors import ConfigError
from alignedserve.simulator.traces.fields import MAX_TOKENS
from alignedserve.simulator.traces.generated import MOST_REQUESTS, check_range, described, is_of, parsed
from alignedserve.simulator.traces.load import LONGEST_S, Load
from alignedserve.simulator.traces.trace import Trace
from alignedserve.simulator.workload import Arrival, Workload

PREFIX = "chats:"
BLOCK = 64  # tokens


def are_chats(source: str) -> bool:
    return is_of(PREFIX, source)


@dataclass(frozen=True, slots=True)
class Chats(Trace):
    """`conversations` of `turns` requests. A prompt is the `system` prompt that all share, and all said until then.

    Messages and answers have uniform lengths, both ends included. A turn comes `pause_s` after the one before, and an
    exponential time with the same mean later: an answer's time, and that of its reader.
    """

    conversations: int = 200
    turns: int = 8
    system: int = 1024
    message_min: int = 32
    message_max: int = 512
    output_min: int = 64
    output_max: int = 512
    pause_s: float = 20.0
    timed: bool = field(default=False, init=False)

    @classmethod
    def parse(cls, source: str) -> Chats:
        """Parse `chats:conversations=200,turns=8`; every key is optional. Raises ConfigError."""
        chats = parsed(cls(), PREFIX, source)
        chats._check(source)
        return chats

    def _check(self, source: str) -> None:
        if min(self.conversations, self.turns) < 1 or self.conversations * self.turns > MOST_REQUESTS:
            raise ConfigError(f"{source}: conversations times turns must be between 1 and {MOST_REQUESTS}")
        if not 0 <= self.system < MAX_TOKENS:
            raise ConfigError(f"{source}: system must be less than {MAX_TOKENS} tokens, and not negative")
        if not 0 <= 2 * self.pause_s * self.turns <= LONGEST_S:
            raise ConfigError(f"{source}: pause_s must not be negative, and a conversation must end within a year")
        check_range(source, self, "message", "output")
        if self.system + self.turns * (self.message_max + self.output_max) >= MAX_TOKENS:
            raise ConfigError(f"{source}: a conversation must have less than {MAX_TOKENS} tokens")

    def workload(self, load: Load, seed: int) -> Workload:
        """`load.rate_per_s` counts requests, not conversations, which begin as the load draws them."""
        if load.clients:
            raise ConfigError("chats are not for a closed loop (--clients): a turn comes after the one before")
        of_starts = load if load.rate_per_s is None else replace(load, rate_per_s=load.rate_per_s / self.turns)
        fresh = count(self.system // BLOCK)
        found: list[Arrival] = []
        for number, start_s in enumerate(of_starts.draw(self.conversations, seed)):
            found += self._conversation(number, start_s, random.Random(f"alignedserve chats {seed} {number}"), fresh)
        found.sort(key=lambda arrival: arrival.arrival_s)
        arrivals = tuple(found[: load.limit])
        made = {"requests": len(arrivals), "arrivals": f"conversations {load.process}", "seed": seed}
        return Workload(arrivals, {**self.describe(), **made}, block_tokens=BLOCK)

    def _conversation(self, number: int, start_s: float, rng: random.Random, fresh: Iterator[int]) -> Iterator[Arrival]:
        """Its turns. `fresh`: ids of blocks that no other prompt has."""
        at_s, blocks, said = start_s, list(range(self.system // BLOCK)), self.system
        for turn in range(self.turns):
            prompt = said + rng.randint(self.message_min, self.message_max)
            said = prompt + rng.randint(self.output_min, self.output_max)
            blocks += [next(fresh) for _ in range(said // BLOCK - len(blocks))]
            own, answers = tuple(blocks[: prompt // BLOCK]), tuple(blocks[prompt // BLOCK :])
            yield Arrival(f"c{number}t{turn}", at_s, prompt, said - prompt, blocks=own, answer_blocks=answers)
            at_s += self.pause_s + (rng.expovariate(1.0 / self.pause_s) if self.pause_s else 0.0)

    def describe(self) -> dict[str, object]:
        return described(self, PREFIX)
