"""A scheduler core with its instances, driven by events and by a clock that a test sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from alignedserve.config import ClusterConfig, Config, DecodeConfig, KvPoolConfig, PrefillConfig, SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import Action, MarkUrgent
from alignedserve.scheduler.core.scheduler_core import SchedulerCore

BLOCK = 4

Kind = TypeVar("Kind")


def key(name: object, epoch: int = 0) -> RequestKey:
    return RequestKey(str(name), epoch)


def decode_report(
    decode_id: str = "d0",
    cache: int = 100,
    free: int | None = None,
    running: int = 0,
    shortest: int = 0,
    longest: int = 0,
    batch_id: int = 0,
    *,
    waits: int = 0,
    formed: tuple[int, int] | None = None,
) -> ev.DecodeReported:
    """`formed`: shortest and longest prefix of the batch as it was formed; None: those of all running requests."""
    free = cache if free is None else free
    lengths = shortest, longest
    formed = lengths if formed is None else formed
    return ev.DecodeReported(decode_id, cache, free, running, *lengths, batch_id, 0, 0, waits, None, *formed)


def only(actions: Iterable[Action], kind: type[Kind]) -> list[Kind]:
    return [action for action in actions if isinstance(action, kind)]


def marked(actions: Iterable[Action]) -> tuple[RequestKey, ...]:
    """The requests that a decode instance learns are overdue."""
    (mark,) = only(actions, MarkUrgent)
    return mark.keys


class CoreCell:
    """`batch` and `requests` are the numbers of blocks of the buffers. The accounting is checked after every action.

    `homes`: with several shards of the pool ("k0", "k1" and so on), the shard that each instance writes to. `pool` is
    the size of each shard.
    """

    def __init__(
        self,
        prefills: int = 1,
        decodes: int = 1,
        pool: int = 1000,
        batch: int = 40,
        requests: int = 20,
        prefetch: bool = True,
        cache: int = 100,
        queue_tokens: int = 8192,
        growth_reserve: float = 0.05,
        max_running: int = 256,
        homes: Mapping[str, str] | None = None,
        most_prompt: int = 1000,
        **scheduler: Any,
    ) -> None:
        scheduler.setdefault("min_batch_requests", 3)
        self.core = SchedulerCore(
            Config(
                cluster=ClusterConfig(prefetch=prefetch),
                kv_pool=KvPoolConfig(block_size=BLOCK, growth_reserve=growth_reserve),
                prefill=PrefillConfig(queue_tokens=queue_tokens),
                decode=DecodeConfig(max_running=max_running),
                scheduler=SchedulerConfig(leaf_tokens=4, **scheduler),
            ),
            BLOCK,
        )
        self.now_s = 0.0
        prefill_ids = tuple(f"p{i}" for i in range(prefills))
        decode_ids = tuple(f"d{i}" for i in range(decodes))
        self.homes = homes or {}
        self.pools = tuple(sorted(set(self.homes.values()))) or ("pool",)
        if homes:
            self.do(ev.ShardsChanged(self.pools, tuple(homes.items())))
        for role, ids in ("prefill", prefill_ids), ("decode", decode_ids), ("kv_pool", self.pools):
            for name in ids:
                self.do(ev.InstanceJoined(role, name))
        for name in prefill_ids:
            self.do(ev.PrefillReported(name, 0, most_prompt, batch, batch, requests, requests))
        self.do(ev.PairsChanged(tuple((name, prefill_ids if prefetch else ()) for name in decode_ids)))
        for name in self.pools:
            self.do(ev.PoolReported(name, pool, pool))
        for name in decode_ids:
            self.do(decode_report(name, cache))

    def do(self, event: ev.Event, after_s: float = 0.0) -> list[Action]:
        self.now_s += after_s
        actions = self.core.handle(event, self.now_s)
        self.core.check_integrity()
        return list(actions)

    def submit(
        self, *names: object, tokens: int = 10, most: int = 20, gateway: str = "gw", priority: int = 0
    ) -> list[Action]:
        """Submit one group. Returns the actions that follow."""
        metas = [
            ev.RequestMeta(key(name), tokens, most, f"group-{names[0]}", gateway, priority=priority) for name in names
        ]
        return self.do(ev.Submitted(tuple(metas)))

    def prefilled(
        self, name: object, tokens: int = 10, new_blocks: int | None = None, pool_id: str = ""
    ) -> list[Action]:
        """By default, commit to the shard of the instance that computed the prompt."""
        blocks = -(-tokens // BLOCK)
        record = self.core._state.table.get(key(name))
        if not pool_id and record is not None:
            pool_id = self.homes.get(record.prefill_id, "")
        return self.do(ev.Prefilled(key(name), tokens, blocks, blocks if new_blocks is None else new_blocks, pool_id))

    def wait(self, name: object, tokens: int = 10, most: int | None = None, priority: int = 0) -> list[Action]:
        """Submit and prefill. Returns the actions after the prefill."""
        self.submit(name, tokens=tokens, most=most or tokens + 10, priority=priority)
        return self.prefilled(name, tokens)

    def make_busy(
        self, decode_id: str = "d0", lengths: tuple[int, int] = (10, 10), free: int = 0, name: str = "busy"
    ) -> None:
        """The decode instance runs one request, and has no room for more."""
        self.wait(f"{name}-{decode_id}", lengths[0])
        self.do(ev.Joined(decode_id, (key(f"{name}-{decode_id}"),)))
        self.do(decode_report(decode_id, free=free, running=1, shortest=lengths[0], longest=lengths[1], batch_id=1))

    def states(self) -> dict[Any, int]:
        return {state: count for state, count in self.core.describe().items() if count}
