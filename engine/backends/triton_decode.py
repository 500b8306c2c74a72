"""Paged decode attention in Triton, for rows of one new token each, whatever their lengths.

The KV of all rows is laid end to end and divided into equal shares, one for each program that the chip runs at the same
time (SMs times programs an SM), so that the kernel does not wait for a long request. A share begins and ends inside
requests and may span many. A row that lies completely in a share is written at once. So a program has at most two
partial results (of its first and its last row), which a second kernel merges by their log-sum-exp. The shares are
computed on the device from the lengths, once for each pass and window, so that a replayed CUDA graph divides the
current contents.

With `split=False` each program takes one request's KV head, as kernels at the time of the paper did once requests times
heads filled the chip: the longest request determines how long the kernel takes.
"""

from __future__ import annotations

import math

import torch

from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.backends.triton_decode_kernels import combine_kernel, decode_kernel, plan_kernel
from alignedserve.engine.backends.triton_tuning import DecodeSetting, decode_setting, padded_dim, padded_group
from alignedserve.engine.batch import DecodeTable
from alignedserve.errors import AlignedServeError

NO_WINDOW = 2**31 - 1  # a window that hides nothing
INTERPRETED_PROGRAMS = 5  # for the interpreter, without a chip to fill
_LOG2E = math.log2(math.e)


class PagedDecode:
    """Decode attention over one store (see AttentionBackend for its shape). The KV of all tokens is already in it.

    `setting` replaces the tuned one and `programs` the number of programs that the work is split over, for sweeps and
    tests. `begin`, then `attend` for each layer; both only launch work, and read nothing that the device computes.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        *,
        split: bool = True,
        setting: DecodeSetting | None = None,
        programs: int | None = None,
    ) -> None:
        self._cache = cache
        _, _, self._kv_heads, _, self._block_size, self._head_dim = cache.shape
        self._split = split
        self._given_setting, self._given_programs = setting, programs
        self._heads = 0  # query heads that the four below are made for; 0: not yet
        self._setting = setting or decode_setting(self._head_dim, cache.element_size(), padded_group(1, 1))
        self._programs = 0
        self._part_out = self._part_lse = torch.empty(0)
        self._plans: dict[int, torch.Tensor] = {}  # by window; kept from pass to pass to reuse their memory
        self._planned: set[int] = set()
        self._table: DecodeTable | None = None
        self._rows: torch.Tensor | None = None

    def begin(self, table: DecodeTable, rows: torch.Tensor | None = None) -> None:
        """Serve the rows of `table` from now on: row `i` is packed token `rows[i]` (int64), or token `i`.

        Padding gives 0. Table entries after a row's last block are never read.
        """
        self._table, self._rows = table, rows
        self._planned.clear()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        options: AttentionOptions,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Write these rows of `out` `[tokens, heads, head_dim]` (contiguous), and of `lse` fp32 `[tokens, heads]`.

        `query` has the shape of `out`; the elements of a head are contiguous. `lse` is the natural logarithm of each
        softmax's denominator, including the sink.
        """
        table = self._table
        if table is None:
            raise AlignedServeError("decode attention was used before begin()")
        self._prepare(query.shape[1])
        window = NO_WINDOW if options.sliding_window is None else options.sliding_window
        plan = self._plan(table.lengths, window) if self._split else None
        group = query.shape[1] // self._kv_heads
        cut = {
            "kv_heads": self._kv_heads,
            "group": group,
            "head_dim": self._head_dim,
            "dim_pad": padded_dim(self._head_dim),
            "tile": self._setting.tile,
        }
        scaling, softcap = options.scaling * _LOG2E, 1.0
        if options.softcap is not None:  # the kernel's tanh uses exp2(2 * log2(e) * x)
            scaling, softcap = 2 * scaling / options.softcap, options.softcap * _LOG2E
        decode_kernel[(self._programs if self._split else len(table.lengths) * self._kv_heads,)](
            query, self._cache, out, lse, table.lengths, table.block_table, self._rows, options.sinks, plan,
            self._part_out, self._part_lse, query.stride(0), query.stride(1), self._cache.stride(0),
            table.block_table.stride(0), table.block_table.shape[1], len(table.lengths) - 1, layer, window,
            scaling, softcap, **cut, block_size=self._block_size,
            group_pad=padded_group(query.shape[1], self._kv_heads), split=self._split,
            has_softcap=options.softcap is not None, widen=self._widen,
            num_warps=self._setting.warps, num_stages=self._setting.stages,
        )  # fmt: skip
        if plan is not None:
            combine_kernel[(self._programs, group)](
                out, lse, table.lengths, self._rows, options.sinks, plan, self._part_out, self._part_lse, window,
                self._programs, **cut, num_warps=4,
            )  # fmt: skip

    @property
    def _widen(self) -> bool:
        """Triton's interpreter multiplies bf16 wrongly (3.6 to 3.9): only there, dot products are in fp32."""
        return self._cache.dtype is torch.bfloat16 and self._cache.device.type == "cpu"

    def _prepare(self, heads: int) -> None:
        """Choose the setting and allocate partial results, when the number of query heads is first known."""
        if self._heads == heads:
            return
        if self._heads:
            raise AlignedServeError(f"layers of one store have {self._heads} and {heads} query heads")
        rows = padded_group(heads, self._kv_heads)
        self._setting = self._given_setting or decode_setting(self._head_dim, self._cache.element_size(), rows)
        self._programs = self._given_programs or self._resident_programs()
        group = heads // self._kv_heads
        parts = 2 * self._programs * group if self._split else 1
        device = self._cache.device
        self._part_out = torch.empty(parts, self._head_dim, dtype=torch.float32, device=device)
        self._part_lse = torch.empty(parts, dtype=torch.float32, device=device)
        self._heads = heads

    def _resident_programs(self) -> int:
        """The number of programs that the chip runs at the same time."""
        if self._cache.device.type != "cuda":
            return INTERPRETED_PROGRAMS
        processors = torch.cuda.get_device_properties(self._cache.device).multi_processor_count
        return int(processors) * self._setting.programs_per_sm

    def _plan(self, lengths: torch.Tensor, window: int) -> torch.Tensor:
        """The shares of this pass, int32 `[programs + 1, 4]` (see `triton_decode_kernels`).

        Computed by the first layer of this window.
        """
        if window not in self._plans:
            self._plans[window] = torch.empty(self._programs + 1, 4, dtype=torch.int32, device=self._cache.device)
        plan = self._plans[window]
        if window not in self._planned:
            plan_kernel[(self._programs + 1,)](
                lengths, plan, len(lengths), window, self._programs, kv_heads=self._kv_heads,
                tile=self._setting.tile, num_warps=4,
            )  # fmt: skip
            self._planned.add(window)
        return plan
