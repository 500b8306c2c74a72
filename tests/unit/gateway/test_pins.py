"""Pins by orders to a gateway and by a file, and endings that shards learn from: with a shard's real decisions."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from alignedserve.admin import ADMIN_HEADER, admin_key
from alignedserve.control.prefixes import cached_prefix, prefix_tokens
from alignedserve.errors import ConfigError, InvalidRequestError, PinsFullError
from alignedserve.gateway.body.planning import ServedModel, chat_tokens
from alignedserve.gateway.body.requests import parse_chat
from alignedserve.gateway.pinning import keeper as keeper_module
from alignedserve.gateway.pinning.board import LAST_PRIORITY, PinBoard, Pinned
from alignedserve.gateway.pinning.boundary import MOST_JOINED, Beginning, _completion, parse_beginning, tokens_of
from alignedserve.gateway.pinning.keeper import PinKeeper, read_beginnings
from alignedserve.kv_pool.kept.prefix_service import PrefixCacheService
from alignedserve.model import resolve_model
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import FinishReason, RequestKey, RequestSpec
from alignedserve.text import ChatTemplate, Tokenizer
from support.fake_cluster import TOKEN, FakeCluster, fake_model_info
from support.gateway import RunningGateway, running_gateway
from support.kv_pool import PREFILL, leased
from support.prefix_pool import index_memory, open_indexed

KEY = {ADMIN_HEADER: admin_key(TOKEN)}
CAPACITY = 200
TEXT = "You are an assistant that answers questions about the Python standard library in a short, friendly way."


class Shard:
    """A shard's pool and its service; blocks of 4 tokens. `forgets`: computed prompts that are lost at once."""

    def __init__(self) -> None:
        self.pool = open_indexed(index_memory(CAPACITY), CAPACITY)[0]
        self.service = PrefixCacheService("kv_pool-0", 0.25, self._ready, lambda grants: None, nullcontext)
        self.service.open(self.pool, "fingerprint", 1 << 20)
        self.forgets = 0

    async def _ready(self, context: Any) -> Any:
        return self.pool

    async def compute(self, cluster: FakeCluster, spec: RequestSpec) -> None:
        """What a prefill instance does with a prompt."""
        tokens = list(spec.prompt_token_ids)
        if self.forgets:
            self.forgets -= 1
        else:
            blocks = leased(self.pool, PREFILL, -(-len(tokens) // 4))
            root = self.service.root(spec.cache_salt)
            self.pool.commit(PREFILL, spec.key, len(tokens), blocks, token_ids=tokens, root=root)
            self.pool.give_back(PREFILL, self.pool._blocks.leased_to(PREFILL))
            self.pool.release([spec.key])
        cluster.emit(spec, [100], role="prefill", finish=FinishReason.LENGTH)


@pytest_asyncio.fixture
async def shard() -> Shard:
    return Shard()


@pytest_asyncio.fixture
async def pinning(shard: Shard, tmp_path: Path) -> AsyncIterator[tuple[FakeCluster, RunningGateway]]:
    cluster = FakeCluster(shard.compute)
    cluster._server.add(kp_grpc.add_PrefixCacheServicer_to_server, shard.service)
    async with cluster, running_gateway(cluster, kv_pool={"prefix_cache": True}) as gateway:
        yield cluster, gateway


async def order(gateway: RunningGateway, what: str, /, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as http:
        return await http.post(f"/alignedserve/cache/{what}", json=body, headers=KEY)


async def test_a_pin_is_computed_once_listed_and_dropped(
    pinning: tuple[FakeCluster, RunningGateway], shard: Shard
) -> None:
    cluster, gateway = pinning
    for _ in range(2):
        pinned = await order(gateway, "pin", name="docs", text=TEXT)
        (held,) = pinned.json()["shards"]
        assert held["shard"] == "kv_pool-0"
        assert held["tokens"] == 4 * held["blocks"] > 8
        assert held["bytes"] == held["blocks"] << 20
    (spec,) = cluster.submitted
    assert (spec.sampling.max_tokens, spec.priority, len(spec.prompt_token_ids)) == (2, LAST_PRIORITY, held["tokens"])

    (found,) = (await order(gateway, "list")).json()["shards"]
    (pin,) = found["pins"]
    assert (pin["name"], pin["blocks"], pin["everywhere"], pin["hits"]) == ("docs", held["blocks"], True, 0)
    assert found["blocks"] == {
        "capacity": CAPACITY,
        "free": CAPACITY - held["blocks"],
        "cached": 0,
        "pinned": held["blocks"],
    }

    assert (await order(gateway, "drop", name="docs")).json() == {"pins": ["docs"], "blocks": 0}
    assert (await order(gateway, "drop", name="docs")).json()["pins"] == []
    assert shard.pool.counts().cached == held["blocks"]
    dropped = (await order(gateway, "drop", all=True, text=TEXT)).json()
    assert dropped == {"pins": [], "blocks": held["blocks"]}
    assert shard.pool.counts().free == CAPACITY
    shard.pool.check_integrity()


async def test_a_prompt_that_asks_again_counts_once(shard: Shard) -> None:
    prefix = cached_prefix(range(40), b"")
    first, second = (kp.Pin(key=pb.RequestKey(request_id=name), prefix=prefix) for name in "ab")
    shard.service.pin(shard.pool, first)  # nothing is there: it waits for another prompt
    blocks = leased(shard.pool, PREFILL, 8)
    root = shard.service.root(b"")
    shard.pool.commit(PREFILL, RequestKey("c"), 32, blocks, token_ids=list(range(32)), root=root)
    for pin in (first, first, second):
        shard.service.pin(shard.pool, pin)
    assert (shard.service.queried_tokens, shard.service.hit_tokens) == (80, 64)


async def test_kv_of_other_weights_is_not_found_and_dropped_with_the_rest(shard: Shard) -> None:
    tokens = list(range(40))
    shard.service.serve_weights("new")
    for number, weights in enumerate(("old", "new")):
        blocks = leased(shard.pool, PREFILL, 4 - number)
        root = shard.service.root(b"", weights)
        kv_tokens = 4 * len(blocks)
        key = RequestKey(weights)
        shard.pool.commit(PREFILL, key, kv_tokens, blocks, token_ids=tokens[:kv_tokens], root=root)

    def found(weights: str) -> int:
        pin = kp.Pin(key=pb.RequestKey(request_id=f"of {weights}"), prefix=cached_prefix(tokens, b"", weights))
        return shard.service.pin(shard.pool, pin)[0].kv_tokens

    assert [found(weights) for weights in ("old", "new", "", "newer")] == [16, 12, 12, 0]
    context: Any = None
    shard.pool.release([RequestKey(name) for name in ("old", "new", "of old", "of new", "of ", "of newer")])
    dropped = await shard.service.Drop(kp.DropCached(prefix=cached_prefix([], b"")), context)
    assert dropped.blocks == 7
    assert shard.pool.counts().free == CAPACITY


async def test_a_prefix_that_is_lost_before_it_is_held_is_computed_again(
    pinning: tuple[FakeCluster, RunningGateway], shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, gateway = pinning
    monkeypatch.setattr("alignedserve.gateway.pinning.board.COMMITTED_WITHIN_S", 0.05)
    shard.forgets = 2
    assert (await order(gateway, "pin", name="docs", text=TEXT, cache_salt="s")).status_code == 200
    assert [spec.cache_salt for spec in cluster.submitted] == [b"s"] * 3


async def test_orders_that_cannot_be_carried_out_are_refused_and_change_nothing(
    pinning: tuple[FakeCluster, RunningGateway], shard: Shard
) -> None:
    cluster, gateway = pinning
    for name, body, status, code in (
        ("pin", {"name": "a", "text": TEXT * 9}, 409, "pins_full"),
        ("pin", {"name": "a", "text": TEXT, "node": "elsewhere"}, 404, "not_found"),
        ("pin", {"name": "a", "text": "x"}, 400, "invalid_value"),
        ("pin", {"text": TEXT}, 400, "missing_required_parameter"),
        ("pin", {"name": "a"}, 400, "invalid_value"),
        ("pin", {"name": "a", "text": TEXT, "tools": [{}]}, 400, "invalid_value"),
        ("drop", {"all": True}, 400, "invalid_value"),
        ("drop", {"name": "a", "cache_salt": "s"}, 400, "invalid_value"),
        ("drop", {"name": "a", "tools": []}, 400, "invalid_value"),
        ("drop", {"all": True, "text": "len"}, 400, "invalid_value"),  # no token is certain: not the whole salt
        ("drop", {"all": True, "tools": [], "cache_salt": "s"}, 400, "invalid_value"),
        ("list", {"sessions": -1}, 400, "invalid_value"),
    ):
        answer = await order(gateway, name, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (body, answer.text)
    assert cluster.submitted == []
    assert shard.pool.counts().free == CAPACITY


async def test_orders_need_the_admin_key_and_a_prefix_cache(cluster: FakeCluster) -> None:
    async with running_gateway(cluster, kv_pool={"prefix_cache": False}) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as http:
            for name in ("pin", "list", "drop"):
                answer = await http.post(f"/alignedserve/cache/{name}", json={})
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_required")
        off = await order(gateway, "list")
        assert (off.status_code, off.json()["error"]["code"]) == (409, "not_possible")
        assert "--no-prefix-cache" in off.json()["error"]["message"]


async def test_shards_learn_how_requests_end_and_of_which_conversation(
    pinning: tuple[FakeCluster, RunningGateway], shard: Shard
) -> None:
    cluster, gateway = pinning
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as http:
        for headers, body in (({"x-session-id": "by-header"}, {}), ({}, {"session_id": "by-body"}), ({}, {})):
            asked = {"prompt": TEXT + str(body) + str(headers), "max_tokens": 1, **body}
            assert (await http.post("/v1/completions", json=asked, headers=headers)).status_code == 200
    await cluster.wait_for(lambda: [one.kind for one in shard.pool.sessions or ()] == ["length"] * 3)
    sessions = (await order(gateway, "list", sessions=2)).json()["shards"][0]
    assert [one["name"] for one in sessions["sessions"]] == ["", "by-body"]
    assert (sessions["session_count"], sessions["sessions"][0]["hits"]) == (3, 0)
    assert sessions["sessions"][0]["tokens"] > 8


# ---- what all prompts with a beginning share

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGING = (  # like Gemma's: the system's text is part of the first user's turn, and roles alternate
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<turn>{{ m.role }}\n{{ (first if loop.first else '') + m.content }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(resolve_model("tiny"))
    assert found is not None
    return found


SYSTEM = {"role": "system", "content": "Answer in one line, and name the module."}
SHOTS = [{"role": "user", "content": "What does len do?"}, {"role": "assistant", "content": "It returns a length."}]


@pytest.mark.parametrize("source", [CHATML, MERGING], ids=["chatml", "merging"])
@pytest.mark.parametrize("messages", [[SYSTEM], [SYSTEM, *SHOTS], [SYSTEM, SHOTS[0]]], ids=["system", "shots", "user"])
async def test_what_follows_never_changes_the_tokens_of_a_beginning(
    tokenizer: Tokenizer, source: str, messages: list[dict[str, Any]]
) -> None:
    model = ServedModel("tiny", tokenizer, ChatTemplate(source, {}), fake_model_info())
    pinned = await tokens_of(model, Beginning(messages=messages))
    draw = random.Random(3)
    for _ in range(15):
        text = "".join(draw.choice("ab \n19._é你<|}") for _ in range(draw.randint(1, 12)))
        more = [{"role": "user", "content": text}]
        if messages[-1]["role"] == "user":
            more = [{"role": "assistant", "content": text}, *more]
        _, tokens = await chat_tokens(model, parse_chat({"messages": [*messages, *more]}), 10_000)
        assert tokens[: len(pinned)] == pinned
    text = tokenizer.decode(pinned, skip_special=False)
    assert all(message["content"] in text for message in messages), "all of what does not change is pinned"


async def test_a_texts_last_token_is_left_out_if_it_may_join_what_follows(tokenizer: Tokenizer) -> None:
    model = ServedModel("tiny", tokenizer, None, fake_model_info())
    for text, shared in (
        ("Return the leng", "Return the"),
        ("Return the length ", "Return the length"),
        ("Return the length\n\n", "Return the length"),
        ("len", ""),
    ):
        assert tokenizer.decode(await tokens_of(model, Beginning(text=text))) == shared
    with pytest.raises(InvalidRequestError):
        await tokens_of(model, Beginning(messages=[SYSTEM]))  # there is no template


async def test_of_a_script_without_spaces_only_the_end_is_left_out(tokenizer: Tokenizer) -> None:
    model = ServedModel("tiny", tokenizer, None, fake_model_info())
    text = "\u4f60\u597d\u4e16\u754c" * 30
    pinned = await tokens_of(model, Beginning(text=text))
    assert text[:-MOST_JOINED].startswith(tokenizer.decode(pinned).rstrip("\ufffd"))
    assert len(tokenizer.decode(pinned)) > len(text) - 2 * MOST_JOINED
    assert pinned == list(await _completion(model, text))[: len(pinned)]


# ---- the file, and shards that lack a pin


def test_a_file_of_beginnings_is_read_with_names_and_errors_that_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"name": "a", "text": "b"}\n\n{"messages": [{"role": "system", "content": "c"}]}\n')
    first, second = read_beginnings(file)
    assert (first.name, first.text) == ("a", "b")
    assert second.name is not None
    assert second.name.startswith("prompt-")
    for content, said in (
        ('{"text": "b"}\n{"text": 1}', "line 2"),
        ("nothing", "line 1"),
        ('{"name": "a", "text": "b"}\n{"name": "a", "text": "c"}', "line 2"),
        ('{"text": "b", "message": []}', "line 1"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=said):
            read_beginnings(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_beginnings(tmp_path / "none")


class Shards(PinBoard):
    """Shards that only know names and tokens. `refusing`: those that fail."""

    def __init__(self, **pins: dict[str, kp.PinnedPrefix]) -> None:
        self.pins = pins
        self.refusing: set[str] = set()
        self.stale: dict[str, set[str]] = {}  # names of pins, by shard
        self.asked = 0
        self.meanwhile: Callable[[], None] = lambda: None  # called while a pin is computed

    @property
    def on(self) -> bool:
        return True

    def shards(self, node: str = "") -> list[str]:
        return sorted(self.pins)

    async def contents(self, *, prefixes: bool = False, most_sessions: int = 0) -> list[kp.CacheContents]:
        return [
            kp.CacheContents(
                pool_id=pool_id,
                pins=[kp.CachedPin(pin=pin, stale=name in self.stale.get(pool_id, ())) for name, pin in pins.items()],
            )
            for pool_id, pins in self.pins.items()
        ]

    async def pin(self, pin: kp.PinnedPrefix, pool_ids: Sequence[str]) -> list[Pinned]:
        self.asked += 1
        if self.refusing.intersection(pool_ids):
            raise PinsFullError("no")
        self.meanwhile()
        for pool_id in pool_ids:
            self.pins[pool_id][pin.name] = pin
            self.stale.get(pool_id, set()).discard(pin.name)
        return [Pinned(pool_id, 4, 1, 1) for pool_id in pool_ids]

    async def drop(self, order: kp.DropCached) -> dict[str, kp.Dropped]:
        for pins in self.pins.values():
            for name in order.names:
                pins.pop(name, None)
        return {}


def view_of(memory: Mapping[str, str]) -> sv.ClusterView:
    """A view with these shards and the names of their memory."""
    found = sv.ClusterView()
    for pool_id, text in memory.items():
        process = pb.ProcessKey(role="kv_pool", id=pool_id)
        found.peers.add(process=process, stores=[pb.StoreHandle(store_id=pool_id, memory=text)])
    return found


async def test_new_shards_get_the_pins_of_others_and_the_files_and_a_dropped_one_stays_dropped(
    tokenizer: Tokenizer,
) -> None:
    model = ServedModel("tiny", tokenizer, None, fake_model_info())
    everywhere = kp.PinnedPrefix(name="all", prefix=cached_prefix([1, 2], b""), everywhere=True)
    here = kp.PinnedPrefix(name="here", prefix=cached_prefix([3, 4], b""))
    board = Shards(one={"all": everywhere, "here": here}, two={})
    memory = {"one": "m1", "two": "m2"}

    def view() -> sv.ClusterView:
        return view_of(memory)

    keeper = PinKeeper("gateway-0", board, model, view, [parse_beginning({"name": "file", "text": TEXT})])
    board.refusing = {"two"}
    await keeper.look()
    assert {name: sorted(pins) for name, pins in board.pins.items()} == {"one": ["all", "file", "here"], "two": []}
    board.refusing = set()
    await keeper.look()
    assert {name: sorted(pins) for name, pins in board.pins.items()} == {
        "one": ["all", "file", "here"],
        "two": ["all", "file"],
    }
    assert prefix_tokens(board.pins["two"]["file"].prefix).tolist() == await tokens_of(model, Beginning(text=TEXT))
    asked = board.asked
    await keeper.look()
    assert board.asked == asked, "nothing is missing"
    for pins in board.pins.values():
        pins.pop("file")
    await keeper.look()
    assert board.asked == asked, "it was dropped"
    board.pins["two"], memory["two"] = {}, "m3"  # its memory was lost
    await keeper.look()
    assert sorted(board.pins["two"]) == ["all", "file"]


async def test_pins_of_weights_that_are_no_longer_served_are_computed_again() -> None:
    everywhere = kp.PinnedPrefix(name="all", prefix=cached_prefix([1, 2], b""), everywhere=True)
    here = kp.PinnedPrefix(name="here", prefix=cached_prefix([3, 4], b""))
    board = Shards(one={"all": everywhere, "here": here}, two={"all": everywhere})
    board.stale = {"one": {"all", "here"}, "two": {"all"}}
    view = view_of({"one": "m1", "two": "m2"})
    keeper = PinKeeper("gateway-0", board, ServedModel("tiny", None, None), lambda: view)
    await keeper.look()
    assert board.stale == {"one": set(), "two": set()}
    assert {name: sorted(pins) for name, pins in board.pins.items()} == {"one": ["all", "here"], "two": ["all"]}
    asked = board.asked
    await keeper.look()
    assert board.asked == asked


@pytest.mark.parametrize("by_order", [True, False])
async def test_a_pin_that_is_dropped_while_a_new_shard_gets_it_does_not_come_back(by_order: bool) -> None:
    everywhere = kp.PinnedPrefix(name="all", prefix=cached_prefix([1, 2], b""), everywhere=True)
    board = Shards(one={"all": everywhere}, two={})
    memory = {"one": "m1", "two": "m2"}

    def meanwhile() -> None:
        board.pins["one"].clear()
        if not by_order:
            memory["one"] = "m3"

    board.meanwhile = meanwhile
    keeper = PinKeeper("gateway-0", board, ServedModel("tiny", None, None), lambda: view_of(memory))
    await keeper.look()
    board.meanwhile = lambda: None
    await keeper.look()
    expected = [] if by_order else ["all"]
    assert [sorted(pins) for pins in board.pins.values()] == [expected, expected]


async def test_a_files_prompts_that_cannot_be_pinned_are_tokenised_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ServedModel("tiny", tokenizer, None, fake_model_info())
    board = Shards(one={})
    board.refusing = {"one"}  # as if pins had all the blocks that they may have
    counted = 0

    async def count(model: ServedModel, beginning: Beginning) -> list[int]:
        nonlocal counted
        counted += 1
        return await tokens_of(model, beginning)

    monkeypatch.setattr(keeper_module, "tokens_of", count)
    beginning = parse_beginning({"name": "file", "text": TEXT})
    keeper = PinKeeper("gateway-0", board, model, lambda: view_of({"one": "m1"}), [beginning])
    for _ in range(3):
        await keeper.look()
    assert (board.asked, counted) == (3, 1)
