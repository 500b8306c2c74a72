"""The machines that tests of several nodes run on: apart, cut off and healed, and gone without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from support.namespaces import Switch, why_not
from support.requirements import needs

pytestmark = needs(why_not())

SERVER = "import socket; s = socket.create_server(('', 7)); print('up', flush=True)\nwhile True: s.accept()[0].close()"
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 7), 1.0)"


def reaches(switch: Switch, source: int, target: int) -> bool:
    command = switch.machines[source].inside(sys.executable, "-c", CALL, switch.machines[target].address)
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False, timeout=30.0).returncode == 0


def test_machines_reach_each_other_until_one_is_cut_off_and_again_when_it_is_healed(tmp_path: Path) -> None:
    with Switch(3) as switch:
        for machine in switch.machines:
            machine.start([sys.executable, "-c", SERVER], dict(os.environ), tmp_path / machine.name)
        deadline = time.monotonic() + 20.0
        while any("up" not in (tmp_path / machine.name).read_text() for machine in switch.machines):
            assert time.monotonic() < deadline
            time.sleep(0.02)

        assert reaches(switch, 0, 1)
        assert reaches(switch, 2, 1)
        switch.cut(switch.machines[1])
        assert not reaches(switch, 0, 1)
        assert not reaches(switch, 1, 2)
        assert reaches(switch, 0, 2)
        switch.heal(switch.machines[1])
        assert reaches(switch, 0, 1)
        assert reaches(switch, 1, 2)
        assert all(sum(switch.bytes_through(machine)) > 0 for machine in switch.machines)


def test_nothing_is_left_of_a_machine(tmp_path: Path) -> None:
    with Switch(1) as switch:
        (machine,) = switch.machines
        machine.start([sys.executable, "-c", SERVER], dict(os.environ), tmp_path / "log")
        machine.run("touch", "/dev/shm/only-here")
        assert not Path("/dev/shm/only-here").exists()
        assert machine.run("hostname").strip() == "node-0"
        outside = list(machine.pids().values())
        assert outside
        assert set(machine.run("ps", "-e", "-o", "pid=").split()) >= {str(pid) for pid in machine.pids()}
    deadline = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in (*outside, machine.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
