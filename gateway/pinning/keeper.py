"""Keeps wanted prefixes pinned: a shard that is new, or whose memory was lost, gets the pins of the others. Those of
weights that are no longer the newest are computed again.

What is wanted is in the shards' own tables (`kv_pool/kept/pins.py`), and in the file `kv_pool.pinned_prompts`. The
gateway with the least id does the work, the others would take over. A file's prompt that was dropped comes back with
the next shard, or the next first gateway.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import orjson

from alignedserve.control.prefixes import cached_prefix
from alignedserve.errors import AlignedServeError, ConfigError, InvalidRequestError
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.pinning.board import PinBoard
from alignedserve.gateway.pinning.boundary import Beginning, parse_beginning, tokens_of
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

EVERY_S = 5.0
MOST_FILE_BYTES = 64 << 20


def read_beginnings(path: str | Path) -> list[Beginning]:
    """The beginnings in a file of JSON objects, one a line. Those without a name get one of their content.

    Raises ConfigError, which names the line.
    """
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > MOST_FILE_BYTES:
            raise ConfigError(f"{file} is larger than {MOST_FILE_BYTES >> 20} MiB")
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    found: dict[str, Beginning] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            beginning = parse_beginning(orjson.loads(line))
        except (ValueError, AlignedServeError) as error:
            raise ConfigError(f"{file}, line {number}: {error}") from error
        beginning.name = beginning.name or f"prompt-{hashlib.blake2b(line.strip(), digest_size=6).hexdigest()}"
        if beginning.name in found:
            raise ConfigError(f"{file}, line {number}: {beginning.name!r} is the name of another line, too")
        found[beginning.name] = beginning
    return list(found.values())


class PinKeeper:
    """For one event loop. `view`: the cluster's present one. `from_file`: beginnings that new shards get, too."""

    def __init__(
        self,
        gateway_id: str,
        board: PinBoard,
        model: ServedModel,
        view: Callable[[], sv.ClusterView],
        from_file: Iterable[Beginning] = (),
    ) -> None:
        self._gateway_id = gateway_id
        self._board = board
        self._model = model
        self._view = view
        self._from_file = list(from_file)
        self._seen: set[tuple[str, str]] = set()  # shards, and their memory, that have been given the file's prompts
        self._prefixes: dict[str, kp.CachedPrefix] = {}  # of the file's prompts, by name
        self._failing: set[tuple[str, str]] = set()  # pin and shard, once each has been logged
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._board.on:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def look(self) -> None:
        """Have every shard hold what it lacks. Raises UnavailableError if a shard does not answer."""
        pool_ids = self._board.shards()
        contents = {one.pool_id: one for one in await self._board.contents()}
        names = {pool_id: {one.pin.name for one in found.pins if not one.stale} for pool_id, found in contents.items()}
        everywhere = {one.pin.name for found in contents.values() for one in found.pins if one.pin.everywhere}
        stale = any(one.stale for found in contents.values() for one in found.pins)
        if stale or any(everywhere - names.get(pool_id, set()) for pool_id in pool_ids):
            for found in await self._board.contents(prefixes=True):
                for one in found.pins:
                    if one.stale and not one.pin.everywhere:
                        await self._copy(one.pin, found.pool_id, [found.pool_id])
                    if one.pin.everywhere and one.pin.name in everywhere:
                        everywhere.discard(one.pin.name)
                        lacking = [name for name in pool_ids if one.pin.name not in names.get(name, set())]
                        await self._copy(one.pin, found.pool_id, lacking)
        for pool_id in pool_ids:
            place = (pool_id, self._memory_of(pool_id))
            if place not in self._seen and await self._pin_file(pool_id, names.get(pool_id, set())):
                self._seen.add(place)

    # ---- internal

    async def _run(self) -> None:
        while True:
            try:
                if self._first() and self._model.info is not None:
                    await self.look()
            except AlignedServeError as error:  # not all processes are there yet, or not any more
                logger.debug("pins were not looked after: %s", error)
            except Exception:
                logger.exception("pins were not looked after")
            await asyncio.sleep(EVERY_S)

    async def _copy(self, pin: kp.PinnedPrefix, source: str, pool_ids: Sequence[str]) -> None:
        """Pin in these shards what `source` has, unless it is dropped while that goes on."""
        memory = self._memory_of(source)
        if not pool_ids:
            return
        await self._pin(pin, pool_ids)
        now = next((one for one in await self._board.contents() if one.pool_id == source), None)
        if now is None or self._memory_of(source) != memory:
            return  # it was lost with its memory, not by an order
        if pin.name not in {one.pin.name for one in now.pins}:
            await self._board.drop(kp.DropCached(names=[pin.name]))

    def _first(self) -> bool:
        """Whether this gateway is the one that keeps the pins."""
        gateways = [peer.process.id for peer in self._view().peers if peer.process.role == "gateway"]
        return min(gateways, default="") == self._gateway_id

    def _memory_of(self, pool_id: str) -> str:
        """Identifies the memory of a shard; a shard without its predecessor's memory has another value."""
        stores = (store for peer in self._view().peers if peer.process.id == pool_id for store in peer.stores)
        return next((store.memory for store in stores if store.store_id == pool_id), "")

    async def _pin_file(self, pool_id: str, held: set[str]) -> bool:
        """Whether the shard holds the file's prompts now, or never will."""
        done = True
        for beginning in self._from_file:
            assert beginning.name is not None
            if beginning.name in held:
                continue
            try:
                if beginning.name not in self._prefixes:
                    tokens = await tokens_of(self._model, beginning)
                    self._prefixes[beginning.name] = cached_prefix(tokens, (beginning.cache_salt or "").encode())
            except AlignedServeError as error:
                self._report(beginning.name, pool_id, error)
                done &= isinstance(error, InvalidRequestError)
                continue
            prefix = self._prefixes[beginning.name]
            done &= await self._pin(kp.PinnedPrefix(name=beginning.name, prefix=prefix, everywhere=True), [pool_id])
        return done

    async def _pin(self, pin: kp.PinnedPrefix, pool_ids: Iterable[str]) -> bool:
        done = True
        for pool_id in pool_ids:
            try:
                (held,) = await self._board.pin(pin, [pool_id])
                self._failing.discard((pin.name, pool_id))
                logger.info("pinned %r in %s: %d tokens", pin.name, pool_id, held.tokens)
            except AlignedServeError as error:
                done &= isinstance(error, InvalidRequestError)  # trying again changes nothing
                self._report(pin.name, pool_id, error)
        return done

    def _report(self, name: str, pool_id: str, error: AlignedServeError) -> None:
        level = logging.DEBUG if (name, pool_id) in self._failing else logging.WARNING
        self._failing.add((name, pool_id))
        logger.log(level, "%r could not be pinned in %s: %s", name, pool_id, error)
