"""What the supervisor derives from the places of instances: the pairs, and the links that each role learns of."""

from __future__ import annotations

from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.plan import plan_roles
from alignedserve.config import ClusterConfig, Config, SupervisorConfig
from alignedserve.errors import ResourceError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.sizing import StorePlan
from support.fake_roles import MODEL

GPUS = 4
ISLANDS = {"cuda:0": ("cuda:0", "cuda:3"), "cuda:1": ("cuda:1", "cuda:2")}
ISLANDS |= {"cuda:2": ISLANDS["cuda:1"], "cuda:3": ISLANDS["cuda:0"]}  # islands of two devices that reach each other


class Cell:
    """Two prefill instances on cuda:0 and 1 and two decode instances on cuda:2 and 3, by default."""

    def __init__(self, channel: str = "auto", *, allow_slow: bool = True) -> None:
        cluster = ClusterConfig(device="cuda", prefill=2, decode=2, channel=channel, allow_slow_channel=allow_slow)
        config = Config(cluster=cluster, supervisor=SupervisorConfig(spares=0))
        self.core = SupervisorCore(config, plan_roles(config, GPUS), gpus=GPUS)
        self.core.begin(0.0)
        self.incarnations: dict[str, int] = {}

    def join(self, role_id: str, node_id: str = "n") -> None:
        self.incarnations[role_id] = self.incarnations.get(role_id, 0) + 1
        device = self.core.roster.slots[role_id].planned.device
        hello = sv.RoleHello(process=self.key(role_id), pid=1, node_id=node_id, device=device)
        assert self.core.joined(hello, 0.0) is None

    def say(self, role_id: str, state: str = "ready", *, islands: bool = False) -> None:
        device = self.core.roster.slots[role_id].planned.device
        self.core.heard(self.key(role_id), sv.Heartbeat(state=state, reaches=ISLANDS[device] if islands else ()), 0.0)

    def end(self, role_id: str) -> None:
        self.core.ended(role_id, self.core.roster.slots[role_id].generation, "killed", 0.0)

    def key(self, role_id: str) -> pb.ProcessKey:
        return pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id, incarnation=self.incarnations[role_id])

    def pairs(self) -> set[tuple[str, str, int]]:
        return {(pair.decode_id, pair.prefill_id, pair.link_rank) for pair in self.core.view().pairs}


INSTANCES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
BY_INDEX = {("decode-0", "prefill-0", 0), ("decode-1", "prefill-1", 0)}
BY_ISLAND = {("decode-1", "prefill-0", 0), ("decode-0", "prefill-1", 0)}


def test_pairs_go_by_index_where_nothing_is_known_of_links_and_where_all_are_alike():
    cell = Cell()
    assert cell.pairs() == BY_INDEX
    for role_id in INSTANCES:
        cell.join(role_id)
        cell.say(role_id)
    assert cell.pairs() == BY_INDEX


def test_instances_are_paired_with_those_whose_memory_they_reach_and_everybody_hears_of_it():
    cell = Cell()
    for role_id in INSTANCES:
        cell.join(role_id)
    version = cell.core.view().version
    cell.say("decode-0", "loading", islands=True)
    assert cell.pairs() == BY_ISLAND
    assert cell.core.view().version > version
    for role_id in INSTANCES:
        cell.say(role_id, islands=True)
    assert cell.pairs() == BY_ISLAND


def test_those_that_have_served_stay_paired_whatever_is_heard_of_their_link():
    cell = Cell()
    for role_id in INSTANCES:
        cell.join(role_id)
        cell.say(role_id)
    for role_id in INSTANCES:
        cell.say(role_id, islands=True)
    # They copy through the host.
    assert cell.pairs() == {(decode_id, prefill_id, 2) for decode_id, prefill_id, _ in BY_INDEX}


def test_the_successor_of_one_that_died_is_paired_by_where_it_is():
    cell = Cell()
    for role_id in INSTANCES:
        cell.join(role_id)
        cell.say(role_id)
    for role_id in ("decode-0", "decode-1"):
        cell.end(role_id)
    cell.join("decode-0")
    cell.say("decode-0", "loading", islands=True)
    assert cell.pairs() == BY_ISLAND
    cell.say("decode-0", islands=True)
    cell.join("decode-1")
    cell.say("decode-1", islands=True)
    assert cell.pairs() == BY_ISLAND


def test_another_node_is_the_worst_link():
    cell = Cell()
    nodes = {"prefill-0": "n", "prefill-1": "m", "decode-0": "m", "decode-1": "n"}
    for role_id, node_id in nodes.items():
        cell.join(role_id, node_id)
        cell.say(role_id, islands=True)
    assert cell.pairs() == BY_ISLAND
    alone = Cell()
    for role_id in INSTANCES:
        alone.join(role_id, "n" if role_id.startswith("prefill") else "m")
        alone.say(role_id)
    assert alone.pairs() == {(decode_id, prefill_id, 3) for decode_id, prefill_id, _ in BY_INDEX}


def test_a_supervisor_s_successor_parts_no_running_pair():
    first = Cell()
    for role_id in INSTANCES:
        first.join(role_id)
        first.say(role_id, islands=True)
    told = first.core.view()
    second = Cell()
    second.incarnations = dict(first.incarnations)
    found = [second.core.roster.slots[role_id].planned for role_id in INSTANCES]
    second.core.scaling.adopt(told, found, 0.0)
    second.core.begin(0.0, INSTANCES)
    assert second.pairs() == BY_ISLAND
    for role_id in INSTANCES:
        second.core.joined(sv.RoleHello(process=second.key(role_id), pid=1, node_id="n"), 0.0)
        second.say(role_id, islands=True)
    assert second.pairs() == BY_ISLAND


def test_an_instance_whose_only_pair_is_to_go_gets_another():
    cell = Cell()
    for role_id in cell.core.roster.slots:
        cell.join(role_id)
        cell.say(role_id)
    cell.core.planner.adopt(MODEL.to_json(), StorePlan(16, 1, 1, 1, 1, 1).to_json())
    cell.core.scale(1, 2, {"": 1 << 50}, 0.0)
    assert cell.pairs() == BY_INDEX | {("decode-1", "prefill-0", 0)}


def test_a_start_fails_as_soon_as_a_pair_is_known_to_have_no_such_channel():
    cell = Cell("cuda-ipc", allow_slow=False)
    for role_id in ("prefill-0", "decode-1", "decode-0"):
        cell.join(role_id, "m" if role_id == "decode-0" else "n")
        assert cell.core.failure is None  # the other prefill instance may still come up beside decode-0
    cell.join("prefill-1", "n")
    assert cell.core.state() == "failed"
    assert cell.core.failure.code == ResourceError.code
    assert "decode-0 (cuda:2 of node m) and prefill-" in cell.core.failure.message
    assert "they are on different nodes" in cell.core.failure.message


def test_devices_that_do_not_reach_each_other_end_the_start_once_they_have_said_so():
    cell = Cell(allow_slow=False)
    for role_id in INSTANCES:
        cell.join(role_id)
    cell.say("decode-0", "loading", islands=True)
    assert cell.core.failure is None  # they are paired within their islands
    alone = Cell(allow_slow=False)
    for role_id in INSTANCES:
        alone.join(role_id)
    for role_id in INSTANCES:
        device = alone.core.roster.slots[role_id].planned.device
        alone.core.heard(alone.key(role_id), sv.Heartbeat(state="loading", reaches=(device,)), 0.0)
    assert "cannot access each other's memory" in alone.core.failure.message


def test_where_it_is_allowed_the_cluster_starts_on_the_next_best():
    cell = Cell("cuda-ipc")
    for role_id in INSTANCES:
        cell.join(role_id, "n" if role_id.startswith("prefill") else "m")
    assert cell.core.failure is None
