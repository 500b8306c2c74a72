"""What a tight prefix cache finds of conversations, with and without learned return times.

Replays a mix in virtual time on a shard's own blocks, index and order of eviction: agents that call tools (back within
seconds, and silent for minutes once they have answered), people who read and type, and single questions that never
come back. Each begins with one of a few shared system prompts. There is no model: a request takes a fixed time.

    python benchmarks/session_cache.py --blocks 1500,3000,6000 --json session_cache.json

Prints the share of prompt tokens found, for `lru`, `value` and `value` with return times, and what an infinite cache
finds. Each is a mean of `--seeds` runs.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_chain import root_digest
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.kv_pool.records import WriterKey
from alignedserve.kv_pool.table import AllocationTable, table_bytes
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.returns import STOP, TOOL_CALLS
from alignedserve.scheduler.cache.sessions import Note, Session, Sessions
from alignedserve.scheduler.cache.values import cache_policy

BLOCK = 16
ROOT = root_digest("benchmark")
WRITER = WriterKey("prefill", "prefill-0", 1)
GEOMETRY = KvGeometry("benchmark", "float32", 2, 2, 8, BLOCK)
SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 640
SERVICE_S = 1.5
WARM_SHARE = 0.25  # of the run, during which nothing is counted


class Unlearned(Sessions):
    """All conversations are as likely to go on, and each of their requests counts as a use."""

    def came_back(self, request_id: str, digests: bytes | bytearray, begin: int, end: int) -> int:
        return 0

    def chance(self, session: Session) -> float:
        return 1.0


@dataclass(slots=True)
class Talk:
    """A conversation: its tokens so far, and what it does next."""

    kind: str
    tokens: list[int]
    steps: int = 0  # tool calls left in the present loop
    left: bool = False


@dataclass(slots=True)
class Counted:
    prompt: int = 0
    hit: int = 0
    ideal: int = 0
    by_kind: dict[str, list[int]] = field(default_factory=dict)


class Replay:
    """One run. `rate`: new conversations a second."""

    def __init__(
        self, blocks: int, policy: str, *, learned: bool, seed: int, rate: float, duration_s: float, single_tokens: int
    ) -> None:
        self.single_tokens = single_tokens
        self.now_s = 0.0
        self.draw = random.Random(seed)
        self.rate, self.duration_s = rate, duration_s
        table = AllocationTable(memoryview(bytearray(table_bytes(blocks, BLOCK))), GEOMETRY, blocks)
        chosen = cache_policy(policy, lambda tokens: 1e-3 + 1e-5 * tokens + 1e-9 * tokens**2, BLOCK)
        index = PrefixIndex(table.open_index(), BLOCK, chosen)
        self.pool = KvPool("kv_pool-0", table, BLOCK, index=index, clock=lambda: self.now_s)
        sessions = (Sessions if learned else Unlearned)(lambda: self.now_s)
        assert self.pool._cache is not None
        self.pool._cache.sessions = self.sessions = sessions
        self.numbers = itertools.count()
        self.events: list[tuple[float, int, str, Talk]] = []
        self.counted = Counted()
        self.systems = [[self.draw.randrange(50_000) for _ in range(SYSTEM_TOKENS)] for _ in range(SYSTEM_PROMPTS)]

    def run(self) -> Counted:
        self._at(0.0, "new", Talk("", []))
        while self.events and self.events[0][0] < self.duration_s:
            self.now_s, _, what, talk = heapq.heappop(self.events)
            if what == "new":
                kind = self.draw.choices(["agent", "person", "single"], [1, 3, 4])[0]
                self._ask(Talk(kind, list(self.draw.choice(self.systems))), first=True)
                self._at(self.draw.expovariate(self.rate), "new", talk)
            else:
                self._ask(talk)
        self.pool.check_integrity()
        return self.counted

    def _at(self, delay_s: float, what: str, talk: Talk) -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, next(self.numbers), what, talk))

    def _more(self, mean: int) -> list[int]:
        return [self.draw.randrange(50_000) for _ in range(16 + int(self.draw.expovariate(1 / mean)))]

    def _ask(self, talk: Talk, *, first: bool = False) -> None:
        """A request of the conversation: found, computed, answered and released at once; then it comes back, or not."""
        known = SYSTEM_TOKENS if first else len(talk.tokens)
        talk.tokens += self._more({"agent": 150, "person": 60, "single": self.single_tokens}[talk.kind])
        hit = self._serve(talk, known)
        if self.now_s > WARM_SHARE * self.duration_s:
            self.counted.prompt += len(talk.tokens)
            self.counted.hit += hit[0]
            self.counted.ideal += known // BLOCK * BLOCK
            of_kind = self.counted.by_kind.setdefault(talk.kind, [0, 0])
            of_kind[0] += hit[0]
            of_kind[1] += known // BLOCK * BLOCK
        delay_s = self._return_s(talk)
        if delay_s is not None:
            self._at(SERVICE_S + delay_s, "back", talk)

    def _serve(self, talk: Talk, known: int) -> tuple[int, int]:
        key = RequestKey(f"r{next(self.numbers)}")
        prompt = list(talk.tokens)
        held, _ = self.pool.pin(key, ROOT, prompt, len(prompt))
        hit = held.kv_tokens
        talk.tokens += self._more(150)  # the answer
        kept = list(held.block_ids)
        needed = -(-len(talk.tokens) // BLOCK) - len(kept)
        granted = [block for grant in self.pool.want(WRITER, needed) for block in grant.block_ids]
        if len(granted) < needed:  # longer than the whole shard
            self.pool.give_back(WRITER, granted)
            self.pool.release([key])
            return hit, known
        self.pool.commit(
            WRITER, key, len(talk.tokens), [*kept, *granted], kept_blocks=len(kept), token_ids=talk.tokens, root=ROOT
        )
        if leased := self.pool._blocks.leased_to(WRITER):
            self.pool.give_back(WRITER, list(leased))
        self.pool.release([key])
        if talk.kind == "agent" and talk.steps <= 0 and not talk.left:
            talk.steps = self.draw.randint(4, 16)
        talk.steps -= 1
        calls = talk.kind == "agent" and talk.steps > 0
        self.pool.note_ending(key.request_id, Note(TOOL_CALLS if calls else STOP, "", self.now_s))
        return hit, known

    def _return_s(self, talk: Talk) -> float | None:
        """Seconds until the conversation goes on; None if it has ended."""
        if talk.kind == "single":
            return None
        if talk.kind == "agent" and talk.steps > 0:
            return None if self.draw.random() < 0.03 else self.draw.lognormvariate(1.0, 0.8)
        if self.draw.random() < (0.5 if talk.kind == "agent" else 0.25):
            return None
        return self.draw.lognormvariate(4.0, 0.7)


def hit_rates(blocks: int, seeds: int, rate: float, duration_s: float, single_tokens: int) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        for name, policy, learned in (("lru", "lru", False), ("value", "value", False), ("sessions", "value", True)):
            replay = Replay(
                blocks,
                policy,
                learned=learned,
                seed=seed,
                rate=rate,
                duration_s=duration_s,
                single_tokens=single_tokens,
            )
            counted = replay.run()
            found.setdefault(name, []).append(counted.hit / counted.prompt)
            found.setdefault("ideal", []).append(counted.ideal / counted.prompt)
            for kind, (hit, ideal) in counted.by_kind.items():
                found.setdefault(f"{name}: {kind}", []).append(hit / ideal)
    return {name: round(statistics.fmean(values), 4) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="1500,3000,6000", help="sizes of the cache")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.5, help="new conversations a second")
    parser.add_argument("--single-tokens", type=int, default=1500, help="mean prompt of a single question")
    parser.add_argument("--duration", type=float, default=1200.0, help="virtual seconds")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    result = {}
    for blocks in map(int, options.blocks.split(",")):
        result[blocks] = hit_rates(blocks, options.seeds, options.rate, options.duration, options.single_tokens)
        print(f"{blocks} blocks:", ", ".join(f"{name} {rate:.1%}" for name, rate in result[blocks].items()), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
