"""The process of a rank that is not forked. It is bound to its parent before its imports, which take seconds.

`python -m alignedserve.ranks.start DESCRIPTOR PARENT`: the socket to the process of rank 0, and that process's pid.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback

from alignedserve.ranks.forks import MAIN, bind_to_parent, end_with

if __name__ == "__main__":
    bind_to_parent(int(sys.argv[2]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    end_with(channel)
    try:
        importlib.import_module(MAIN).compute(channel)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # threads of Gloo may wait for other ranks
