"""How candidates get from a shard of the pool to their decode instance, where the pool has several: the shortest way.

Through a buffer they cross the network once where it is on another node than the shard, and again where the decode
instance is on another node than the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.request import RequestKey
from alignedserve.scheduler.core.events import BufferKind
from alignedserve.scheduler.core.instances import DecodeView, PrefillView
from alignedserve.scheduler.core.request_table import Record
from alignedserve.scheduler.core.state import CoreState

Way = tuple[PrefillView | None, Sequence[Record]]
"""Through whose buffer these go; None: the decode instance copies them from the pool itself."""


class PrefetchPaths:
    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._instances = state.instances

    def split(
        self,
        decode: DecodeView,
        prefill: PrefillView,
        kind: BufferKind,
        records: Sequence[Record],
        direct_blocks: int,
    ) -> list[Way]:
        """The ways of candidates that `prefill` was chosen for, of its buffers' room; most of them are one.

        What lies on the decode instance's own node, where none of its buffers is, it copies from there: at most
        `direct_blocks`. For the others: of the buffers that are linked as well and have the room as well, one on the
        node that most of them lie on.
        """
        direct = self._direct(decode, records, direct_blocks)
        others = [record for record in records if record.key not in direct]
        ways: list[Way] = []
        if direct:
            ways.append((None, [record for record in records if record.key in direct]))
        if others:
            ways.append((self._nearest(decode, prefill, kind, others), others))
        return ways

    def _direct(self, decode: DecodeView, records: Sequence[Record], blocks: int) -> set[RequestKey]:
        home = self._state.home(decode.decode_id)
        if home is None or any(self._state.home(view.prefill_id) is home for view in self._instances.paired(decode)):
            return set()
        found: set[RequestKey] = set()
        for record in records:
            if record.shard is home and record.blocks <= blocks:
                found.add(record.key)
                blocks -= record.blocks
        return found

    def _nearest(
        self, decode: DecodeView, prefill: PrefillView, kind: BufferKind, records: Sequence[Record]
    ) -> PrefillView:
        total = sum(record.blocks for record in records)
        rank = self._instances.link_rank(decode, prefill)
        best, most = prefill, self._blocks_near(prefill, records)
        for other in self._instances.paired(decode):
            if self._instances.link_rank(decode, other) != rank or other.room(kind) < total:
                continue
            near = self._blocks_near(other, records)
            if near > most:
                best, most = other, near
        return best

    def _blocks_near(self, prefill: PrefillView, records: Sequence[Record]) -> int:
        home = self._state.home(prefill.prefill_id)
        return sum(record.blocks for record in records if record.shard is home)
