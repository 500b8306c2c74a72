"""A cluster that runs scripts: real gRPC servers for supervisor and scheduler, and token events of fake workers.

It tests gateways, race by race. A script gets each submitted request, and emits its tokens, loses it, refuses it or
does nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from alignedserve.control.convert import (
    failure_to_proto,
    key_to_proto,
    keys_from_proto,
    keys_to_proto,
    logprob_to_proto,
    spec_from_proto,
    timings_to_proto,
)
from alignedserve.control.link import Outbox, serve_stream
from alignedserve.control.rpc import RpcServer
from alignedserve.control.tokens import TokenEmitter
from alignedserve.errors import AlignedServeError
from alignedserve.model import ModelInfo
from alignedserve.prefill_worker.specs import SpecReader
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.proto import scheduler_pb2_grpc as sc_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc
from alignedserve.request import FinishReason, RequestKey, RequestSpec, Stage, Stopwatch, TokenLogprobs
from support.fake_live import fake_live, fake_stays

TOKEN = "fake-cluster"
ROLES = ("prefill", "decode", "kv_pool", "scheduler")

Script = Callable[["FakeCluster", RequestSpec], Awaitable[None]]


def fake_model_info(**overrides: Any) -> ModelInfo:
    """A model's description that fits the shipped tokenizer."""
    values: dict[str, Any] = {
        "name": "tiny",
        "path": "tiny",
        "model_type": "llama",
        "dtype": "float32",
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 2048,
        "max_positions": 512,
        "eos_token_ids": (0, 5),
        "generation_defaults": {},
        "weight_bytes": 1,
        **overrides,
    }
    return ModelInfo(**values)


FAKE_METRICS = "# HELP fake_metric always 1\n# TYPE fake_metric gauge\nfake_metric 1.0\n"


class _Scheduler(sc_grpc.SchedulerServicer):
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    async def Link(
        self, requests: AsyncIterator[sc.GatewayMessage], context: Any
    ) -> AsyncIterator[sc.SchedulerMessage]:
        outbox: Outbox[sc.SchedulerMessage] = Outbox()
        self._cluster.outboxes.append(outbox)
        outbox.put(sc.SchedulerMessage(capacity=sc.Capacity(max_request_tokens=self._cluster.capacity_tokens)))
        try:
            async for message in serve_stream(requests, outbox, self._cluster.on_gateway_message):
                yield message
        finally:
            self._cluster.outboxes.remove(outbox)

    async def Stays(self, request: sc.StaysQuery, context: Any) -> sc.StaysFound:
        return fake_stays(request, self._cluster.told)


class _Supervisor(sv_grpc.SupervisorServicer):
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    async def Join(self, requests: AsyncIterator[sv.RoleReport], context: Any) -> AsyncIterator[sv.RoleOrder]:
        outbox: Outbox[sv.RoleOrder] = Outbox()
        self._cluster.views.append(outbox)
        outbox.put(sv.RoleOrder(view=self._cluster.view()))
        try:
            async for order in serve_stream(requests, outbox, self._cluster.reports.append):
                yield order
        finally:
            self._cluster.views.remove(outbox)

    async def GetStatus(self, request: pb.Empty, context: Any) -> sv.ClusterStatus:
        return sv.ClusterStatus(
            peers=self._cluster.view().peers, cluster_id="fake", state="ready", metrics=FAKE_METRICS
        )

    async def GetLive(self, request: sv.LiveQuery, context: Any) -> sv.LiveState:
        if self._cluster.no_live:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it is told to be away")
        return fake_live(self._cluster.view().peers)

    async def CheckIntegrity(self, request: pb.Empty, context: Any) -> sv.IntegrityReport:
        return sv.IntegrityReport(books=self._cluster.books)

    async def Scale(self, request: sv.ScaleRequest, context: Any) -> sv.ScaleReply:
        self._cluster.orders.append(request)
        if self._cluster.scale_refused is not None:
            return sv.ScaleReply(refused=failure_to_proto(self._cluster.scale_refused))
        return sv.ScaleReply(prefill=request.prefill or 1, decode=request.decode or 1)

    async def RestartRoles(self, request: sv.RestartRequest, context: Any) -> sv.RestartReply:
        self._cluster.orders.append(request)
        if self._cluster.scale_refused is not None:
            return sv.RestartReply(refused=failure_to_proto(self._cluster.scale_refused))
        return sv.RestartReply(restart=sv.Restart(since_ns=5_000_000_000, roles=request.roles or ["decode"]))

    async def Stop(self, request: pb.Empty, context: Any) -> sv.StopReply:
        self._cluster.orders.append(request)
        return sv.StopReply(grace_s=25.0)


class FakeCluster:
    """Use as a context. `script` runs as a task for every submitted request; replace it at any time.

    Submitted requests are read from their gateway at once, as a prefill instance does.

    `submitted`, `cancelled`, `claims`, `asked` and `hellos` record messages of gateways, in order. `held` has requests
    that were submitted, and have not ended or been lost or forgotten. A gateway that asks for another request learns
    that no process has it.
    """

    def __init__(self, script: Script | None = None, info: ModelInfo | None = None, capacity_tokens: int = 0) -> None:
        self.script: Script = script or counting_script
        self.info: ModelInfo | None = info or fake_model_info()
        self.capacity_tokens = capacity_tokens
        self.states = dict.fromkeys(ROLES, "ready")
        self.ending = False
        self.books = [sv.BookCheck(store="kv_pool-0", instance="kv_pool-0", capacity_blocks=1, free_blocks=1)]
        self.grace_s = 0.0
        self.restart = sv.Restart(done=True)
        self.orders: list[Any] = []  # Scale and Stop
        self.scale_refused: AlignedServeError | None = None
        self.address = ""
        self.submitted: list[RequestSpec] = []
        self.submissions: list[list[RequestSpec]] = []
        self.cancelled: list[RequestKey] = []
        self.claims: list[list[RequestKey]] = []
        self.asked: list[list[RequestKey]] = []
        self.held: set[RequestKey] = set()
        self.hellos: list[sc.GatewayHello] = []
        self.reports: list[sv.RoleReport] = []
        self.outboxes: list[Outbox[sc.SchedulerMessage]] = []
        self.views: list[Outbox[sv.RoleOrder]] = []
        self.errors: list[BaseException] = []
        self.no_live = False  # whether the supervisor has no state to show
        self.told: dict[str, str] = {}  # the scheduler's states of open requests, by id, for people who look
        self.gateways: dict[str, str] = {}  # addresses of gateways in the view, by id
        self._news = asyncio.Event()
        self._version = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._emitters: dict[str, TokenEmitter] = {}
        self._server = RpcServer(TOKEN)
        self._specs = SpecReader(TOKEN)
        self._reading = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._server.add(sc_grpc.add_SchedulerServicer_to_server, _Scheduler(self))
        self._server.add(sv_grpc.add_SupervisorServicer_to_server, _Supervisor(self))
        self.address = await self._server.start()
        for role in ("prefill", "decode"):
            process = pb.ProcessKey(role=role, id=f"{role}-0", incarnation=1)
            self._emitters[role] = TokenEmitter(process, TOKEN, lambda address: None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._specs.close()
        for emitter in self._emitters.values():
            await emitter.close()
        await self._server.stop(0.0)
        if self.errors:
            raise self.errors[0]

    # ---- called by scripts

    def emit(
        self,
        spec: RequestSpec,
        tokens: Iterable[int] = (),
        *,
        position: int | None = None,
        finish: FinishReason | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        error: AlignedServeError | None = None,
        role: str = "decode",
        timed: bool = False,
    ) -> None:
        """Send the next tokens of a request, as a worker would. `spec.output_token_ids` grows."""
        event = self._event(spec, list(tokens), position, finish, logprobs, prompt_logprobs, error, timed=timed)
        self._emitters[role].emit([(spec.gateway_address, event)])

    def emit_together(self, specs: Iterable[RequestSpec], tokens: Sequence[int], finish: FinishReason) -> None:
        """Send the last tokens of several requests in one message, as after one iteration."""
        events = [(spec.gateway_address, self._event(spec, list(tokens), finish=finish)) for spec in specs]
        self._emitters["decode"].emit(events)

    def _event(
        self,
        spec: RequestSpec,
        tokens: list[int],
        position: int | None = None,
        finish: FinishReason | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        error: AlignedServeError | None = None,
        *,
        timed: bool = False,
    ) -> gw.TokenEvent:
        event = gw.TokenEvent(
            key=key_to_proto(spec.key),
            position=len(spec.output_token_ids) if position is None else position,
            token_ids=tokens,
            logprobs=[logprob_to_proto(entry) for entry in logprobs],
            prompt_logprobs=[logprob_to_proto(entry) for entry in prompt_logprobs],
        )
        if finish is not None:
            event.finish_reason = finish
        if finish is not None or timed:
            usual = Stopwatch(Stage.DECODE, time.time_ns(), {Stage.PREFILL: 0.25})
            event.timings.CopyFrom(timings_to_proto(spec.stopwatch if spec.stopwatch.steps else usual))
        if error is not None:
            event.finish_reason = FinishReason.ERROR
            event.failure.CopyFrom(failure_to_proto(error))
        if event.finish_reason:
            self.held.discard(spec.key)
        if position is None:
            spec.output_token_ids.extend(tokens)
        return event

    def forget(self, *keys: RequestKey) -> None:
        """No process has these requests any more, and none reports it."""
        self.held.difference_update(keys)

    def lose(self, *keys: RequestKey, reason: str = "the decode instance died") -> None:
        self.forget(*keys)
        self._tell(lost=sc.Loss(keys=[key_to_proto(key) for key in keys], reason=reason))

    def reject(self, error: AlignedServeError, *keys: RequestKey) -> None:
        self.forget(*keys)
        messages = [key_to_proto(key) for key in keys]
        self._tell(rejected=sc.Rejection(keys=messages, failure=failure_to_proto(error)))

    def ask_whose(self, *keys: RequestKey) -> None:
        self._tell(whose=keys_to_proto(keys))

    def publish_capacity(self, tokens: int) -> None:
        self.capacity_tokens = tokens
        self._tell(capacity=sc.Capacity(max_request_tokens=tokens))

    def publish_intake(self, requests: int = 0, again_s: float = 1.0, *, limited: bool = True) -> None:
        """Set how many more requests gateways may accept."""
        self._tell(intake=sc.Intake(limited=limited, requests=requests, again_s=again_s))

    def break_links(self) -> None:
        """End every gateway's stream to the scheduler. The gateways reconnect."""
        for outbox in list(self.outboxes):
            outbox.close()

    async def break_workers(self) -> None:
        """End the workers' streams to gateways."""
        for role, emitter in list(self._emitters.items()):
            await emitter.close()
            process = pb.ProcessKey(role=role, id=f"{role}-0", incarnation=2)
            self._emitters[role] = TokenEmitter(process, TOKEN, lambda address: None)

    def set_state(self, role: str, state: str) -> None:
        """Change a role's state ("" removes it), and send the new view."""
        self.states[role] = state
        self.publish_view()

    def announce_end(self, grace_s: float) -> None:
        """Send the orders of a supervisor before it ends all roles."""
        self.ending, self.grace_s = True, grace_s
        self.publish_view()

    def publish_view(self) -> None:
        self._version += 1
        for outbox in self.views:
            outbox.put(sv.RoleOrder(view=self.view()))

    # ---- waiting for events

    async def wait_for(self, condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
        """Wait until the condition holds. It is checked after each message of a gateway."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                try:
                    await asyncio.wait_for(self._news.wait(), 0.05)
                except TimeoutError:
                    continue

    # ---- internal

    def view(self) -> sv.ClusterView:
        peers = [
            sv.Peer(
                process=pb.ProcessKey(role=role, id=f"{role}-0", incarnation=1),
                pid=1,
                address=self.address,
                state=state,
            )
            for role, state in self.states.items()
            if state
        ]
        for name, address in self.gateways.items():
            process = pb.ProcessKey(role="gateway", id=name, incarnation=1)
            peers.append(sv.Peer(process=process, pid=1, address=address, state="ready"))
        model_info = self.info.to_json() if self.info is not None else ""
        return sv.ClusterView(
            version=self._version,
            peers=peers,
            model_info=model_info,
            ending=self.ending,
            grace_s=self.grace_s,
            restart=self.restart,
        )

    def on_gateway_message(self, message: sc.GatewayMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "hello":
            self.hellos.append(message.hello)
        elif kind == "submit":
            keys = keys_from_proto(pb.RequestKeys(keys=[head.key for head in message.submit.requests]))
            self.held.update(keys)
            self._run(self._on_submission(message.submit.requests[0].gateway_id, keys))
        elif kind == "cancel":
            self.cancelled += (cancelled := keys_from_proto(message.cancel))
            self.forget(*cancelled)
        elif kind == "open":
            self.asked.append(keys_from_proto(message.open))
            if unknown := [key for key in self.asked[-1] if key not in self.held]:
                self._tell(unknown=keys_to_proto(unknown))
        elif kind == "claim":
            self.claims.append(keys_from_proto(message.claim))
        self._news.set()

    async def _on_submission(self, gateway_id: str, keys: list[RequestKey]) -> None:
        address = next(hello.address for hello in reversed(self.hellos) if hello.process.id == gateway_id)
        async with self._reading:  # in the order of submission
            found = await self._specs.read(address, keys)
        if not found:  # cancelled meanwhile
            return
        specs = [spec_from_proto(spec) for spec in found.values()]
        self.submissions.append(specs)
        for spec in specs:
            spec.prompt_token_ids = specs[0].prompt_token_ids
            self.submitted.append(spec)
            self._run(self._play(spec))
        self._news.set()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, spec: RequestSpec) -> None:
        try:
            await self.script(self, spec)
        except Exception as error:  # raised again when the context ends
            self.errors.append(error)

    def _tell(self, **body: Any) -> None:
        for outbox in self.outboxes:
            outbox.put(sc.SchedulerMessage(**body))


async def counting_script(cluster: FakeCluster, spec: RequestSpec) -> None:
    """Emit tokens 100, 101, 102, … up to max_tokens, the first from prefill. Later epochs go on after earlier ones."""
    while spec.remaining_tokens > 0:
        token = 100 + len(spec.output_token_ids)
        last = spec.remaining_tokens == 1
        role = "decode" if spec.output_token_ids else "prefill"
        cluster.emit(spec, [token], role=role, finish=FinishReason.LENGTH if last else None)
        await asyncio.sleep(0)


def playing(*steps: Sequence[int], finish: FinishReason = FinishReason.LENGTH, pause_s: float = 0.0) -> Script:
    """A script that emits these tokens, one event for each step, and ends. Later epochs go on after earlier ones."""

    async def play(cluster: FakeCluster, spec: RequestSpec) -> None:
        sent = 0
        for number, step in enumerate(steps):
            new = list(step)[max(0, len(spec.output_token_ids) - sent) :]
            sent += len(step)
            last = number == len(steps) - 1
            if new or last:
                cluster.emit(spec, new, finish=finish if last else None)
            await asyncio.sleep(pause_s)

    return play


async def silent_script(cluster: FakeCluster, spec: RequestSpec) -> None:
    """Says nothing."""
