"""The groups in the order in which they run, with their time budgets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

MOST_S = 565.0
"""Time limit for all groups together; a call on the device machine is limited to ten minutes."""

CPU_PATIENCE = 4.0
"""Factor of all budgets on a CPU: nothing is measured there, and other work may slow it down."""


@dataclass(frozen=True, slots=True)
class Group:
    """`budget_s`: its time limit, to which unused time of earlier groups is added.

    `timed`: it runs alone; untimed groups only compare results and run in parallel. `extra`: runs only with `--only`.
    """

    name: str
    budget_s: float
    what: str
    timed: bool = True
    extra: bool = False

    @property
    def module(self) -> str:
        return f"gpu_suite.cases.{self.name}"


GROUPS = (
    Group("kernels", 80.0, "tests marked gpu, and every kernel against fp64 attention at real shapes", timed=False),
    Group(
        "tokens", 80.0, "greedy tokens of ModelRunner against transformers, several architectures, fp32", timed=False
    ),
    Group("tokens_bf16", 80.0, "the same in bf16", timed=False),
    Group("cluster", 80.0, "the same through a whole cluster of plain processes", timed=False),
    Group("ranks", 80.0, "the same of instances of several ranks, on a GPU each or on shared ones, fp32", timed=False),
    Group("transfers", 80.0, "10,000 hand-overs through every channel, with checksums", timed=False),
    Group("attention", 35.0, "decode attention against the copy rate, and the paper's mixes"),
    Group("iteration", 60.0, "a whole decode iteration, 7B shapes, and how long the GPU idles between two"),
    Group("prefill", 25.0, "8 x 2048 tokens against the matrix-product rate"),
    Group("throughput", 85.0, "256 ShareGPT-like requests: our engine, and transformers' generate_batch"),
    Group("pool", 20.0, "page-locked pool to HBM and back, in blocks, against one large copy"),
    Group("device", 30.0, "HBM to HBM of another process by CUDA IPC and NCCL, against a device copy"),
    Group("bandwidth", 15.0, "what one thread block reads alone, and 2, 4 ... all SMs together"),
    Group("profile", 70.0, "alignedserve profile, its file loaded by the scheduler and the simulator"),
    Group("handover", 50.0, "a 2k-token request joins a running batch: time beyond its copy"),
    Group("policies", 95.0, "aligned over fcfs, with the split kernel and with no_split, by profile's cost model"),
    Group("prefixes", 120.0, "attention over shared blocks, and first tokens with a prefix cache", extra=True),
    Group(
        "rank_times",
        240.0,
        "iterations, prompts and copies of several ranks, over those of one or equal ones",
        extra=True,
    ),
    Group("sweep", 240.0, "tuning settings of the decode kernel, the best of each shape", extra=True),
)

BY_NAME = {group.name: group for group in GROUPS}


def planned_s(groups: tuple[Group, ...] = GROUPS) -> float:
    """Total time budget of `groups`: untimed ones run in parallel."""
    wanted = [group for group in groups if not group.extra]
    together = max((group.budget_s for group in wanted if not group.timed), default=0.0)
    return together + sum(group.budget_s for group in wanted if group.timed)


def patience(device: str) -> float:
    """The factor of the budgets."""
    return CPU_PATIENCE if device == "cpu" else 1.0


def on_device(groups: Iterable[Group], device: str) -> list[Group]:
    """The groups with their budgets on `device`."""
    return [replace(group, budget_s=group.budget_s * patience(device)) for group in groups]
