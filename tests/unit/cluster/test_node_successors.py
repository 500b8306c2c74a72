"""What a supervisor's successor knows of nodes: which are there, which are unreachable, and which are lost."""

from __future__ import annotations

from alignedserve.cluster.supervisor.core import ADOPTION_S, Fence, SupervisorCore
from alignedserve.cluster.supervisor.managed_process import Phase
from alignedserve.cluster.supervisor.nodes import GONE_KEPT, RETURN_S
from alignedserve.cluster.supervisor.plan import Node, PlannedRole
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from support.node_cell import APART, HOME, LIMITS, THIRD, Cell, launched


def found_by(cell: Cell, told: sv.ClusterView, roles: list[PlannedRole]) -> SupervisorCore:
    """A successor that was given the view `told` and finds these roles running."""
    second = cell.new_core()
    second.roster.adopt(told.incarnations)
    second.nodes.adopt(told, [(role, cell.core.nodes.agent_socket(role.node_id)) for role in roles])
    second.scaling.adopt(told, roles, 0.0)
    second.settle(cell.placement(), 0.0)
    return second


def test_a_successor_goes_on_with_nodes_and_numbers_and_with_what_died_meanwhile() -> None:
    cell = Cell()
    cell.start()
    cell.nodes, cell.where["decode-0"] = [HOME, THIRD], "third"
    cell.locate()
    found = [slot.planned for slot in cell.core.roster.slots.values() if slot.planned.id != "decode-0"]
    second = found_by(cell, cell.core.view(), found)
    actions = second.begin(0.0, [role.id for role in found])
    assert launched(actions) == {"decode-0": "third"}
    assert [(shard.pool_id, shard.node_id) for shard in second.view().pools] == list(cell.pools().items())
    assert second.nodes.agent_socket("third") == "/agent-2.sock"
    assert second.view().next_node == 3


class Successor:
    """The successor of a supervisor of two nodes: everything is running, but `other` is unreachable."""

    def __init__(self) -> None:
        self.cell = Cell()
        self.cell.start()
        roles = [slot.planned for slot in self.cell.core.roster.slots.values()]
        self.core = found_by(self.cell, self.cell.core.view(), roles)
        self.cell.core, self.cell.now = self.core, 100.0
        assert launched(self.core.begin(100.0, [role.id for role in roles])) == {}
        self.join("home")

    def join(self, node_id: str) -> None:
        for slot in list(self.core.roster.slots.values()):
            if slot.planned.node_id == node_id or (not slot.planned.node_id and node_id == "home"):
                assert self.core.joined(self.cell.hello(slot.planned.id, node_id), self.cell.now) is None
                self.cell.say(slot.planned.id)

    def fenced(self, seconds: float) -> list[str]:
        return sorted(action.role_id for action in self.cell.pass_time(seconds, {"other"}) if isinstance(action, Fence))


def test_a_successor_lets_processes_of_a_node_that_is_cut_off_come_back() -> None:
    successor = Successor()
    assert successor.fenced(30.0) == []
    assert "node other does not answer" in successor.core.degraded()
    successor.join("other")
    assert successor.cell.pass_time(2 * RETURN_S) == []
    assert (successor.core.state(), successor.core.failure) == ("ready", None)


def test_a_successor_fences_them_once_they_have_ended_themselves() -> None:
    successor = Successor()
    assert successor.fenced(LIMITS.orphan_after_s - 2.0) == []
    assert successor.fenced(4.0) == ["decode-0", "kv_pool-1", "node_agent-1"]
    assert successor.core.failure is None


def test_a_successor_takes_them_for_ended_when_ray_gives_their_node_up() -> None:
    successor = Successor()
    assert successor.fenced(20.0) == []
    successor.cell.nodes, successor.cell.where["decode-0"] = [HOME, THIRD], "third"
    assert launched(successor.cell.locate()) == {"decode-0": "third", "node_agent-2": "third", "kv_pool-2": "third"}


def test_one_that_a_successor_found_and_that_alone_does_not_join_is_fenced_and_fails_no_start() -> None:
    successor = Successor()
    successor.join("other")
    slot = successor.core.roster.slots["decode-0"]
    slot.member = None
    slot.was_ready = False
    slot.enter(Phase.STARTING, 100.0)
    slot.deadline = 100.0 + ADOPTION_S
    fenced = [a.role_id for a in successor.cell.pass_time(ADOPTION_S + 1.0) if isinstance(a, Fence)]
    assert fenced == ["decode-0"]
    assert successor.core.failure is None


def test_a_successor_refuses_processes_of_a_node_that_its_predecessor_gave_up() -> None:
    cell = Cell()
    cell.start()
    cell.nodes, cell.where["decode-0"] = [HOME, THIRD], "third"
    cell.locate()
    second = found_by(cell, cell.core.view(), [])
    third = found_by(cell, second.view(), [])
    gateway = sv.RoleHello(process=pb.ProcessKey(role="gateway", id="gateway-x", incarnation=1), node_id="other")
    for successor in (second, third):
        refusal = successor.joined(gateway, 0.0)
        assert refusal is not None
        assert "node other was given up" in refusal.message


def test_a_node_that_goes_between_two_supervisors_is_given_up_though_nothing_of_it_is_found() -> None:
    cell = Cell()
    cell.start()
    told, cell.nodes = cell.core.view(), [HOME]
    second = found_by(cell, told, [])
    assert list(second.nodes.gone) == ["other"]
    assert [shard.pool_id for shard in second.view().pools] == ["kv_pool-0"]


def test_nodes_that_were_given_up_are_not_kept_for_ever() -> None:
    cell = Cell()
    cell.start()
    for number in range(2 * GONE_KEPT):
        cell.nodes = [HOME, Node(f"n{number}", "10.0.1.1")]
        cell.where["decode-0"] = f"n{number}"
        cell.locate()
    gone = list(cell.core.view().gone_nodes)
    assert gone == [f"n{number}" for number in range(2 * GONE_KEPT - 1 - GONE_KEPT, 2 * GONE_KEPT - 1)]
    assert list(found_by(cell, cell.core.view(), []).nodes.gone) == gone


def test_a_successor_refuses_an_older_process_and_starts_younger_ones() -> None:
    cell = Cell()
    cell.start()
    cell.incarnations["decode-0"] = 7000
    assert cell.core.joined(cell.hello("decode-0"), cell.now) is None
    second = found_by(cell, cell.core.view(), [])
    cell.incarnations["decode-0"] = 6999
    refusal = second.joined(cell.hello("decode-0"), 0.0)
    assert refusal is not None
    assert "newer incarnation" in refusal.message
    assert second.roster.slots["decode-0"].incarnation == 7000
    assert second.roster.slots["kv_pool-1"].incarnation == 1


def test_an_instance_that_comes_back_under_its_id_is_younger_than_its_namesake() -> None:
    cell = Cell(1, 2, {**APART, "decode-1": "other"})
    cell.incarnations["decode-1"] = 6999
    cell.start()
    cell.core.scale(1, 1, {"home": 1 << 50}, cell.now)
    cell.core.ended("decode-1", cell.core.roster.slots["decode-1"].generation, "it was to go", cell.now)
    assert "decode-1" not in cell.core.roster.slots
    assert cell.core.view().incarnations["decode-1"] == 7000
    cell.core.scale(1, 2, {"home": 1 << 50}, cell.now)
    assert cell.core.roster.slots["decode-1"].incarnation == 7000


def test_a_successor_learns_a_nodes_number_from_any_role_there() -> None:
    cell = Cell()
    cell.start()
    cell.nodes, cell.where["decode-0"] = [HOME, THIRD], "third"
    cell.locate()
    second = found_by(cell, sv.ClusterView(), [cell.core.roster.slots["decode-0"].planned])
    assert (second.nodes.number("third"), second.nodes.agent_socket("third")) == (2, "/agent-2.sock")
    assert second.nodes.number("home") == 3
