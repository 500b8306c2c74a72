"""`python -m alignedserve.cluster.launch.rank_host_main DESCRIPTOR`: a rank host as a plain process.

The first line of stdin has its settings as JSON. It writes its address to the descriptor, and ends when its instance
does, or when stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import traceback

from alignedserve.cluster.launch.rank_hosts import host
from alignedserve.control.runtime import RoleSettings


def _end_with_launcher() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    descriptor, settings = int(sys.argv[1]), RoleSettings(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_launcher, name="end", daemon=True).start()

    def on_address(address: str) -> None:
        os.write(descriptor, address.encode() + b"\n")
        os.close(descriptor)

    try:
        asyncio.run(host(settings, on_address))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads of the engine or of a native library must not delay the end of the process


if __name__ == "__main__":
    main()
