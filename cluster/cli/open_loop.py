"""An open-loop load of streamed completions: each request is sent when it is due, regardless of earlier requests.

It uses an asyncio protocol instead of an HTTP library, because on two cores the load must cost less than the server. It
can run in its own process: a Load as JSON on standard input, an Outcome as JSON on standard output.

    echo '{"port": 8000, "rate": 5, "seconds": 10}' | python -m alignedserve.cluster.cli.open_loop
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import cast

_FIRST_TOKEN = 10  # smaller ids are often special tokens
_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals at `rate` per second for `seconds`. With `rate` 0, one request follows the other for `seconds`.

    Each answer has exactly `new_tokens` tokens. `lengths` gives the (prompt, answer) tokens of each request instead, in
    order. The load then ends with the last of them, or repeats them for `seconds` if that is not 0. With `at_once`, all
    are sent at the beginning. Prompts consist of the first `vocabulary` token ids.
    """

    port: int
    rate: float
    seconds: float
    prompt_tokens: int = 64
    new_tokens: int = 32
    seed: int = 0
    model: str = "tiny"
    host: str = "127.0.0.1"
    drain_s: float = 120.0
    lengths: Sequence[Sequence[int]] = ()
    at_once: bool = False
    vocabulary: int = 2000  # every model in this repository has at least as many


@dataclass(frozen=True, slots=True)
class Served:
    """A finished answer: when its request was due, its TTFT and its TPOT, all in seconds."""

    due_s: float
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class Outcome:
    """`late_s`: maximum delay between due time and sending. `cpu_s`: processor time of this process."""

    offered: int = 0
    served: list[Served] = field(default_factory=list)
    refused: int = 0
    refused_without_retry_after: int = 0
    refusal_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    unended: int = 0
    late_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def count_error(self, what: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one request at a time."""

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver
        self._transport: asyncio.WriteTransport | None = None
        self._due_s = 0.0
        self._gaps = 1
        self._status = 0
        self._head = b""
        self._tail = b""
        self._body_left = 0
        self._first_s = 0.0
        self._used = False
        self._failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's classes.
        self._transport = cast(asyncio.WriteTransport, transport)

    def send(self, payload: _Payload, due_s: float) -> None:
        assert self._transport is not None
        self._due_s, self._status, self._head, self._tail = due_s, 0, b"", b""
        self._gaps = max(1, payload.new_tokens - 1)
        self._first_s, self._failed = 0.0, False
        self._used = True
        self._transport.write(payload.data)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if not self._status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._begin(head)
        if self._status != 200:
            self._body_left -= len(data)
            if self._body_left <= 0:
                self._end(now_s)
            return
        if not self._first_s and b"data: {" in data:
            self._first_s = now_s
        self._failed = self._failed or b'data: {"error"' in data
        self._tail = (self._tail + data)[-8:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._end(now_s)

    def _begin(self, head: bytes) -> None:
        self._status = int(head[9:12])
        self._head = head.lower()
        if self._status != 200:
            length = self._head.partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._body_left = int(length or 0)

    def _end(self, now_s: float) -> None:
        self._used = False
        outcome = self._driver.outcome
        if self._status == 200 and not self._failed:
            ttft_s, tpot_s = self._first_s - self._due_s, (now_s - self._first_s) / self._gaps
            outcome.served.append(Served(self._due_s - self._driver.begun_s, ttft_s, tpot_s))
        elif self._status == 429:
            outcome.refused += 1
            outcome.refusal_s.append(now_s - self._due_s)
            outcome.refused_without_retry_after += b"\r\nretry-after:" not in self._head
        else:
            outcome.count_error(f"status {self._status}" if self._status != 200 else "error in the stream")
        if self._transport is not None and b"\r\nconnection: close" in self._head:
            self._transport.close()
        self._driver.ended(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._used:
            self._used = False
            self._driver.outcome.count_error("connection lost" if self._status else "connection lost unanswered")
            self._driver.ended(None)


@dataclass(frozen=True, slots=True)
class _Payload:
    """The bytes of a request, and the number of tokens that it asks for."""

    data: bytes
    new_tokens: int


class _Driver:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.outcome = Outcome()
        self.begun_s = time.perf_counter()
        self._open = 0
        self._idle: deque[_Connection] = deque()
        self._one_ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        draw = random.Random(load.seed)
        ids = (min(_FIRST_TOKEN, load.vocabulary - 1), load.vocabulary)
        lengths = load.lengths or ((load.prompt_tokens, load.new_tokens),) * _PROMPTS
        self._payloads = [
            self._payload([draw.randrange(*ids) for _ in range(prompt)], answer) for prompt, answer in lengths
        ]
        self._draw = draw

    def _payload(self, prompt: list[int], new_tokens: int) -> _Payload:
        body = json.dumps(
            {
                "model": self.load.model,
                "prompt": prompt,
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.load.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return _Payload(head.encode() + body, new_tokens)

    async def run(self) -> Outcome:
        load = self.load
        self.begun_s = time.perf_counter()
        due_s = self.begun_s
        while load.seconds or self.outcome.offered < len(load.lengths):
            if load.at_once:
                due_s = self.begun_s
            elif load.rate:
                due_s += self._draw.expovariate(load.rate)
                delay_s = due_s - time.perf_counter()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                self.outcome.late_s = max(self.outcome.late_s, -delay_s)
            else:
                await self._drain(load.drain_s)
                due_s = time.perf_counter()
            if load.seconds and due_s - self.begun_s >= load.seconds:
                break
            self._launch(due_s)
        await self._drain(load.drain_s)
        self.outcome.wall_s = time.perf_counter() - self.begun_s
        self.outcome.unended = self._open
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.outcome.cpu_s = usage.ru_utime + usage.ru_stime
        return self.outcome

    def _launch(self, due_s: float) -> None:
        in_order = self._payloads[self.outcome.offered % len(self._payloads)] if self.load.lengths else None
        payload = in_order or self._draw.choice(self._payloads)
        self.outcome.offered += 1
        self._open += 1
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                connection.send(payload, due_s)
                return
        task = asyncio.get_running_loop().create_task(self._connect(payload, due_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, payload: _Payload, due_s: float) -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self), self.load.host, self.load.port
            )
        except OSError as error:
            self.outcome.count_error(f"cannot connect: {error.strerror or error}")
            self.ended(None)
        else:
            connection.send(payload, due_s)

    def ended(self, connection: _Connection | None) -> None:
        self._open -= 1
        if connection is not None and connection.open:
            self._idle.append(connection)
        self._one_ended.set()

    async def _drain(self, limit_s: float) -> None:
        """Returns when no request is open, or after `limit_s`."""
        deadline = time.perf_counter() + limit_s
        while self._open and (left_s := deadline - time.perf_counter()) > 0:
            self._one_ended.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._one_ended.wait()
            except TimeoutError:
                return


async def drive(load: Load) -> Outcome:
    """Offer the load from this event loop."""
    return await _Driver(load).run()


async def drive_apart(load: Load) -> Outcome:
    """Offer the load from its own process, which ends with this call. Raises RuntimeError if the process fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate(json.dumps(asdict(load)).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the load ended with status {process.returncode}")
    values = json.loads(output)
    served = [Served(**answer) for answer in values.pop("served")]
    return Outcome(served=served, **values)


def main() -> None:
    import uvloop

    try:
        outcome = uvloop.run(drive(Load(**json.loads(sys.stdin.read()))))
    except KeyboardInterrupt:  # Ctrl-C also reaches the process that started this one, which reports it
        sys.exit(128 + signal.SIGINT)
    json.dump(asdict(outcome), sys.stdout)


if __name__ == "__main__":
    main()
