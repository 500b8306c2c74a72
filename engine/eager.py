"""Decode iterations computed one kernel after another, without graphs; works on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignedserve.engine.batch import ForwardItem, build_batch
from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.sampling.sampler import SampledToken, Sampler, SampleRow, upload
from alignedserve.errors import AccountingError, NumericsError

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
        return not any(row.adjusts or row.sampling.logprobs is not None for row in rows)

    @torch.inference_mode()
    def launch(self, items: Sequence[DecodeItem]) -> DecodeStep:
        try:
            self._last = self._compute(items)
        except Exception as error:
            self._last = _Known([error] * len(items), error)
        return self._last

    def warm_up(self) -> None:
        self._runner.warm_up()

    def device_fault(self) -> Exception | None:
        return self._runner.device_fault()

    def _compute(self, items: Sequence[DecodeItem]) -> _Known | _OnDevice:
        if isinstance(self._last, _OnDevice) and any(item.token_id is None for item in items):
            return self._choose(items, self._forward_after(self._last, items))
        chosen = {index: self._chosen(item) for index, item in enumerate(items) if item.token_id is None}
        failed = {index: result for index, result in chosen.items() if isinstance(result, Exception)}
        if failed:  # items that follow a failed item fail by the same error
            left = [item for index, item in enumerate(items) if index not in failed]
            found = iter(self._compute(left).tokens() if left else ())
            return _Known([failed[index] if index in failed else next(found) for index in range(len(items))])
        forward = [ForwardItem([item.token_id or 0], item.kv_tokens, list(item.block_ids)) for item in items]
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
        forward = [ForwardItem([item.token_id or 0], item.kv_tokens, list(item.block_ids)) for item in items]
        batch = build_batch(forward, runner.block_size, runner.cache.shape[0], runner.loaded.device)
        missing = [index for index, item in enumerate(items) if item.token_id is None]
        device = runner.loaded.device
        tokens = last.chosen.index_select(0, upload([items[index].previous for index in missing], device))
        batch.input_ids[0].index_copy_(0, upload(missing, device), tokens)
        return runner.forward_batch(batch)

    def _choose(self, items: Sequence[DecodeItem], logits: torch.Tensor) -> _Known | _OnDevice:
        rows, positions = [item.row for item in items], [item.position for item in items]
        if self._overlaps and self.ahead(rows):
            return _OnDevice(*self._sampler.choose(logits, rows, positions))
        try:
            return _Known(list(self._sampler.sample(logits, rows, positions)))
        except Exception:  # choose one by one: only the items at fault fail
            return _Known([self._choose_alone(item, logits[row : row + 1]) for row, item in enumerate(items)])

    def _choose_alone(self, item: DecodeItem, logits: torch.Tensor) -> Result:
        try:
            return self._sampler.sample(logits, [item.row], [item.position])[0]
        except Exception as error:
            return error


class _Known(DecodeStep):
    """A step whose tokens the host already knows. `fault`: the error of the whole step."""

    def __init__(self, results: list[Result], fault: Exception | None = None) -> None:
        self.results = results
        self._fault = fault

    def tokens(self) -> list[Result]:
        if self._fault is not None:
            raise self._fault
        return self.results


class _OnDevice(DecodeStep):
    """A step whose tokens are on the device, `chosen` `[rows]`, and being copied to the host."""

    def __init__(self, chosen: torch.Tensor, finite: torch.Tensor) -> None:
        self.chosen = chosen
        self._found = torch.stack((chosen, finite.to(chosen.dtype)))
        self._copied: torch.cuda.Event | None = None
        if chosen.is_cuda:
            found = torch.empty(self._found.shape, dtype=chosen.dtype, pin_memory=True)
            self._found = found.copy_(self._found, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(chosen.device))

    def tokens(self) -> list[Result]:
        if self._copied is not None:
            self._copied.synchronize()
        chosen, finite = self._found.tolist()
        return [
            SampledToken(token) if good else NumericsError("the model computed NaN or infinite logits", rows=[row])
            for row, (token, good) in enumerate(zip(chosen, finite, strict=True))
        ]
