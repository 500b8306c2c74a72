"""The memory that captured passes read and write, and how a batch is sent to it: one copy an iteration.

On the device there is one int32 tensor of inputs: columns of `capacity` rows (tokens, lengths, how each row draws), and
after them the changes of the block table since the last iteration, as places and values. All of a row's blocks are sent
when the row goes to another request, and only the few new ones while it stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from alignedserve.engine.batch import DecodeTable
from alignedserve.engine.decoding import DecodeItem
from alignedserve.engine.graphs.device import GraphDevice, Mark
from alignedserve.engine.graphs.drawing import DrawColumns
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.sampling.noise import row_keys
from alignedserve.engine.sampling.sampler import LOWEST_TEMPERATURE, SampleRow
from alignedserve.errors import AccountingError


class Column(IntEnum):
    """Rows of the inputs' first part; TOP_P takes two, as it is fp64."""

    TOKEN = 0
    PREVIOUS = 1  # the row of the previous iteration whose token this is; negative: TOKEN
    LENGTH = 2
    FIRST_KEY = 3
    SECOND_KEY = 4
    TOP_K = 5
    TEMPERATURE = 6
    MIN_P = 7
    TOP_P = 8


COLUMNS = 10


@dataclass(slots=True)
class Staging:
    """Page-locked memory of one iteration; two alternate."""

    inputs: torch.Tensor  # int32, like the device's
    reported: torch.Tensor  # int64 [capacity]
    sent: Mark | None = None  # set when the device has read `inputs`


class StepBuffers:
    """Buffers of one store and model, for at most `capacity` rows of at most `width` blocks."""

    def __init__(
        self, device: GraphDevice, where: torch.device, capacity: int, width: int, row_width: int, blocks: int
    ) -> None:
        """`blocks`: number of blocks in the store. `capacity` is rounded up to an even number.

        `row_width`: of the results, which are logits, or the hidden states of a pipeline's stage before the last.
        """
        self.capacity = capacity = capacity + capacity % 2
        self.width, self._blocks = width, blocks
        size = COLUMNS * capacity + 2 * capacity * width
        self._inputs = torch.zeros(size, dtype=torch.int32, device=where)
        self._table = torch.zeros(capacity, width, dtype=torch.int32, device=where)
        self.results = torch.zeros(capacity, row_width, dtype=torch.float32, device=where)
        self.chosen = torch.zeros(capacity, dtype=torch.int64, device=where)
        self.reported = torch.zeros(capacity, dtype=torch.int64, device=where)
        self.staging = tuple(
            Staging(device.host_buffer(size, torch.int32), device.host_buffer(capacity, torch.int64)) for _ in range(2)
        )
        self._columns = np.zeros((COLUMNS, capacity), dtype=np.int32)
        self._owners: list[SampleRow] = []  # of each row, in the previous iteration
        # Each row's list of blocks, and how many of them the device has
        self._held: list[tuple[Sequence[int], int]] = []
        self._top_p = self._columns[Column.TOP_P : Column.TOP_P + 2].reshape(-1).view(np.float64)
        self._device = device

    @classmethod
    def of(cls, runner: ModelRunner, device: GraphDevice, capacity: int) -> StepBuffers:
        """A request has room for as many tokens as the model has positions and the store has blocks."""
        info, blocks = runner.loaded.info, runner.cache.shape[0]
        width = min(blocks, -(-info.max_positions // runner.block_size))
        return cls(device, runner.loaded.device, capacity, width, runner.row_width, blocks)

    @property
    def nbytes(self) -> int:
        """On the device."""
        held = (self._inputs, self._table, self.results, self.chosen, self.reported)
        return sum(tensor.nbytes for tensor in held)

    # ---- inputs of the graphs

    def column(self, column: Column, rows: int) -> torch.Tensor:
        """int32 `[rows]`, or fp32 for the columns that hold it."""
        begin = column * self.capacity
        found = self._inputs[begin : begin + rows]
        return found.view(torch.float32) if column in (Column.TEMPERATURE, Column.MIN_P) else found

    def table(self, rows: int) -> DecodeTable:
        return DecodeTable(self.column(Column.LENGTH, rows), self._table[:rows])

    def draw_columns(self, rows: int) -> DrawColumns:
        begin = Column.TOP_P * self.capacity
        return DrawColumns(
            temperature=self.column(Column.TEMPERATURE, rows),
            min_p=self.column(Column.MIN_P, rows),
            top_p=self._inputs[begin : begin + 2 * rows].view(torch.float64),
            top_k=self.column(Column.TOP_K, rows),
            first_key=self.column(Column.FIRST_KEY, rows),
            second_key=self.column(Column.SECOND_KEY, rows),
        )

    # ---- inputs of an iteration

    def forget(self) -> None:
        """Make the next iteration send everything, since the content on the device has changed."""
        self._owners, self._held = [], []

    def fill_for_capture(self) -> None:
        """Fill every row with a request of one token in block 0."""
        self.forget()
        self._inputs.zero_()
        self._table.zero_()
        self.column(Column.LENGTH, self.capacity).fill_(1)
        self.column(Column.PREVIOUS, self.capacity).fill_(-1)

    def send(self, items: Sequence[DecodeItem], block_size: int, staging: Staging) -> torch.Tensor:
        """Fill the device's inputs with `items`, a row each; the rows after them become padding.

        Returns what was sent: int32, a part of `staging`. Raises AccountingError if an item's blocks do not cover its
        tokens, or do not exist.
        """
        places, values = self._update(items, block_size)
        if staging.sent is not None:
            staging.sent.wait()
        head, count = COLUMNS * self.capacity, len(places)
        buffer = staging.inputs.numpy()
        buffer[:head] = self._columns.reshape(-1)
        buffer[head : head + count] = places
        buffer[head + count : head + 2 * count] = values
        sent = staging.inputs[: head + 2 * count]
        self.take(sent)
        staging.sent = self._device.mark()
        return sent

    def take(self, sent: torch.Tensor) -> None:
        """Fill the device's inputs with what `send` has sent, here or in rank 0 of several."""
        head = COLUMNS * self.capacity
        count = (len(sent) - head) // 2
        self._inputs[: len(sent)].copy_(sent, non_blocking=True)
        if count:
            where = self._inputs[head : head + count].to(torch.int64)
            self._table.view(-1).index_copy_(0, where, self._inputs[head + count : head + 2 * count])

    def rows_in(self, sent: torch.Tensor) -> int:
        """How many rows of what `send` has sent are no padding. `sent`: in host memory."""
        begin = Column.LENGTH * self.capacity
        return int((sent[begin : begin + self.capacity] > 0).sum())

    def _update(self, items: Sequence[DecodeItem], block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Write the columns; returns places in the flat block table and their new block ids, both int32 `[changes]`."""
        count = len(items)
        columns = self._columns
        columns[: Column.TOP_P, count:] = 0
        columns[Column.PREVIOUS, count:] = -1
        columns[Column.TOKEN, :count] = [item.token_id or 0 for item in items]
        columns[Column.PREVIOUS, :count] = [item.previous if item.token_id is None else -1 for item in items]
        columns[Column.LENGTH, :count] = [item.kv_tokens + 1 for item in items]
        del self._owners[count:], self._held[count:]
        places: list[int] = []
        values: list[int] = []
        for row, item in enumerate(items):
            needed = item.kv_tokens // block_size + 1
            if len(item.block_ids) < needed or needed > self.width:
                raise AccountingError(
                    f"{len(item.block_ids)} blocks of {block_size} (at most {self.width}) do not cover "
                    f"{item.kv_tokens + 1} tokens"
                )
            begin = self._begin_row(row, item, needed)
            places += range(row * self.width + begin, row * self.width + needed)
            values += item.block_ids[begin:needed]
            if not item.row.sampling.greedy:
                columns[Column.FIRST_KEY : Column.SECOND_KEY + 1, row] = row_keys(item.row.sampling.seed, item.position)
        changed = np.array(values, dtype=np.int64)
        if len(changed) and (changed.min() < 0 or changed.max() >= self._blocks):
            raise AccountingError(f"a block id is outside this store of {self._blocks} blocks")
        return np.array(places, dtype=np.int32), changed.astype(np.int32)

    def _begin_row(self, row: int, item: DecodeItem, needed: int) -> int:
        """Assign the row to the item. Returns how many of the item's blocks the device already has in this row."""
        if row == len(self._owners):
            self._owners.append(item.row)
            self._held.append(((), 0))
        block_ids, count = self._held[row]
        # A request's list only grows. After an eviction it has a new list, possibly with the same first and last block.
        stays = self._owners[row] is item.row and block_ids is item.block_ids and 0 < count <= needed
        self._held[row] = item.block_ids, needed
        if stays:
            return count
        self._owners[row] = item.row
        self._describe(row, item.row)
        return 0

    def _describe(self, row: int, owner: SampleRow) -> None:
        """Write how the row draws, independent of the position."""
        sampling, columns = owner.sampling, self._columns
        columns[Column.TOP_K, row] = min(sampling.top_k, (1 << 31) - 1)
        floats = columns[Column.TEMPERATURE : Column.MIN_P + 1].view(np.float32)
        floats[0, row] = 0.0 if sampling.greedy else max(sampling.temperature, LOWEST_TEMPERATURE)
        floats[1, row] = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
        self._top_p[row] = sampling.top_p
