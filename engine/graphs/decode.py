"""Decode iterations from CUDA graphs: each is one copy in, the replay of two graphs, and one copy out."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.graphs.buffers import StepBuffers
from alignedserve.engine.graphs.captured import CapturedPasses, Progress
from alignedserve.engine.graphs.device import GraphDevice, Mark
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.sampling.sampler import SampledToken, Sampler, SampleRow
from alignedserve.errors import AccountingError, GrammarError, NumericsError
from alignedserve.metrics import Page

Results = list[SampledToken | Exception]


@dataclass(slots=True)
class GraphCounts:
    replays: int = 0
    padded_rows: int = 0  # computed in addition to those of the batches
    eager: int = 0  # iterations computed without a graph
    sampled_outside: int = 0  # rows whose tokens the Sampler chose on the host from a graph's logits

    def show(self, page: Page, sizes: Sequence[int], graph_memory_bytes: int) -> None:
        meaning = "on a GPU: iterations computed from a CUDA graph"
        page.counter("decode_graph_replays_total", meaning, self.replays)
        meaning = "on a GPU: padding rows computed beside those of the batches"
        page.counter("decode_graph_padded_rows_total", meaning, self.padded_rows)
        meaning = "on a GPU: iterations computed without a graph"
        page.counter("decode_eager_iterations_total", meaning, self.eager)
        meaning = "on a GPU: rows whose tokens were chosen outside the graph"
        page.counter("decode_sampled_outside_total", meaning, self.sampled_outside)
        page.gauge("decode_graph_sizes", "on a GPU: batch sizes that were captured", len(sizes))
        page.gauge("decode_graph_bytes", "on a GPU: memory of the graphs", graph_memory_bytes)


class GraphDecode(DecodeEngine):
    """Replays what `warm_up` captured. Larger batches, and models that cannot be captured, go to `eager`.

    `eager` computes the same tokens. Tokens that need no more than a row's own settings are chosen on the device; for
    the others the Sampler reads the graph's logits once the device is done with them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        eager: DecodeEngine,
        device: GraphDevice,
        sizes: Sequence[int],
        progress: Progress,
        tune: Callable[[], None] | None = None,
    ) -> None:
        """`sizes`: ascending; `progress(done, all)` is called for each. `tune` is called before a capture."""
        with torch.inference_mode(), device.scope():
            self._buffers = StepBuffers.of(runner, device, sizes[-1])
        self._passes = CapturedPasses(runner, self._buffers, device, sizes)
        self._runner, self._eager, self._device = runner, eager, device
        self._progress, self._tune = progress, tune
        self._sampler = Sampler()
        self._captured = False
        self._last: _Step | None = None
        self._in_flight: list[_GraphStep | None] = [None] * len(self._buffers.staging)
        self._turn = 0
        self.counts = GraphCounts()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes that are captured."""
        return self._passes.sizes if self._captured else ()

    @property
    def graph_memory_bytes(self) -> int:
        """Device memory of graphs and their buffers; that of the graphs as measured while they were captured."""
        return self._buffers.nbytes + self._passes.memory_bytes

    @property
    def overlaps(self) -> bool:
        return self._captured or self._eager.overlaps

    def ahead(self, rows: Sequence[SampleRow]) -> bool:
        if not self._captured:
            return self._eager.ahead(rows)
        return len(rows) <= self._passes.sizes[-1] and not any(row.needs_host for row in rows)

    def show_metrics(self, page: Page) -> None:
        self.counts.show(page, self.sizes, self.graph_memory_bytes)

    def device_fault(self) -> Exception | None:
        return self._runner.device_fault()

    def warm_up(self) -> None:
        with torch.inference_mode(), self._device.scope():
            self._eager.warm_up()
            if self._tune is not None:
                self._tune()
            self._captured = self._passes.capture_if_possible(self._progress)

    def replay_seconds(self, rows: int, drawn: bool, count: int) -> float:
        """Device time of one replay of the last iteration, which had `rows` rows, averaged over `count` replays.

        Their tokens are discarded. Needs captured graphs, a last iteration whose tokens were taken, and no other rank.
        """
        if self._runner.driven:
            raise AccountingError("other ranks replay only what they are told")

        def again() -> None:
            self._passes.replay(rows, drawn)

        with torch.inference_mode():
            return self._device.seconds(again, count)

    def launch(self, items: Sequence[DecodeItem]) -> DecodeStep:
        if not self._captured:
            return self._eager.launch(items)
        with torch.inference_mode(), self._device.scope():
            try:
                self._last = self._launch(items)
            except Exception as error:
                self._buffers.forget()
                self._last = _FailedStep(error)
        return self._last

    def _launch(self, items: Sequence[DecodeItem]) -> _Step:
        last, fits = self._last, len(items) <= self._passes.sizes[-1]
        if last is not None:
            last.choose_masked()  # these, and the Sampler, need the logits before they are overwritten
            if last.outside:
                last.settle()
        if all(item.token_id is not None for item in items) or (fits and isinstance(last, _GraphStep) and last.chains):
            return self._compute(items, fits)
        known, lost = _resolved(items, last)
        step = self._compute(known, fits) if known else None
        return _PartStep(step, lost, len(items)) if lost or step is None else step

    def _compute(self, items: Sequence[DecodeItem], fits: bool) -> _Step:
        if fits:
            return self._replay(items)
        self.counts.eager += 1
        return _EagerStep(self._eager.launch(items))

    def _replay(self, items: Sequence[DecodeItem]) -> _GraphStep:
        buffers, rows = self._buffers, len(items)
        turn = self._turn = (self._turn + 1) % len(buffers.staging)
        before, self._in_flight[turn] = self._in_flight[turn], None
        if before is not None:
            before.finish()
        staging = buffers.staging[turn]
        sent = buffers.send(items, self._runner.block_size, staging)
        outside = [index for index, item in enumerate(items) if item.row.needs_host]
        masked = [index for index, item in enumerate(items) if item.row.masked]
        others = {*outside, *masked}
        drawn = any(not item.row.sampling.greedy for index, item in enumerate(items) if index not in others)
        size = self._passes.replay(rows, drawn, sent)
        self.counts.replays += 1
        self.counts.padded_rows += size - rows
        self.counts.sampled_outside += len(others)

        def report() -> Mark:
            with torch.inference_mode(), self._device.scope():
                staging.reported[:rows].copy_(buffers.reported[:rows], non_blocking=True)
                return self._device.mark()

        late = partial(self._choose_masked, masked, [items[index] for index in masked]) if masked else None
        step = _GraphStep(items, outside, staging.reported, report, self._choose, late)
        self._in_flight[turn] = step
        return step

    def _choose_masked(self, indices: Sequence[int], items: Sequence[DecodeItem]) -> dict[int, GrammarError]:
        """Choose the tokens of these rows of the last replay, on the device; returns the rows' errors."""
        with torch.inference_mode(), self._device.scope():
            buffers = self._buffers
            where = torch.tensor(indices, dtype=torch.int64).to(buffers.results.device, non_blocking=True)
            logits = buffers.results.index_select(0, where)
            rows, places = [item.row for item in items], [item.position for item in items]
            tokens, finite, errors = self._sampler.choose_masked(logits, rows, places)
            buffers.chosen.index_copy_(0, where, tokens)
            buffers.reported.index_copy_(0, where, torch.where(finite, tokens, -1))
            return {indices[index]: error for index, error in errors.items()}

    def _choose(self, indices: Sequence[int], items: Sequence[DecodeItem]) -> Results:
        """The Sampler's tokens for these rows of the last replay."""
        with torch.inference_mode(), self._device.scope():
            where = torch.tensor(indices, dtype=torch.int64).to(self._buffers.results.device, non_blocking=True)
            logits = self._buffers.results.index_select(0, where)
            try:
                return list(self._sampler.sample(logits, [item.row for item in items], [i.position for i in items]))
            except Exception:  # choose one by one: only the items at fault fail
                return [self._choose_alone(logits[index : index + 1], item) for index, item in enumerate(items)]

    def _choose_alone(self, logits: torch.Tensor, item: DecodeItem) -> SampledToken | Exception:
        try:
            return self._sampler.sample(logits, [item.row], [item.position])[0]
        except Exception as error:
            return error


def _resolved(items: Sequence[DecodeItem], last: _Step | None) -> tuple[list[DecodeItem], dict[int, Exception]]:
    """`items` with the tokens that the host knows by now; and, by index, the errors of items without a token."""
    if last is None:
        raise AccountingError("an item's token is that of the previous step, but there was none")
    results = last.settle()
    known: list[DecodeItem] = []
    lost: dict[int, Exception] = {}
    for index, item in enumerate(items):
        found = results[item.previous] if item.token_id is None else SampledToken(item.token_id)
        if isinstance(found, Exception):
            lost[index] = found
        else:
            known.append(replace(item, token_id=found.token_id))
    return known, lost


class _Step(DecodeStep):
    """A step whose tokens the engine may request too, if the next iteration needs them on the host.

    `outside`: rows of a graph whose logits the Sampler still has to read.
    """

    outside: Sequence[int] = ()

    def __init__(self) -> None:
        self._results: Results | None = None
        self._fault: Exception | None = None

    def tokens(self) -> Results:
        return self.settle()

    def settle(self) -> Results:
        """The tokens, computed once. Raises as `tokens`."""
        if self._results is None and self._fault is None:
            try:
                self._results = self._find()
            except Exception as error:
                self._fault = error
        if self._fault is not None:
            raise self._fault
        assert self._results is not None
        return self._results

    def choose_masked(self) -> None:
        """Choose the tokens of rows under a grammar, if that was not done yet. See `DecodeEngine.ahead`."""

    @abstractmethod
    def _find(self) -> Results: ...


class _GraphStep(_Step):
    def __init__(
        self,
        items: Sequence[DecodeItem],
        outside: list[int],
        reported: torch.Tensor,
        report: Callable[[], Mark],
        choose: Callable[[Sequence[int], Sequence[DecodeItem]], Results],
        choose_masked: Callable[[], dict[int, GrammarError]] | None = None,
    ) -> None:
        """`report` begins to copy the tokens to `reported`, once `choose_masked` has chosen the last of them."""
        super().__init__()
        self.outside = outside
        self._items, self._reported, self._choose = items, reported, choose
        self._report, self._choose_masked = report, choose_masked
        self._errors: dict[int, GrammarError] = {}
        self._done = report() if choose_masked is None else None

    @property
    def chains(self) -> bool:
        """Whether all tokens of the step are on the device, so that the next one can follow without the host."""
        return not self.outside

    def choose_masked(self) -> None:
        if self._done is None:
            assert self._choose_masked is not None
            self._errors = self._choose_masked()
            self._done = self._report()

    def finish(self) -> None:
        """Read what is needed from memory that is about to be reused; `tokens` raises the error, if any."""
        with contextlib.suppress(Exception):
            self.settle()

    def _find(self) -> Results:
        self.choose_masked()
        assert self._done is not None
        self._done.wait()
        results: Results = [
            self._errors.get(row) or SampledToken(token)
            if token >= 0
            else NumericsError("the model computed NaN or infinite logits for a row", rows=[row])
            for row, token in enumerate(self._reported[: len(self._items)].tolist())
        ]
        if self.outside:
            chosen = self._choose(self.outside, [self._items[index] for index in self.outside])
            for index, result in zip(self.outside, chosen, strict=True):
                results[index] = result
        return results


class _EagerStep(_Step):
    def __init__(self, step: DecodeStep) -> None:
        super().__init__()
        self._step = step

    def _find(self) -> Results:
        return self._step.tokens()


class _PartStep(_Step):
    """A step of which some items, by index in `lost`, were not computed."""

    def __init__(self, step: _Step | None, lost: dict[int, Exception], count: int) -> None:
        super().__init__()
        self._step, self._lost, self._count = step, lost, count
        self.outside = step.outside if step is not None else ()

    def choose_masked(self) -> None:
        if self._step is not None:
            self._step.choose_masked()

    def _find(self) -> Results:
        found = iter(self._step.settle() if self._step is not None else ())
        return [self._lost[index] if index in self._lost else next(found) for index in range(self._count)]


class _FailedStep(_Step):
    def __init__(self, fault: Exception) -> None:
        super().__init__()
        self._fault = fault

    def _find(self) -> Results:
        return []
