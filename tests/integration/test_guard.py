"""One cluster under attack: no peer gets in without the token, nothing breaks, and no log has a prompt.

The accounting matches at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from alignedserve.cluster.cli.main import main
from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.control.rpc import MAX_MESSAGE_BYTES, TOKEN_KEY
from alignedserve.control.samples import value
from alignedserve.gateway.server import GatewayServer
from alignedserve.gateway.standalone import StandaloneGateway
from alignedserve.proto import (
    common_pb2,
    decode_worker_pb2,
    gateway_pb2,
    inference_pb2,
    kv_pool_pb2,
    node_agent_pb2,
    prefill_worker_pb2,
    scheduler_pb2,
    supervisor_pb2,
)
from support import nonsense
from support.gateway import joined_gateway

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

MARKER = "xyzzy plugh quux"
SERVICES = {
    service.name: service
    for module in (
        decode_worker_pb2,
        gateway_pb2,
        inference_pb2,
        kv_pool_pb2,
        node_agent_pb2,
        prefill_worker_pb2,
        scheduler_pb2,
        supervisor_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
}
OFFERED = {
    "prefill-0": ("Role", "PrefillWorker"),
    "decode-0": ("Role", "DecodeWorker"),
    "kv_pool-0": ("Role", "KvPool"),
    "scheduler-0": ("Role", "Scheduler"),
    "node_agent-0": ("Role", "NodeAgent"),
    "gateway-0": ("Role", "TokenSink", "GatewayPeer"),
    "supervisor-0": ("Supervisor",),
    "public": ("Inference",),
}
OBEYED = {"EndProcess", "HandOver", "RestartRoles", "Scale", "Stop"}  # obeyed for every caller with the token


NOBODY = common_pb2.ProcessKey(role="decode", id="nobody-0", incarnation=1)
# Streams that begin as they should, and go on with anything.
GREETED: tuple[tuple[str, str, str, Any], ...] = (
    ("kv_pool-0", "KvPool", "Write", kv_pool_pb2.PoolWriterMessage(hello=NOBODY)),
    ("kv_pool-0", "KvPool", "Control", kv_pool_pb2.PoolCommand()),
    ("prefill-0", "PrefillWorker", "Buffers", prefill_worker_pb2.BufferCommand(hello=NOBODY)),
    ("prefill-0", "PrefillWorker", "Control", prefill_worker_pb2.PrefillCommand()),
    ("decode-0", "DecodeWorker", "Control", decode_worker_pb2.DecodeCommand()),
    (
        "scheduler-0",
        "Scheduler",
        "Link",
        scheduler_pb2.GatewayMessage(hello=scheduler_pb2.GatewayHello(process=NOBODY)),
    ),
    (
        "supervisor-0",
        "Supervisor",
        "Join",
        supervisor_pb2.RoleReport(
            hello=supervisor_pb2.RoleHello(
                process=common_pb2.ProcessKey(role="gateway", id="nobody-1", incarnation=1), address="127.0.0.1:1"
            )
        ),
    ),
)


@dataclass
class Served:
    cluster: LocalCluster
    gateway: GatewayServer
    public: StandaloneGateway
    http: httpx.AsyncClient
    logs: Path

    def addresses(self) -> dict[str, str]:
        """Every gRPC server of the cluster."""
        found = {peer.process.id: peer.address for peer in self.cluster.view().peers}
        found["supervisor-0"] = self.cluster.supervisor.address
        found["public"] = f"127.0.0.1:{self.public.grpc_port}"
        return found

    @property
    def token(self) -> list[tuple[str, str]]:
        return [(TOKEN_KEY, self.cluster.token)]

    async def ask(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"max_tokens": 8, "temperature": 0, **body})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("logs")
    config = from_tree(
        {
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1},
            "supervisor": {"heartbeat_s": 0.2},
            "log": {"dir": str(folder)},
        }
    )
    handler = logging.FileHandler(folder / "test-process.log")
    for name in ("", "alignedserve"):
        logging.getLogger(name).addHandler(handler)
    logging.getLogger("alignedserve").setLevel(config.log.level.upper())
    async with LocalCluster(config, output_dir=folder) as cluster:
        await cluster.wait_ready()
        async with (
            joined_gateway(cluster.join_info()) as gateway,
            StandaloneGateway(gateway) as public,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{public.port}", timeout=60.0) as http,
        ):
            yield Served(cluster, gateway, public, http, folder)
    for name in ("", "alignedserve"):
        logging.getLogger(name).removeHandler(handler)


async def test_every_role_refuses_a_caller_without_the_token(served: Served) -> None:
    addresses = served.addresses()
    assert addresses.keys() == OFFERED.keys()
    del addresses["public"]
    for role_id, address in addresses.items():
        assert address.startswith("127.0.0.1:"), role_id
        async with grpc.aio.insecure_channel(address) as channel:
            for metadata in ((), ((TOKEN_KEY, ""),), ((TOKEN_KEY, served.cluster.token[:-1]),)):
                for name in OFFERED[role_id]:
                    for method in SERVICES[name].methods:
                        # Nothing is sent, as the first thing that a role would wait for is a message.
                        silent = channel.stream_stream(f"/{SERVICES[name].full_name}/{method.name}")(metadata=metadata)
                        code = await asyncio.wait_for(silent.code(), 10.0)
                        assert code is grpc.StatusCode.UNAUTHENTICATED, (role_id, method.name)


async def test_a_message_over_the_cap_is_refused_and_does_no_harm(served: Served) -> None:
    options = [("grpc.max_send_message_length", -1)]
    for role_id, path in (("kv_pool-0", "Role/Describe"), ("public", "Inference/Generate")):
        async with grpc.aio.insecure_channel(served.addresses()[role_id], options=options) as channel:
            describe = channel.unary_unary(f"/alignedserve.v1.{path}")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await describe(bytes(MAX_MESSAGE_BYTES + 1), metadata=served.token, timeout=30)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await served.ask(prompt="a")).status_code == 200


async def test_the_books_add_up_at_every_scrape_under_load(served: Served) -> None:
    stop = asyncio.Event()

    async def load(seed: int) -> int:
        draw, done = random.Random(seed), 0
        while not stop.is_set():
            words, tokens = draw.randrange(1, 60), draw.randrange(1, 30)
            answer = await served.ask(prompt="word " * words, max_tokens=tokens, ignore_eos=True, n=draw.choice((1, 3)))
            assert answer.status_code == 200, answer.text
            done += 1
        return done

    clients = [asyncio.create_task(load(seed)) for seed in range(6)]
    owned = 0.0
    for scrape in range(20):
        metrics = (await served.http.get("/metrics")).text
        stores = set(re.findall(r'kv_capacity_blocks\{[^}]*store="([^"]*)"', metrics))
        assert {"kv_pool-0", "prefill-0/cache", "decode-0/cache"} <= stores
        assert len(stores) == 5
        for store in stores:
            states = [
                value(metrics, "alignedserve_kv_blocks", store=store, state=s) for s in ("free", "owned", "cached")
            ]
            assert sum(states) == value(metrics, "alignedserve_kv_capacity_blocks", store=store) > 0
            assert min(states) >= 0
            owned += states[1]
        if scrape % 10 == 0:
            assert (await served.http.get("/alignedserve/integrity")).json()["sound"]
    stop.set()
    assert min([await client for client in clients]) > 0
    assert owned > 0


async def test_doctor_live_prints_a_line_for_every_store(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(served.http.base_url)
    assert await asyncio.to_thread(main, ["doctor", "--live", "--url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    sound = {line.split()[1] for line in lines if line.startswith("sound ")}
    buffers = {name.rpartition("-")[0] for name in sound if name.startswith("prefill-0/") and name != "prefill-0/cache"}
    assert {"kv_pool-0", "prefill-0/cache", "decode-0/cache", "requests", "calls"} <= sound
    assert buffers == {"prefill-0/batch", "prefill-0/requests"}
    assert "WRONG" not in "".join(lines)
    moved = next(line.split() for line in lines if line.startswith("prefill-0/batch") and "decode-0/cache" in line)
    assert moved[2] == "shared-memory"
    assert await asyncio.to_thread(main, ["doctor", "--live", "--json", "--url", url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sound"] is True
    assert {channel["channel"] for channel in found["channels"]} == {"shared-memory"}


async def test_no_log_has_a_prompt(served: Served) -> None:
    """Through every way in which a request can go wrong, a worker that dies among them."""
    chat = {"messages": [{"role": "user", "content": MARKER}], "max_tokens": 4}
    long = MARKER * 4000
    bodies: list[tuple[str, bytes]] = [
        ("/v1/completions", json.dumps({"prompt": MARKER, **wrong}).encode())
        for wrong in (
            {"max_tokens": 4},
            {"max_tokens": -1},
            {"max_tokens": "many"},
            {"stop": [MARKER], "max_tokens": 4, "timeout_s": 0.001},
            {"logit_bias": {MARKER: 1}},
            {"suffix": MARKER},
            {"model": "none"},
        )
    ]
    bodies += [
        ("/v1/completions", json.dumps({"prompt": long}).encode()),
        ("/v1/completions", json.dumps({"prompt": {"text": MARKER}}).encode()),
        ("/v1/completions", f'{{"prompt": "{MARKER}'.encode()),
        ("/v1/chat/completions", json.dumps(chat).encode()),
        ("/v1/chat/completions", json.dumps({**chat, "messages": [{"role": MARKER, "content": MARKER}]}).encode()),
        ("/v1/chat/completions", json.dumps({**chat, "messages": [{"role": "user", "content": [MARKER]}]}).encode()),
        ("/v1/chat/completions", json.dumps({**chat, "tools": [{"type": MARKER}]}).encode()),
    ]
    codes = [(await served.http.post(path, content=body)).status_code for path, body in bodies]
    assert codes[0] == codes[-4] == 200
    assert set(codes) <= {200, 400, 404, 408}

    running = asyncio.create_task(served.ask(prompt=MARKER, max_tokens=300, ignore_eos=True, return_token_ids=True))
    while not served.gateway.ledger:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    old = served.cluster.peer("decode-0").process.incarnation
    served.cluster.kill("decode-0")
    await served.cluster.wait_restarted("decode-0", old)
    answer = (await running).json()
    assert answer["usage"]["completion_tokens"] == 300

    written = {path.name: path.read_text(errors="replace") for path in served.logs.iterdir()}
    assert {"kv_pool-0.log", "prefill-0.log", "decode-0.log", "scheduler-0.log", "test-process.log"} <= written.keys()
    assert any("ready" in text for text in written.values())
    words = [MARKER, "xyzzy", answer["choices"][0]["text"][:40], str(answer["prompt_token_ids"]).strip("[]")]
    found = [(name, word) for name, text in written.items() for word in words if word in text]
    assert found == []


async def test_noise_and_nonsense_break_nothing(served: Served) -> None:
    draw = random.Random(20)
    before = (await served.ask(prompt="Return a list of", return_token_ids=True)).json()["choices"][0]["token_ids"]
    pids = dict(served.cluster.pids)
    addresses = served.addresses()

    await asyncio.gather(
        *(nonsense.throw(address, data) for address in addresses.values() for data in nonsense.socket_noise(draw))
    )
    channels = {role_id: grpc.aio.insecure_channel(address) for role_id, address in addresses.items()}
    calls = [
        nonsense.call(channels[role_id], service, method, data, served.token, 2.0)
        for role_id, names in OFFERED.items()
        for service in (SERVICES[name] for name in names)
        for method in service.methods
        # All on one stream, on a stream each, and a stream that ends before it has begun.
        for data in (
            [[nonsense.CORRUPT]]
            if method.name in OBEYED
            else (nonsense.payloads(method, draw, 6), *([one] for one in nonsense.payloads(method, draw, 4)), [])
        )
    ]
    calls += [
        nonsense.call(
            channels[role_id],
            SERVICES[name],
            SERVICES[name].methods_by_name[method],
            [hello.SerializeToString(), *nonsense.sensible(SERVICES[name].methods_by_name[method], draw, 30)],
            served.token,
            3.0,
        )
        for role_id, name, method, hello in GREETED
    ]
    codes = await asyncio.wait_for(asyncio.gather(*calls), 90.0)
    for channel in channels.values():
        await channel.close()
    await asyncio.to_thread(throw_at_agent, served.cluster.agent_socket, draw)

    assert dict(served.cluster.pids) == pids
    assert grpc.StatusCode.INVALID_ARGUMENT in codes
    await served.cluster.check_integrity()
    answer = await served.ask(prompt="Return a list of", return_token_ids=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == before
    assert (await served.http.get("/health")).status_code == 200
    assert "Traceback" not in (served.logs / "node_agent-0.out").read_text()


def throw_at_agent(path: str, draw: random.Random) -> None:
    """Noise, cut lengths and wrong operations at the node agent's Unix socket."""
    long = struct.pack("!I", 1 << 31)
    for data in (
        b"",
        b"\x00",
        draw.randbytes(64),
        long,
        struct.pack("!I", 9) + b"not JSON!",
        struct.pack("!I", 2) + b"[]",
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5.0)
            connection.connect(path)
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # closed before everything was read
                assert not connection.recv(4096)
