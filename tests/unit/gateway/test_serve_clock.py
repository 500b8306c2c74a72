"""Ray Serve's health checks continue after the clock is set; in its own process, as in a Ray worker."""

from __future__ import annotations

import json
import subprocess
import sys

WORKER = """
import json, time
from alignedserve.gateway.serve.serve_ports import set_up_worker

real, ahead = time.time, [0.0]
set_up_worker()
time.time = lambda: real() + ahead[0]
from ray._common.utils import Timer
from ray._common.serialization import pickle_dumps
from ray.serve._private import deployment_state, haproxy

before = [Timer().time(), deployment_state.time.time(), haproxy.time.time()]
ahead[0] = -3600.0
after = [Timer().time(), deployment_state.time.time(), haproxy.time.time()]
deployment_state.time.sleep(0)
pickle_dumps(haproxy.HAProxyManager.__ray_metadata__.modified_class, 'Serve has its actors pickled')
passed = [b - a for a, b in zip(before, after)]
print(json.dumps({"passed": passed, "off": before[0] - real(), "set": time.time() - real()}))
"""


def test_what_serve_times_its_checks_by_does_not_follow_the_clock() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True, timeout=60)
    told = json.loads(done.stdout.splitlines()[-1])

    assert all(0 <= seconds < 10 for seconds in told["passed"])
    assert abs(told["off"]) < 10
    assert told["set"] < -3000
