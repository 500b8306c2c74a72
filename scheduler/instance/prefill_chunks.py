"""Chunked prefill on one instance: several prompts share a forward pass, a long prompt is split over several.

First come, first served (paper, section 3.2, step 1; the token budget is Sarathi-Serve's) within a rank of priorities,
the least rank first. A rank that waits goes first after MOST_OVERTAKES passes without a token of it. Prompts without
hurry have passes of their own, which are short: a prompt that arrives meanwhile waits for one.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.errors import AccountingError, InvalidRequestError
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.resident import BlockChain, Resident, ResidentPrefixes
from alignedserve.scheduler.priorities import BACKGROUND, Turns

MOST_OVERTAKES = 16
BACKGROUND_SHARE = 8  # a pass has at most 1 / 8 of its tokens for prompts without hurry


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens `start .. start + count - 1` of the request's prompt. `last`: its prefill ends with this chunk."""

    key: RequestKey
    start: int
    count: int
    last: bool = False


@dataclass(slots=True)
class _Prompt:
    tokens: int
    planned: int  # tokens in chunks handed out, computed or not
    computed: int
    rank: int
    chain: BlockChain | None = None  # of what is fetched, for others to share
    shared_tokens: int = 0  # the first of them, whose blocks another prompt had already
    started: bool = False  # holds its blocks
    fetching: bool = False  # the KV of its first tokens is being fetched
    cancelled: bool = False

    @property
    def in_flight(self) -> bool:
        return self.planned > self.computed or self.fetching


class ChunkScheduler:
    """Decides which tokens the next forward pass of a prefill instance computes. No I/O.

    A prompt starts only when the cache has room for all of it, so that started prompts always finish. While the first
    in the queue finds no room, no other starts. A prompt's blocks are held by its key in `allocator` from its
    first chunk until `release` (or `cancel`): the worker releases them when their copy has been committed in the pool.
    Of KV that is fetched, blocks are shared that a prompt here already has; what is being fetched is waited for.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._prompts: dict[RequestKey, _Prompt] = {}  # in order of arrival, until every token is computed
        self._turns = Turns(MOST_OVERTAKES)
        self._pending_tokens = 0
        self._to_fetch: list[RequestKey] = []
        self._prefixes = ResidentPrefixes()
        self._residents: dict[RequestKey, Resident] = {}  # of prompts that hold blocks and have a chain

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that have not been computed yet."""
        return self._pending_tokens

    @property
    def pending_prompts(self) -> int:
        return len(self._prompts)

    def add(self, key: RequestKey, tokens: int, start: int = 0, rank: int = 0, chain: BlockChain | None = None) -> None:
        """Queue a prompt of `tokens` tokens, of which the KV of the first `start` is fetched from elsewhere.

        `chain`: of these first tokens, if other prompts may share their blocks. A prompt with `start` is in
        `take_fetches` once it has its blocks, unless it shares all of that, and is computed after `fetched`.

        Raises InvalidRequestError if the cache could never hold it, AccountingError if it is already here.
        """
        if key in self._prompts:
            raise AccountingError(f"{key} is already being prefilled", request_id=key.request_id)
        if not 0 <= start < tokens:
            raise InvalidRequestError(f"nothing to prefill: {tokens} tokens, {start} of them computed", param="prompt")
        if self._blocks_for(tokens) > self._allocator.capacity:
            raise InvalidRequestError(
                f"a prompt of {tokens} tokens needs {self._blocks_for(tokens)} blocks; the prefill cache has "
                f"{self._allocator.capacity}",
                param="prompt",
            )
        self._prompts[key] = _Prompt(tokens, start, start, rank, fetching=start > 0, chain=chain)
        self._pending_tokens += tokens - start

    def plan(self, token_budget: int, max_requests: int) -> list[Chunk]:
        """The next forward pass: at most `token_budget` tokens of at most `max_requests` prompts, in their order."""
        chunks: list[Chunk] = []
        prompts = [(key, p) for key, p in self._prompts.items() if not p.cancelled and p.planned < p.tokens]
        ranks = {prompt.rank for _, prompt in prompts}
        first = min(ranks, default=0)
        if len(ranks) > 1:
            first = self._turns.next(ranks)
            prompts.sort(key=lambda each: (each[1].rank != first, each[1].rank))
        spare = max(1, token_budget // BACKGROUND_SHARE)  # for prompts without hurry
        full = False
        for key, prompt in prompts:
            if token_budget <= 0 or len(chunks) >= max_requests:
                break
            most = token_budget
            if prompt.rank >= BACKGROUND:
                most = min(token_budget, spare if first == prompt.rank or not chunks else 0)
                if not most:
                    continue
            if not prompt.started and not full:
                shared = [] if prompt.chain is None else self._prefixes.find(prompt.chain)
                full = shared is not None and not self._start(key, prompt, shared)
            if not prompt.started or prompt.fetching:
                continue
            count = min(most, prompt.tokens - prompt.planned)
            last = prompt.planned + count == prompt.tokens
            chunks.append(Chunk(key, prompt.planned, count, last))
            prompt.planned += count
            token_budget -= count
            spare -= count if prompt.rank >= BACKGROUND else 0
        if len(ranks) > 1 and chunks:
            served = {self._prompts[chunk.key].rank for chunk in chunks}
            self._turns.served(min(served), ranks)
            for rank in served:
                self._turns.had(rank)
        return chunks

    def _start(self, key: RequestKey, prompt: _Prompt, shared: list[int]) -> bool:
        """Give a prompt its blocks, after those that it shares. Returns False, and nothing changes, without room."""
        own = self._blocks_for(prompt.tokens) - len(shared)
        if self._allocator.available_blocks < own:
            return False
        self._allocator.retain(shared, key)
        self._allocator.allocate(own, key)
        prompt.started = True
        prompt.shared_tokens = len(shared) * self._block_size
        prompt.fetching = prompt.computed > prompt.shared_tokens
        if prompt.fetching:
            self._to_fetch.append(key)
        if prompt.chain is not None:
            self._residents[key] = self._prefixes.enter(prompt.chain, self.blocks_of(key), filled=not prompt.fetching)
        return True

    def _free(self, key: RequestKey) -> None:
        self._unshare(key)
        self._allocator.release_all(key)

    def _unshare(self, key: RequestKey) -> None:
        resident = self._residents.pop(key, None)
        if resident is not None:
            self._prefixes.leave(resident)

    def take_fetches(self) -> list[RequestKey]:
        """Prompts that got their blocks since the last call and wait for the KV of their first tokens."""
        fetches, self._to_fetch = self._to_fetch, []
        return fetches

    def shared_blocks(self, key: RequestKey) -> int:
        """How many of a started prompt's first blocks have their KV already, as another prompt's."""
        return self._prompts[key].shared_tokens // self._block_size

    def start_of(self, key: RequestKey) -> int:
        """Tokens of a prompt under way whose KV is there or being fetched."""
        return self._prompts[key].computed

    def fetched(self, key: RequestKey, *, failed: bool = False) -> bool:
        """The KV of a prompt's first tokens is in its blocks; with `failed` it is not, and they are computed instead.

        Returns False for a prompt that was cancelled meanwhile.
        """
        prompt = self._prompts[key]
        prompt.fetching = False
        if prompt.cancelled:
            del self._prompts[key]
            self._free(key)
            return False
        if failed:  # what others may hold is not written to
            self._unshare(key)
            self._pending_tokens += prompt.computed - prompt.shared_tokens
            prompt.planned = prompt.computed = prompt.shared_tokens
        elif key in self._residents:
            self._residents[key].filled = True
        return True

    def compute_whole(self, key: RequestKey) -> bool:
        """Nothing is fetched for this prompt after all. False, and nothing changes, if it has begun."""
        prompt = self._prompts.get(key)
        if prompt is None or prompt.started:
            return False
        self._pending_tokens += prompt.computed
        prompt.planned = prompt.computed = 0
        prompt.fetching, prompt.chain = False, None
        return True

    def done(self, chunk: Chunk) -> bool:
        """The chunk has been computed. Returns True if that completes the prompt (its blocks stay held).

        Returns False also for a prompt that was cancelled meanwhile: its result must not be used.
        """
        prompt = self._prompts.get(chunk.key)
        if prompt is None or prompt.computed != chunk.start:
            raise AccountingError(f"{chunk} was not the next chunk of its prompt", request_id=chunk.key.request_id)
        prompt.computed += chunk.count
        if not prompt.cancelled:
            self._pending_tokens -= chunk.count
            if prompt.computed < prompt.tokens:
                return False
            del self._prompts[chunk.key]
            return True
        if not prompt.in_flight:
            del self._prompts[chunk.key]
            self._free(chunk.key)
        return False

    def cancel(self, key: RequestKey) -> bool:
        """Compute no more of this prompt. Its blocks are freed now, or when the work in flight has ended.

        Returns False if it is not (or no longer) being prefilled: blocks of a completed prompt stay held until
        `release`.
        """
        prompt = self._prompts.get(key)
        if prompt is None or prompt.cancelled:
            return False
        self._pending_tokens -= prompt.tokens - prompt.computed
        if prompt.in_flight and prompt.started and key not in self._to_fetch:
            prompt.cancelled = True
            return True
        if key in self._to_fetch:
            self._to_fetch.remove(key)
        del self._prompts[key]
        self._free(key)
        return True

    def cut(self, key: RequestKey) -> int:
        """Complete a prompt with the tokens that are computed so far. Returns their number.

        Returns 0, and nothing changes, if there are none yet, or work on it is in flight.
        """
        prompt = self._prompts.get(key)
        if prompt is None or not prompt.started or prompt.cancelled or prompt.in_flight:
            return 0
        if prompt.computed:
            self._pending_tokens -= prompt.tokens - prompt.computed
            del self._prompts[key]
        return prompt.computed

    def blocks_of(self, key: RequestKey) -> list[int]:
        """The blocks of a started prompt, in order, until `release`."""
        return self._allocator.blocks_of(key)

    def release(self, key: RequestKey) -> None:
        """Free the blocks of a completed prompt. Idempotent."""
        if key in self._prompts:
            raise AccountingError(f"{key} is still being prefilled", request_id=key.request_id)
        self._free(key)

    def check_integrity(self) -> None:
        """Raises AccountingError if prompts, blocks and counters do not match."""
        pending = sum(p.tokens - p.computed for p in self._prompts.values() if not p.cancelled)
        if pending != self._pending_tokens:
            raise AccountingError(f"pending tokens: counted {self._pending_tokens}, recount {pending}")
        for key, prompt in self._prompts.items():
            held = len(self._allocator.blocks_of(key))
            if held != (self._blocks_for(prompt.tokens) if prompt.started else 0):
                raise AccountingError(f"{key} holds {held} blocks for {prompt.tokens} tokens, started {prompt.started}")
        self._prefixes.check_integrity(list(self._residents.values()))
        self._allocator.check_integrity()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
