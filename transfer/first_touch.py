"""The first touch of shared host memory: by several threads, and near the GPUs that will copy it.

Only processes with a GPU do this. A pool of CPU workers uses memory only as it fills.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alignedserve.memory import usable_cores

logger = logging.getLogger(__name__)

MAX_THREADS = 8
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: faults pages in, writable, and changes no byte
_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_MBIND = {"x86_64": 237, "aarch64": 235}  # the C library has no function for it
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers: a GPU's other functions are not GPUs

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the interpreter lock


def gpu_memory_nodes(sysfs: Path = Path("/sys")) -> list[int]:
    """The NUMA nodes of this machine's NVIDIA GPUs; [] if there is a single node, or none is given.

    Counts all GPUs of the machine, not only those visible to this process, so that every worker finds the same nodes.
    """
    nodes_here = [folder for folder in (sysfs / "devices/system/node").glob("node[0-9]*") if folder.is_dir()]
    if len(nodes_here) < 2:
        return []
    nodes = set()
    for device in (sysfs / "bus/pci/devices").glob("*"):
        try:
            texts = [(device / name).read_text().strip() for name in ("vendor", "class", "numa_node")]
        except OSError:
            continue
        vendor, kind, node = texts
        if vendor == _NVIDIA and kind[:6] in _DISPLAY_CLASSES and int(node) >= 0:
            nodes.add(int(node))
    return sorted(nodes)


class FirstTouch:
    """Places pages on NUMA nodes and faults them in. Several processes may do so for the same memory."""

    def __init__(self, nodes: Sequence[int] | None = None, threads: int = 0) -> None:
        """`nodes`: by default `gpu_memory_nodes`. `threads`: 0 for half of the cores, up to 8."""
        self._nodes = gpu_memory_nodes() if nodes is None else list(nodes)
        self._threads = threads or max(1, min(MAX_THREADS, usable_cores() // 2))

    def __call__(self, address: int, count: int) -> None:
        """Touch `count` bytes from `address` on, which must be page-aligned. Their contents do not change."""
        if self._nodes and not place(address, count, self._nodes):
            self._nodes = []  # not allowed here: every further piece would fail in the same way
        share = -(-count // self._threads // mmap.PAGESIZE) * mmap.PAGESIZE
        parts = [(address + begin, min(share, count - begin)) for begin in range(0, count, share)]
        with ThreadPoolExecutor(self._threads, thread_name_prefix="touch") as pool:
            list(pool.map(lambda part: populate(*part), parts))


def place(address: int, count: int, nodes: Sequence[int]) -> bool:
    """Allocate pages that do not exist yet on `nodes`, in turn. Returns False if the kernel does not allow it."""
    number = _MBIND.get(platform.machine())
    mask = 0
    for node in nodes:
        mask |= 1 << node
    words = (ctypes.c_ulong * 16)(*((mask >> (64 * index)) & (2**64 - 1) for index in range(16)))
    mode = _MPOL_PREFERRED if len(nodes) == 1 else _MPOL_INTERLEAVE
    if number is not None and not _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(count),
        ctypes.c_long(mode),
        words,
        ctypes.c_ulong(64 * len(words)),
        ctypes.c_ulong(0),
    ):
        return True
    reason = os.strerror(ctypes.get_errno()) if number is not None else f"unknown on {platform.machine()}"
    logger.warning("host memory is not placed on the GPUs' NUMA nodes %s: mbind: %s", list(nodes), reason)
    return False


def populate(address: int, count: int) -> None:
    """Fault pages in without changing them, while other processes may be using them."""
    if not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(count), _POPULATE_WRITE):
        return
    if ctypes.get_errno() == errno.EINVAL:  # an older kernel: reading allocates the pages of shared memory
        for page in range(address, address + count, mmap.PAGESIZE):
            ctypes.c_uint8.from_address(page).value  # noqa: B018
        return
    # Out of memory, or a bad page: registration fails with its own error code.
    logger.warning("host memory could not be touched in advance: %s", os.strerror(ctypes.get_errno()))
