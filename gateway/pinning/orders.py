"""The operator's orders about the prefix cache, in JSON: pin, list and drop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from alignedserve.control.prefixes import cached_prefix
from alignedserve.control.supervisor_client import Order
from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.body.validation_errors import as_request_error
from alignedserve.gateway.body.values import Between, Body
from alignedserve.gateway.ledger.calls import caller
from alignedserve.gateway.pinning.board import PinBoard
from alignedserve.gateway.pinning.boundary import MOST_NAME, Beginning, parse_beginning, tokens_of
from alignedserve.proto import kv_pool_pb2 as kp

Json = dict[str, Any]

MOST_SESSIONS = 1000
_STRICT = ConfigDict(strict=True, extra="forbid")


class PinOrder(Beginning):
    name: Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
    node: str | None = None


class ListOrder(Body):
    model_config = _STRICT

    sessions: Annotated[int, Between(0, MOST_SESSIONS)] = 20


class DropOrder(Body):
    """A pin by `name`; with `all`, what is cached of a beginning, or of a salt."""

    model_config = _STRICT

    name: str | None = None
    all: bool = False
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class CacheOrders:
    """Carries out the orders. Each returns a JSON object, and raises the errors of `PinBoard`."""

    def __init__(self, board: PinBoard, model: ServedModel) -> None:
        self._board = board
        self._model = model

    async def pin(self, body: Json) -> Json:
        """Pin a beginning under a name."""
        order = _checked(PinOrder, body)
        pool_ids = self._board.shards(order.node or "")
        tokens = await tokens_of(self._model, order)
        prefix = cached_prefix(tokens, self._salt(order.cache_salt))
        pin = kp.PinnedPrefix(name=order.name, prefix=prefix, everywhere=not order.node)
        held = await self._board.pin(pin, pool_ids)
        shards = [
            {"shard": one.pool_id, "tokens": one.tokens, "blocks": one.blocks, "bytes": one.bytes} for one in held
        ]
        return {"name": order.name, "shards": shards}

    async def list(self, body: Json) -> Json:
        """Pins and sessions of each shard, and totals."""
        order = _checked(ListOrder, body)
        self._board.shards()
        return {"shards": [_shard(one) for one in await self._board.contents(most_sessions=order.sessions)]}

    async def drop(self, body: Json) -> Json:
        """End a pin, or remove what is cached of a beginning or a salt."""
        order = _checked(DropOrder, body)
        self._board.shards()
        beginning = order.model_dump(exclude={"name", "all", "cache_salt"}, exclude_none=True)
        described = beginning or order.cache_salt is not None
        if order.all == (order.name is not None) or (order.name is not None and described):
            raise InvalidRequestError("give the name of a pin, or all with text, messages or cache_salt", param="name")
        if order.all and not described:
            raise InvalidRequestError("all needs text, messages or cache_salt: what is to be dropped", param="all")
        wanted = kp.DropCached(names=[order.name] if order.name is not None else [])
        if order.all:
            tokens = await tokens_of(self._model, parse_beginning(beginning)) if beginning else []
            if beginning and not tokens:  # none would mean all of the salt
                message = "prompts that begin with this share no token: give more of it"
                raise InvalidRequestError(message, param="text")
            wanted.prefix.CopyFrom(cached_prefix(tokens, self._salt(order.cache_salt)))
        dropped = await self._board.drop(wanted)
        names = sorted({name for one in dropped.values() for name in one.names})
        return {"pins": names, "blocks": sum(one.blocks for one in dropped.values())}

    def _salt(self, salt: str | None) -> bytes:
        """As a prompt with this salt and the API key of this order has it."""
        cache = self._model.cache
        return b"" if cache is None else type(cache)((salt or "").encode(), cache.by_key).whole_salt(caller.get())


def _shard(found: kp.CacheContents) -> Json:
    size, block = found.block_bytes, found.block_size
    pins = [
        {
            "name": one.pin.name,
            "tokens": one.tokens,
            "blocks": one.blocks,
            "bytes": one.blocks * size,
            "hits": one.hits,
            "idle_s": None if one.idle_s < 0 else round(one.idle_s, 3),
            "everywhere": one.pin.everywhere,
        }
        for one in found.pins
    ]
    sessions = [
        {
            "name": one.name,
            "request_id": one.request_id,
            "tokens": one.blocks * block,
            "blocks": one.blocks,
            "bytes": one.blocks * size,
            "hits": one.turns - 1,
            "idle_s": round(one.idle_s, 3),
            "ending": one.ending,
            "expected_s": round(one.expected_s, 3) or None,
        }
        for one in found.sessions
    ]
    counts = {"capacity": found.capacity_blocks, "free": found.free_blocks, "cached": found.cached_blocks}
    return {
        "shard": found.pool_id,
        "pins": pins,
        "sessions": sessions,
        "session_count": found.session_count,
        "blocks": {**counts, "pinned": found.pinned_blocks},
        "block_bytes": size,
        "queried_tokens": found.queried_tokens,
        "hit_tokens": found.hit_tokens,
    }


def _checked(kind: type[Any], body: Json) -> Any:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise as_request_error(error) from None


def _described(kind: str, description: str, **more: Any) -> Json:
    return {"type": kind, "description": description, **more}


def _texts(description: str) -> Json:
    return _described("array", description, items={"type": "string"})


def _objects(description: str) -> Json:
    return _described("array", description, items={"type": "object"})


_NAME = _described("string", "The pin's name.")
_BEGINNING = {
    "text": _described("string", "The beginning of prompts of /v1/completions."),
    "messages": _objects("The first messages of chats."),
    "tools": _objects("The tools of these chats."),
    "cache_salt": _described("string", "The cache_salt of these prompts."),
}


def orders(cache: CacheOrders | None) -> Mapping[str, Order]:
    """The orders by path, below /alignedserve/. None: only their descriptions are wanted."""

    def of(name: str) -> Any:
        async def carry_out(_supervisor: Any, body: Json) -> Json:
            done: Json = await getattr(cache, name)(body)
            return done

        return carry_out

    return {
        "cache/pin": Order(
            "Hold the KV of a prompt's beginning until it is dropped",
            {
                "name": _NAME,
                "node": _described("string", "Only in the shard of this node; by default in every shard."),
                "chat_template_kwargs": _described("object", "Variables of the chat template."),
                **_BEGINNING,
            },
            {"name": _NAME, "shards": _objects("What each shard holds of it: tokens, blocks, bytes.")},
            of("pin"),
        ),
        "cache/list": Order(
            "List what the prefix caches keep: pins and sessions of each shard",
            {
                "sessions": _described(
                    "integer", "Most sessions of each shard; the last ones.", minimum=0, maximum=MOST_SESSIONS
                )
            },
            {"shards": _objects("Pins, sessions, numbers of blocks and of prompt tokens looked up, by shard.")},
            of("list"),
        ),
        "cache/drop": Order(
            "End a pin, or remove what is cached of a beginning or a salt",
            {
                "name": _NAME,
                "all": _described("boolean", "Remove what is cached of a beginning or a salt."),
                "chat_template_kwargs": _described("object", "Variables of the chat template."),
                **_BEGINNING,
            },
            {
                "pins": _texts("The pins that ended."),
                "blocks": _described("integer", "Number of blocks that are cached no more."),
            },
            of("drop"),
        ),
    }
