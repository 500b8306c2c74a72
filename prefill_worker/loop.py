"""The thread that computes prompts in chunks, up to the first token. It never waits for another process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from alignedserve.config import PrefillConfig
from alignedserve.control.compute_thread import ComputeThread
from alignedserve.control.convert import failure_event, logprob_to_proto, token_event
from alignedserve.control.passes import PassMeter
from alignedserve.engine.batch import LogitRows
from alignedserve.engine.live import LiveRequest
from alignedserve.engine.runner import ForwardItem, ModelRunner
from alignedserve.engine.sampling.sampler import SampledToken, Sampler
from alignedserve.errors import AlignedServeError, CancelledError, TransferError
from alignedserve.grammar.compiled import Grammars
from alignedserve.metrics import Page
from alignedserve.prefill_worker.jobs import Base, Computed, PrefilledJob, PromptJob
from alignedserve.prefill_worker.layerwise import Layerwise, PassCopies
from alignedserve.request import FinishReason, RequestKey, RequestSpec, Stage
from alignedserve.scheduler.cost.step import ChunkShape, StepCost
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.prefill_chunks import Chunk, ChunkScheduler
from alignedserve.scheduler.instance.resident import BlockChain
from alignedserve.scheduler.priorities import rank_of
from alignedserve.text import Tokenizer
from alignedserve.transfer.completion import Completion

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Fetch = Callable[[RequestKey, Base, Sequence[int]], Completion]


@dataclass(slots=True)
class _Pass:
    """A pass under way. `logits` waits for it; None if it could not begin, because of `error`."""

    plan: Sequence[Chunk]
    items: Sequence[ForwardItem]
    copies: PassCopies | None
    begun_s: float
    logits: Callable[[], torch.Tensor] | None = None
    error: Exception | None = None

    def result(self) -> torch.Tensor:
        if self.logits is None:
            assert self.error is not None
            raise self.error
        return self.logits()


class PrefillLoop(ComputeThread[[]]):
    """Chunked prefill, first come first served. `post` is called on the loop's own thread with each result."""

    def __init__(
        self,
        prefill_id: str,
        runner: ModelRunner,
        allocator: BlockAllocator,
        config: PrefillConfig,
        tokenizer: Tokenizer | None,
        fetch: Fetch,
        post: Callable[[Computed], None],
        cost: StepCost | None = None,
        layerwise: Layerwise | None = None,
        grammars: Grammars | None = None,
        *,
        caches: bool = False,
    ) -> None:
        """`fetch` starts a copy of blocks of the pool into blocks of the instance's cache.

        `caches`: the KV of prompts whose requests have all ended is to be cached.

        `layerwise`: the KV of long prompts goes to the pool while they are computed.
        """
        super().__init__("prefill")
        self._cost = cost
        self._layerwise = layerwise
        self._caches = caches
        self._prefill_id = prefill_id
        self._runner = runner
        self._sampler = Sampler()
        self._config = config
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._fetch = fetch
        self._post = post
        self._chunks = ChunkScheduler(allocator, runner.block_size)
        self._jobs: dict[RequestKey, PromptJob] = {}
        self._lead_of: dict[RequestKey, RequestKey] = {}
        self.passes = 0
        self.repeated_tokens = 0  # tokens computed again for requests that were submitted again
        self.reused_tokens = 0  # tokens of such requests whose KV the pool still had
        self.pass_meter = PassMeter()
        self._under_way: list[_Pass] = []  # the oldest first; more than one in a pipeline only
        self._finished_s = 0.0  # when the last one did

    # ---- called from the event loop

    def warm_up(self) -> None:
        """Before `start`: the first pass is slower than any that follows."""
        with self.meter.step(1.0):
            self._runner.warm_up()

    def submit(self, specs: Sequence[RequestSpec], base: Base | None = None, pin: RequestKey | None = None) -> None:
        """Queue the requests of one group. Only the first must have the prompt; the others get it from there.

        `pin`: the request that holds a cached `base`, if it is not the first.
        """
        self.tell(lambda: self._add(specs, base, pin or specs[0].key))

    def cancel(self, keys: Sequence[RequestKey]) -> None:
        self.tell(lambda: self._cancel(keys))

    def cancel_all(self) -> None:
        self.tell(lambda: self._cancel(list(self._lead_of)))

    def give_up_bases(self, pool_id: str) -> None:
        """Prompts that have not begun are computed whole if what they would fetch is cached in this shard."""
        self.tell(lambda: self._give_up_bases(pool_id))

    def report_lost(self, gateway_address: str) -> None:
        """Report every request of that gateway lost; the scheduler then has each cancelled here."""
        self.tell(lambda: self._post(Computed(lost=self._of_gateway(gateway_address))))

    def release(self, lead: RequestKey) -> None:
        """Free the cache blocks of a job, whose KV is elsewhere now."""
        self.tell(lambda: self._chunks.release(lead))

    def ask(self, question: Callable[[ChunkScheduler], Result]) -> Future[Result]:
        """Evaluate `question` on this thread's state, between two passes."""
        return self._ask(lambda: question(self._chunks))

    @property
    def idle(self) -> bool:
        """Whether the thread has no prompt. A prompt that was just submitted may not be counted yet."""
        return not self._jobs

    def show_metrics(self, page: Page) -> None:
        meaning = "prompt tokens sent to the instance and not yet computed"
        page.gauge("prefill_pending_tokens", meaning, self.pending_tokens)
        page.counter("prefill_passes_total", "forward passes", self.passes)
        page.counter("prefill_seconds_total", "seconds in passes", self.pass_meter.total_s)
        meaning = "the same passes as predicted by the cost model; 0 without one"
        page.counter("prefill_predicted_seconds_total", meaning, self.pass_meter.predicted_s)
        self._runner.show_metrics(page)
        page.counter("prefill_repeated_tokens_total", "tokens computed again after a loss", self.repeated_tokens)
        meaning = "tokens of requests submitted again whose KV the pool still had"
        page.counter("prefill_reused_tokens_total", meaning, self.reused_tokens)

    @property
    def pending_tokens(self) -> int:
        return self._chunks.pending_tokens

    # ---- the thread

    def turn(self) -> bool:
        """Handle the messages that have come in, and run one pass."""
        self._take_messages()
        if self._stopped:
            return False
        plan = self._chunks.plan(self._config.pass_tokens, self._config.max_requests)
        for lead in self._chunks.take_fetches():
            self._start_fetch(self._jobs[lead])
        passes = self._under_way
        if not plan and not passes:
            return False
        with self.meter.step(sum(chunk.count for each in (plan, *(other.plan for other in passes)) for chunk in each)):
            if plan:
                passes.append(self._begin(plan))
            if not plan or len(passes) == self._runner.depth:
                self._finish(passes.pop(0))
        return True

    def _woken(self, message: Callable[[], object]) -> None:
        message()

    def _on_fatal(self, error: BaseException) -> None:
        self._post(Computed(fatal=error))

    def _start_fetch(self, job: PromptJob) -> None:
        assert job.base is not None

        def ended(completion: Completion) -> None:
            self.tell(lambda: self._on_fetched(job, completion.error))

        shared = self._chunks.shared_blocks(job.lead)
        blocks = self._chunks.blocks_of(job.lead)[shared : len(job.base.block_ids)]
        try:
            self._fetch(job.pin, job.base.after(shared), blocks).add_callback(ended)
        except TransferError as error:
            failed = Completion("fetch")
            failed.finish(error)
            ended(failed)

    def _on_fetched(self, job: PromptJob, error: TransferError | None) -> None:
        if error is not None:
            logger.warning(
                "KV could not be fetched and is computed again: %s", error, extra={"request_id": job.lead.request_id}
            )
            job.base = None
        self._chunks.fetched(job.lead, failed=error is not None)

    def _add(self, specs: Sequence[RequestSpec], base: Base | None, pin: RequestKey) -> None:
        first = specs[0]
        for spec in specs[1:]:
            spec.prompt_token_ids = first.prompt_token_ids
        lead = first.key
        tokens = first.prompt_token_ids + first.output_token_ids
        try:
            job = PromptJob(lead, pin, [LiveRequest(spec, self._tokenizer, self._grammars) for spec in specs], tokens)
            if job.logprob_count is None:  # with prompt log-probabilities every row is needed
                job.base = base
            base_tokens = job.base.tokens if job.base is not None else 0
            chain = None
            if self._caches and base_tokens:
                chain = BlockChain.of(tokens[:base_tokens], first.cache_salt, self._runner.block_size)
            self._chunks.add(lead, len(tokens), base_tokens, rank_of(first.priority), chain)
        except Exception as error:  # if a request cannot be queued, only that request ends
            logger.warning("a prompt was refused: %s", error, extra={"request_id": lead.request_id})
            outcome = Computed(unpinned=[pin])
            for spec in specs:
                self._end(outcome, spec, _known(error))
            self._post(outcome)
            return
        self._jobs[lead] = job
        for spec in specs:
            self._lead_of[spec.key] = lead

    def _cancel(self, keys: Sequence[RequestKey]) -> None:
        outcome = Computed()
        for key in keys:
            lead = self._lead_of.pop(key, None)
            if lead is None:
                continue
            job = self._jobs[lead]
            for member in [member for member in job.members if member.key == key]:
                job.members.remove(member)
                self._end(outcome, member.spec, CancelledError(f"request {key.request_id} was cancelled"))
                if not job.members and not self._cache_begun(job, member.spec.cache_salt, outcome):
                    self._drop(job, outcome)
        self._post(outcome)

    def _cache_begun(self, job: PromptJob, salt: bytes, outcome: Computed) -> bool:
        """Have the computed part of a cancelled prompt cached. False if there is none, or nothing is cached."""
        computed = self._chunks.cut(job.lead) if self._caches else 0
        if not computed:
            return False
        del self._jobs[job.lead]
        self._let_go(job)
        blocks, tokens = self._chunks.blocks_of(job.lead), job.tokens[:computed]
        outcome.prefilled.append(PrefilledJob(job.lead, [], tokens, blocks, job.base, pin=job.pin, salt=salt))
        return True

    def _give_up_bases(self, pool_id: str) -> None:
        outcome = Computed()
        for job in self._jobs.values():
            base = job.base
            if base is not None and base.cached and base.pool_id == pool_id and self._chunks.compute_whole(job.lead):
                job.base = None
                outcome.let_go.append((job.pin, base))
        if outcome.let_go:
            self._post(outcome)

    def _of_gateway(self, address: str) -> list[RequestKey]:
        members = (member for job in self._jobs.values() for member in job.members)
        return [member.key for member in members if member.spec.gateway_address == address]

    def _drop(self, job: PromptJob, outcome: Computed) -> None:
        outcome.unpinned.append(job.pin)
        self._jobs.pop(job.lead, None)
        self._let_go(job)
        if not self._chunks.cancel(job.lead):
            self._chunks.release(job.lead)

    def _let_go(self, job: PromptJob) -> None:
        """Abandon the copies made ahead. They may read freed cache blocks, but what they copy is dropped."""
        if job.ahead is not None and self._layerwise is not None:
            self._layerwise.abandon(job.ahead)
            job.ahead = None

    def _end(self, outcome: Computed, spec: RequestSpec, error: AlignedServeError) -> None:
        """End a request with an error. The gateway of a cancelled request expects no event."""
        if isinstance(error, CancelledError):
            outcome.finished.append(spec.key)
        else:
            outcome.failed.append((spec.key, error))
            outcome.events.append((spec.gateway_address, failure_event(spec, error)))

    def _begin(self, plan: Sequence[Chunk]) -> _Pass:
        begun_s, now_ns = time.perf_counter(), time.time_ns()
        for chunk in plan:
            job = self._jobs[chunk.key]
            if not job.started:
                job.started = True
                for member in job.members:
                    member.spec.stopwatch.enter(Stage.PREFILL, now_ns)
                if self._layerwise is not None:
                    kept = len(job.base.kept_blocks(self._runner.block_size)) if job.base is not None else 0
                    job.ahead = self._layerwise.open(job.lead, len(job.tokens), chunk.start, kept)
        items = [self._item(chunk) for chunk in plan]
        copies = self._copies(plan)
        begun = _Pass(plan, items, copies, begun_s)
        try:
            begun.logits = self._runner.begin(items, copies.on_layer if copies is not None else None)
        except Exception as error:
            begun.error = error
        return begun

    def _finish(self, begun: _Pass) -> None:
        outcome, plan = Computed(), begun.plan
        try:
            logits = begun.result()
        except Exception as error:  # if a pass fails, only its requests end
            logger.exception("a prefill pass of %d prompts failed", len(plan))
            self._require_device()
            for chunk in plan:
                if (job := self._jobs.get(chunk.key)) is not None:
                    self._fail(job, outcome, error)
                self._chunks.done(chunk)
        else:
            if begun.copies is not None and self._layerwise is not None:
                begun.copies.end()
                self._layerwise.layers_ahead += begun.copies.layers
            self._take(plan, begun.items, logits, outcome)
            tokens, cached = sum(chunk.count for chunk in plan), sum(chunk.start for chunk in plan)
            now_s = time.perf_counter()
            self.pass_meter.add(tokens, cached, now_s - max(begun.begun_s, self._finished_s), self._predicted_s(plan))
            self._finished_s = now_s
        self.passes += 1
        self._post(outcome)

    def _require_device(self) -> None:
        """Raises a fault that makes the GPU unusable for this process, which must then be replaced."""
        if (fault := self._runner.device_fault()) is not None:
            raise fault

    def _predicted_s(self, plan: Sequence[Chunk]) -> float:
        """The predicted time of a pass in seconds; 0 without a cost model."""
        if self._cost is None:
            return 0.0
        return self._cost.step_s([ChunkShape(chunk.count, chunk.start) for chunk in plan], ())

    def _take(
        self, plan: Sequence[Chunk], items: Sequence[ForwardItem], logits: torch.Tensor, outcome: Computed
    ) -> None:
        """Give each chunk its rows of `logits`."""
        row = 0
        for chunk, item in zip(plan, items, strict=True):
            rows = {"all": len(item.token_ids), "last": 1, "none": 0}[item.logits]
            job, part = self._jobs.get(chunk.key), logits[row : row + rows]
            row += rows
            complete = self._chunks.done(chunk)
            if job is None:  # cancelled, or failed in an earlier pass, while this one was under way
                continue
            try:
                if item.logits == "all":
                    targets = job.tokens[chunk.start + 1 : chunk.start + chunk.count + 1]
                    count = job.logprob_count or 0
                    job.prompt_logprobs += self._sampler.prompt_logprobs(part[: len(targets)], targets, count)
                if complete:
                    self._complete(job, part[-1:], outcome)
            except Exception as error:
                logger.exception("prompt %s failed", chunk.key.request_id)
                self._require_device()
                self._fail(job, outcome, error)

    def _copies(self, plan: Sequence[Chunk]) -> PassCopies | None:
        """The copies that begin during the pass of `plan`; None if there are none."""
        if self._layerwise is None:
            return None
        fillings = []
        for chunk in plan:
            ahead = self._jobs[chunk.key].ahead
            if ahead is not None:
                blocks, end = self._chunks.blocks_of(chunk.key), chunk.start + chunk.count
                fillings.append(self._layerwise.filling(ahead, blocks, chunk.start, end, last=chunk.last))
        return self._layerwise.watch(fillings) if fillings else None

    def _item(self, chunk: Chunk) -> ForwardItem:
        job = self._jobs[chunk.key]
        end = chunk.start + chunk.count
        blocks = self._chunks.blocks_of(chunk.key)[: -(-end // self._runner.block_size)]
        wanted: LogitRows = "all" if job.logprob_count is not None else "last" if chunk.last else "none"
        return ForwardItem(job.tokens[chunk.start : end], chunk.start, blocks, wanted)

    def _complete(self, job: PromptJob, logits: torch.Tensor, outcome: Computed) -> None:
        """The prompt is computed: sample each member's next token, and pass on the members that go on."""
        if job.lead.epoch:
            reused = job.base.tokens if job.base is not None else 0
            self.reused_tokens += reused
            self.repeated_tokens += len(job.tokens) - reused
        chosen = self._choose(job, logits)
        now_ns = time.time_ns()
        del self._jobs[job.lead]
        going_on: list[RequestSpec] = []
        for member in job.members:
            del self._lead_of[member.key]
            spec = member.spec
            position = len(spec.output_token_ids)
            sampled = chosen.get(member.key)
            finish = FinishReason.LENGTH if sampled is None else member.push(sampled)
            if finish is None:
                spec.stopwatch.enter(Stage.POOL, now_ns)
                going_on.append(spec)
            else:
                spec.stopwatch.close(now_ns)
                outcome.finished.append(spec.key)
            tokens = () if sampled is None else (sampled.token_id,)
            logprobs = None if sampled is None else sampled.logprobs
            event = token_event(spec, tokens, position=position, logprobs=logprobs, finish=finish, timed=True)
            event.prefill_id = self._prefill_id
            if job.base is not None and job.base.cached:
                event.cached_tokens = job.base.tokens
            if member is job.members[0]:  # the gateway copies them to each member
                event.prompt_logprobs.extend(logprob_to_proto(entry) for entry in job.prompt_logprobs)
            outcome.events.append((spec.gateway_address, event))
        if not going_on:
            self._let_go(job)
        if not going_on and not self._caches:
            outcome.unpinned.append(job.pin)
            self._chunks.release(job.lead)
            return
        blocks, salt = self._chunks.blocks_of(job.lead), job.members[0].spec.cache_salt
        outcome.prefilled.append(
            PrefilledJob(job.lead, going_on, job.tokens, blocks, job.base, job.ahead, job.pin, salt)
        )

    def _choose(self, job: PromptJob, logits: torch.Tensor) -> dict[RequestKey, SampledToken]:
        """Sample a token for each member that may still generate (with `max_tokens` 0 only the prompt is computed)."""
        members = [member for member in job.members if member.spec.remaining_tokens > 0]
        if not members:
            return {}
        sampled = self._sampler.sample(logits.expand(len(members), -1), [member.row for member in members])
        return {member.key: token for member, token in zip(members, sampled, strict=True)}

    def _fail(self, job: PromptJob, outcome: Computed, error: Exception) -> None:
        for member in job.members:
            self._lead_of.pop(member.key, None)
            self._end(outcome, member.spec, _known(error))
        self._drop(job, outcome)


def _known(error: Exception) -> AlignedServeError:
    return error if isinstance(error, AlignedServeError) else AlignedServeError(f"prefill failed: {error}")
