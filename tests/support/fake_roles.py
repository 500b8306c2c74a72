"""Roles that only join. They test what the supervisor does with processes.

`python -m support.fake_roles` is `role_main` with these roles. The environment variable `FAKE_<ROLE>` gives further
behaviour as words of `key=value`, among them `fail=CODE`, `exit=SECONDS`, `never_ready=1`, `step=SECONDS` (the time of
a step of its work) and `end=SECONDS` (the time it takes to end). SIGUSR1 blocks the event loop for ever. After SIGUSR2
it reports work that makes no progress.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from alignedserve.cluster.launch import role_main
from alignedserve.cluster.launch.spare import SpareServer
from alignedserve.cluster.node.node_agent import NodeAgentServer
from alignedserve.control import runtime
from alignedserve.control.runtime import RoleServer, RoleSettings
from alignedserve.errors import by_code
from alignedserve.metrics import Page
from alignedserve.model import ModelInfo
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.registry import Registry

MODEL = ModelInfo(
    name="fake",
    path="fake",
    model_type="llama",
    dtype="float32",
    layers=2,
    kv_heads=2,
    head_dim=8,
    vocab_size=100,
    max_positions=256,
    eos_token_ids=(1,),
    generation_defaults={},
    weight_bytes=1000,
)


class FakeRole(RoleServer):
    """Becomes ready once the stores are planned, unless its environment says otherwise."""

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings)
        self._planned = asyncio.Event()

    def servicers(self) -> Sequence[tuple[Callable[[Any, Any], None], object]]:
        return []

    async def on_start(self) -> None:
        orders = self._orders()
        if code := orders.get("fail"):
            raise by_code(code)(f"{self.settings.id} was told to fail")
        if "exit" in orders:
            await asyncio.sleep(float(orders["exit"]))
            os._exit(3)
        if threading.current_thread() is threading.main_thread():  # not in a Ray actor
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, time.sleep, 3600.0)
            loop.add_signal_handler(signal.SIGUSR2, setattr, self, "busy", True)
        self.step_s = float(orders.get("step", 0.0))
        self.set_state("loading")
        await self._planned.wait()
        if "never_ready" not in orders:
            self.set_state("ready")

    def _orders(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in os.environ.get(f"FAKE_{self.role.upper()}", "").split())

    async def on_view(self, view: sv.ClusterView) -> None:
        if view.store_plan:
            self._planned.set()

    async def on_close(self) -> None:
        await asyncio.sleep(float(self._orders().get("end", 0.0)))

    def describe(self) -> sv.Heartbeat:
        page = Page(instance=self.settings.id)
        page.gauge("fake_up", "always 1", 1)
        beat = sv.Heartbeat(holds="nothing", metrics=page.text())
        if self.role in ("prefill", "decode"):
            beat.model_info = MODEL.to_json()
        return beat


class FakePrefill(FakeRole):
    role = "prefill"


class FakeDecode(FakeRole):
    role = "decode"


class FakeKvPool(FakeRole):
    role = "kv_pool"


class FakeScheduler(FakeRole):
    role = "scheduler"


def install() -> None:
    """From now on this process starts fake roles, except that the node agent stays real."""
    module = FakeRole.__module__
    names = {"prefill": FakePrefill, "decode": FakeDecode, "kv_pool": FakeKvPool, "scheduler": FakeScheduler}
    entries = {role: f"{module}:{kind.__name__}" for role, kind in names.items()}
    entries["node_agent"] = f"{NodeAgentServer.__module__}:{NodeAgentServer.__name__}"
    entries["spare"] = f"{SpareServer.__module__}:{SpareServer.__name__}"
    runtime.ROLES = Registry("role", entries)


if __name__ == "__main__":
    install()
    role_main.main()
