"""Chooses the shortest path of candidates from a shard to their decode instance, if the pool has several shards.

Through a candidate buffer, a copy crosses the network once if the buffer is on another node than the shard, and again
if the decode instance is on another node than the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.request import RequestKey
from alignedserve.scheduler.core.instances import DecodeView, PrefillView
from alignedserve.scheduler.core.request_table import Record
from alignedserve.scheduler.core.state import CoreState
from alignedserve.scheduler.instance.plan import BufferKind

PrefetchPath = tuple[PrefillView | None, Sequence[Record]]
"""The prefill instance through whose buffer the requests go; None: the decode instance copies from the pool itself."""


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
    ) -> list[PrefetchPath]:
        """Split candidates, for which the buffer of `prefill` was chosen, into paths; there is mostly one.

        If no paired buffer is on the decode instance's node, it copies candidates on its own node directly, up to
        `direct_blocks`. The others go through one of the buffers with an equally good link and enough room: the one on
        the node that holds most of them.
        """
        direct = self._direct(decode, records, direct_blocks)
        others = [record for record in records if record.key not in direct]
        paths: list[PrefetchPath] = []
        if direct:
            paths.append((None, [record for record in records if record.key in direct]))
        if others:
            paths.append((self._nearest(decode, prefill, kind, others), others))
        return paths

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
