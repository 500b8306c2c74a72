"""Decode iterations computed one kernel after another, without graphs; works on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from alignedserve.engine.batch import ForwardItem, build_batch
from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.sampling.sampler import SampledToken, Sampler, SampleRow, upload
from alignedserve.errors import AccountingError, GrammarError, NumericsError
from alignedserve.grammar.rows import begin_masks
from alignedserve.metrics import Page

Result = SampledToken | Exception


class EagerDecode(DecodeEngine):
    """A model runner and a sampler. On a CPU an iteration is over when `launch` returns.

    On CUDA `launch` submits the work and returns, unless a row's choice needs the host (`ahead`) or is made among the
    most likely tokens (top_k, top_p). `overlaps`: choose on the device and answer later, on a CPU too.
    """

    def __init__(self, runner: ModelRunner, *, overlaps: bool | None = None) -> None:
        self._runner = runner
        self._sampler = Sampler()
        self._overlaps = runner.loaded.device.type == "cuda" if overlaps is None else overlaps
        self._last: _Known | _OnDevice | None = None

    @property
    def overlaps(self) -> bool:
        return self._overlaps

    def ahead(self, rows: Sequence[SampleRow]) -> bool:
        return not any(row.needs_host or (row.grammar is not None and not self._overlaps) for row in rows)

    @torch.inference_mode()
    def launch(self, items: Sequence[DecodeItem]) -> DecodeStep:
        try:
            if not self._overlaps:
                self._begin_masks(items)
            self._last = self._compute(items)
        except Exception as error:
            self._last = _Known([error] * len(items), error)
        return self._last

    def _begin_masks(self, items: Sequence[DecodeItem]) -> None:
        """Fill the masks while the forward pass computes on this thread."""
        rows = [item.row for item in items if item.row.grammar is not None]
        grammars = [row.grammar for row in rows if row.grammar is not None]
        begin_masks(grammars, [row.output_token_ids for row in rows], self._runner.loaded.info.vocab_size)

    def warm_up(self) -> None:
        self._runner.warm_up()

    def device_fault(self) -> Exception | None:
        return self._runner.device_fault()

    def show_metrics(self, page: Page) -> None:
        self._runner.show_metrics(page)

    def _compute(self, items: Sequence[DecodeItem]) -> _Known | _OnDevice:
        if isinstance(self._last, _OnDevice) and any(item.token_id is None for item in items):
            return self._choose(items, self._forward_after(self._last, items))
        chosen = {index: self._chosen(item) for index, item in enumerate(items) if item.token_id is None}
        failed = {index: result for index, result in chosen.items() if isinstance(result, Exception)}
        if failed:  # items that follow a failed item fail by the same error
            left = [item for index, item in enumerate(items) if index not in failed]
            found = iter(self._compute(left).tokens() if left else ())
            return _Known([failed[index] if index in failed else next(found) for index in range(len(items))])
        forward = [_forward_item(item) for item in items]
        for index, result in chosen.items():
            if isinstance(result, SampledToken):
                forward[index].token_ids[0] = result.token_id
        return self._choose(items, self._runner.forward(forward))

    def _chosen(self, item: DecodeItem) -> Result:
        """The item's last token, which the host knows by now, or the error for which there is none."""
        if not isinstance(self._last, _Known):
            raise AccountingError("an item's token is that of the previous step, but there was none")
        return self._last.results[item.previous]

    def _forward_after(self, last: _OnDevice, items: Sequence[DecodeItem]) -> torch.Tensor:
        """Logits of a pass in which items without a token use those that the device chose last."""
        runner = self._runner
        forward = [_forward_item(item) for item in items]
        batch = build_batch(forward, runner.block_size, runner.cache.shape[0], runner.loaded.device)
        last.settle()
        missing = [index for index, item in enumerate(items) if item.token_id is None]
        device = runner.loaded.device
        tokens = last.chosen.index_select(0, upload([items[index].previous for index in missing], device))
        batch.input_ids[0].index_copy_(0, upload(missing, device), tokens)
        return runner.forward_batch(batch)

    def _choose(self, items: Sequence[DecodeItem], logits: torch.Tensor) -> _Known | _OnDevice:
        rows, positions = [item.row for item in items], [item.position for item in items]
        if self._overlaps and self.ahead(rows):
            return self._choose_on_device(logits, rows, positions)
        if any(item.token_id is None and item.row.grammar is not None for item in items):
            return _Later(lambda: self._sample(items, logits))
        return _Known(self._sample(items, logits))

    def _sample(self, items: Sequence[DecodeItem], logits: torch.Tensor) -> list[Result]:
        try:
            return list(self._sampler.sample(logits, [item.row for item in items], [item.position for item in items]))
        except Exception:  # choose one by one: only the items at fault fail
            return [self._choose_alone(item, logits[row : row + 1]) for row, item in enumerate(items)]

    def _choose_on_device(self, logits: torch.Tensor, rows: Sequence[SampleRow], positions: Sequence[int]) -> _OnDevice:
        """Rows under a grammar are chosen when the step is settled, since their last token may not be known yet."""
        masked = [index for index, row in enumerate(rows) if row.grammar is not None]
        chosen, finite = self._sampler.choose(logits, rows, positions)
        if not masked:
            return _OnDevice(chosen, finite)

        def choose() -> dict[int, GrammarError]:
            where = upload(masked, logits.device)
            own = logits if len(masked) == len(rows) else logits.index_select(0, where)
            places = [positions[index] for index in masked]
            tokens, _, errors = self._sampler.choose_masked(own, [rows[index] for index in masked], places)
            chosen.index_copy_(0, where, tokens)
            return {masked[index]: error for index, error in errors.items()}

        return _OnDevice(chosen, finite, choose)

    def _choose_alone(self, item: DecodeItem, logits: torch.Tensor) -> Result:
        try:
            return self._sampler.sample(logits, [item.row], [item.position])[0]
        except Exception as error:
            return error


def _forward_item(item: DecodeItem) -> ForwardItem:
    return ForwardItem([item.token_id or 0], item.kv_tokens, list(item.block_ids), "last", item.rank)


class StagedDecode(EagerDecode):
    """Iterations over the stages of a pipeline: `launch` returns when the first stage has computed its part."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, overlaps=False)

    @property
    def depth(self) -> int:
        return self._runner.depth

    def ahead(self, rows: Sequence[SampleRow]) -> bool:
        return False

    def launch(self, items: Sequence[DecodeItem]) -> DecodeStep:
        return self._begun(items, lambda: self._runner.begin([_forward_item(item) for item in items]))

    def _begun(self, items: Sequence[DecodeItem], begin: Callable[[], Callable[[], torch.Tensor]]) -> DecodeStep:
        """`begin` begins the pass of the items; what it returns waits for their logits."""
        try:
            logits = begin()
        except Exception as error:
            return _Known([error] * len(items), error)

        def choose() -> list[Result]:
            try:
                self._begin_masks(items)  # only now: one batch is begun at a time, beside the wait for the last stage
            finally:
                found = logits()
            return self._sample(items, found)

        return _Later(choose)


class _Known(DecodeStep):
    """A step whose tokens the host already knows. `fault`: the error of the whole step."""

    def __init__(self, results: list[Result], fault: Exception | None = None) -> None:
        self.results = results
        self._fault = fault

    def tokens(self) -> list[Result]:
        if self._fault is not None:
            raise self._fault
        return self.results


class _Later(_Known):
    """A step whose tokens are chosen when they are requested: the last token of a row under a grammar is known then."""

    def __init__(self, sample: Callable[[], list[Result]]) -> None:
        super().__init__([])
        self._sample: Callable[[], list[Result]] | None = sample

    def tokens(self) -> list[Result]:
        if self._sample is not None:
            self.results, self._sample = self._sample(), None
        return self.results


class _OnDevice(DecodeStep):
    """A step whose tokens are on the device, `chosen` `[rows]`, and being copied to the host once it is settled.

    `choose` overwrites those of rows that need the last step's tokens on the host; it returns the rows' errors.
    """

    def __init__(
        self, chosen: torch.Tensor, finite: torch.Tensor, choose: Callable[[], dict[int, GrammarError]] | None = None
    ) -> None:
        self.chosen = chosen
        self._finite, self._choose = finite, choose
        self._errors: dict[int, GrammarError] = {}
        self._found: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        if choose is None:
            self.settle()

    @torch.inference_mode()
    def settle(self) -> None:
        """Choose what was not chosen yet. Called when the tokens of the step before this one are known to the host."""
        if self._found is not None:
            return
        if self._choose is not None:
            self._errors, self._choose = self._choose(), None
        found = torch.stack((self.chosen, self._finite.to(self.chosen.dtype)))
        if self.chosen.is_cuda:
            pinned = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            found = pinned.copy_(found, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.chosen.device))
        self._found = found

    def tokens(self) -> list[Result]:
        self.settle()
        assert self._found is not None
        if self._copied is not None:
            self._copied.synchronize()
        chosen, finite = self._found.tolist()
        return [
            NumericsError("the model computed NaN or infinite logits", rows=[row])
            if not good
            else self._errors.get(row) or SampledToken(token)
            for row, (token, good) in enumerate(zip(chosen, finite, strict=True))
        ]
