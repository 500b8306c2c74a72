"""gRPC's poller thread outlives the last channel: nothing waits for its end in the event loop."""

import subprocess
import sys

CODE = """
import asyncio, gc, threading, weakref
from alignedserve.{module} import {name}

def pollers():
    return [thread for thread in threading.enumerate() if thread.name.endswith("(_poll_wrapper)")]

async def use():
    {use}

asyncio.run(use())
gc.collect()
assert len(pollers()) == 1, threading.enumerate()
"""
USES = {
    ("control.rpc", "open_channel"): "await open_channel('127.0.0.1:9', 'token').close()",
    ("control.rpc", "RpcServer"): "server = RpcServer('token'); await server.start(); await server.stop()",
    ("client", "AsyncClient"): (
        "client = AsyncClient('127.0.0.1:9', max_retries=0, connect_timeout_s=0.2)\n"
        "    try:\n        await client.models()\n    except Exception:\n        await client.close()\n"
        "    del client"
    ),
}


def test_the_poller_stays_without_channels_and_servers() -> None:
    for (module, name), use in USES.items():
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(module=module, name=name, use=use)],
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )
        assert done.returncode == 0, done.stderr
