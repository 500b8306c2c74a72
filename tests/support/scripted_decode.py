"""A decode engine with scripted answers, over a cache that knows which token's KV is in which slot.

Work is done in the order of submission, as on a device's stream. An item's KV is compared with the content of its
blocks at that time. This finds a wrong position, a block of another request, and a copy that came too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.sampling.sampler import SampledToken, SampleRow
from alignedserve.errors import AlignedServeError
from alignedserve.request import RequestKey, RequestSpec, SamplingParams

EOS = 1


@dataclass
class Script:
    """The answer to a request. `ends_at`: the position of its EOS. `fails_at`: the position whose row fails.

    `needs_host`: the host must know its tokens before its next iteration.
    """

    number: int
    prompt: list[int]
    max_tokens: int
    ends_at: int | None = None
    fails_at: int | None = None
    needs_host: bool = False
    group: str = ""

    @property
    def key(self) -> RequestKey:
        return RequestKey(str(self.number))

    def token(self, position: int) -> int:
        """The token at a position, also after the end, where an iteration may run without use."""
        return EOS if position == self.ends_at else 1000 * (self.number + 1) + position

    def answer(self) -> tuple[list[int], str]:
        """Its tokens and its finish reason, if it is not disturbed."""
        ends = [(self.max_tokens, "length")]
        if self.ends_at is not None:
            ends.append((self.ends_at + 1, "stop"))
        if self.fails_at is not None:
            ends.append((self.fails_at, "error"))
        length, reason = min(ends, key=lambda end: end[0])
        if reason == "length" and (length, "stop") in ends:
            reason = "stop"
        return [self.token(position) for position in range(length)], reason

    def spec(self, tokens: Sequence[int] = ()) -> RequestSpec:
        sampling = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0,
            seed=self.number,
            eos_token_ids=(EOS,),
            logprobs=0 if self.needs_host else None,
        )
        output = list(tokens) or [self.token(0)]
        size = 2 if self.group else 1
        return RequestSpec(
            self.key, self.prompt, sampling, output, gateway_address="gateway", group_id=self.group, group_size=size
        )


@dataclass
class ScriptedStep(DecodeStep):
    results: list[SampledToken | Exception]
    numbers: list[int]
    fault: Exception | None
    blocks: set[int]  # blocks that the device reads or writes for it
    taken: bool = False

    def tokens(self) -> list[SampledToken | Exception]:
        assert not self.taken, "a step's tokens are read only once"
        self.taken = True
        if self.fault is not None:
            raise self.fault
        return self.results


@dataclass
class ScriptedDecode(DecodeEngine):
    """`lanes`: iterations of disjoint requests at one time. `fail_next`: the whole next step fails.

    `most_ahead`: the most steps whose tokens were not taken at one time.
    """

    scripts: dict[int, Script]
    blocks: int
    block_size: int
    overlapping: bool
    lanes: int = 1
    fail_next: bool = False
    most_ahead: int = 0
    needless: int = 0  # rows that ran after the end of their request
    steps: list[ScriptedStep] = field(default_factory=list)
    cache: dict[int, int] = field(default_factory=dict)  # slot of the store -> the token whose KV is there

    @property
    def overlaps(self) -> bool:
        return self.overlapping

    @property
    def depth(self) -> int:
        return self.lanes

    def ahead(self, rows: Sequence[SampleRow]) -> bool:
        return self.lanes == 1 and not any(row.sampling.logprobs is not None for row in rows)

    def warm_up(self) -> None: ...

    def read(self, block_ids: Sequence[int], tokens: int) -> list[int | None]:
        return [self.cache.get(self._slot(block_ids, position)) for position in range(tokens)]

    def write(self, block_ids: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            self.cache[self._slot(block_ids, position)] = token

    def busy_blocks(self) -> set[int]:
        """The blocks of steps that may be under way on the device."""
        return {block for step in self.steps if not step.taken for block in step.blocks}

    def _slot(self, block_ids: Sequence[int], position: int) -> int:
        block = block_ids[position // self.block_size]
        assert 0 <= block < self.blocks
        return block * self.block_size + position % self.block_size

    def launch(self, items: Sequence[DecodeItem]) -> DecodeStep:
        assert items
        fault = AlignedServeError("the pass failed, as it was told to") if self.fail_next else None
        self.fail_next = False
        results = [fault or self._compute(item) for item in items]
        assert len({item.row.sampling.seed for item in items}) == len(items)
        self.steps = [step for step in self.steps if not step.taken]
        if self.lanes > 1:
            flying = {number for step in self.steps for number in step.numbers}
            assert flying.isdisjoint(item.row.sampling.seed for item in items)
        blocks = {block for item in items for block in item.block_ids}
        self.steps.append(ScriptedStep(results, [item.row.sampling.seed for item in items], fault, blocks))
        self.most_ahead = max(self.most_ahead, len(self.steps))
        return self.steps[-1]

    def _compute(self, item: DecodeItem) -> SampledToken | Exception:
        script = self.scripts[item.row.sampling.seed]
        known = len(item.row.output_token_ids)
        assert item.position == known + (item.token_id is None)
        token = item.token_id
        if token is None:
            before = self.steps[-1]
            assert not before.taken, "the host knows the token"
            assert before.numbers[item.previous] == script.number
            result = before.results[item.previous]
            if isinstance(result, Exception):
                return result
            token = result.token_id
        history = [*self.read(item.block_ids, item.kv_tokens), token]
        assert history == script.prompt + [script.token(position) for position in range(item.position)]
        self.write(item.block_ids, item.kv_tokens, [token])
        self.needless += item.position >= len(script.answer()[0]) + (script.answer()[1] == "error")
        if item.position == script.fails_at:
            return AlignedServeError("the row failed, as it was told to")
        return SampledToken(script.token(item.position))
