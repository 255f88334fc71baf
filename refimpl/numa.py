"""Host memory on a chosen NUMA node. A host with several sockets has memory near to a GPU, and memory that is not.

By system calls: no library needs to be there, and memory is placed page by page when it is first written or pinned.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from pathlib import Path

from refimpl.cudart import cudart
from refimpl.devices import number_of, platform_of

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")

MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
BIND = 2  # MPOL_BIND: from this node or not at all
BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def nodes() -> list[int]:
    """NUMA nodes that have memory here."""
    try:
        text = (NODES / "has_memory").read_text()
    except OSError:
        return []
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [node for first, last in ranges for node in range(int(first), int(last or first) + 1)]


def require_node(node: int) -> None:
    """`ValueError` unless there is such a node."""
    if node not in nodes():
        raise ValueError(
            f"numa_node={node!r}: there is no such node here, only {nodes() or 'none that Linux tells of'}; "
            f"numa_node=None leaves it to the system"
        )


def bind(address: int, nbytes: int, node: int) -> None:
    """Memory that is mapped and not yet written comes from `node`, and from nowhere else. `OSError` if it cannot."""
    require_node(node)
    number = MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"numa_node={node}: only known how on {', '.join(MBIND)}; numa_node=None works")
    words = (ctypes.c_ulong * (node // BITS + 1))()
    words[node // BITS] = 1 << node % BITS
    libc = ctypes.CDLL(None, use_errno=True)
    most = ctypes.c_ulong(len(words) * BITS + 1)  # Linux counts one too many
    failed = libc.syscall(
        *(ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(nbytes)),
        *(ctypes.c_long(BIND), words, most, ctypes.c_long(0)),
    )
    if failed:
        error = ctypes.get_errno()
        raise OSError(
            error,
            f"numa_node={node} was refused ({os.strerror(error)}): containers need the capability SYS_NICE for it, "
            f"or start the program under `numactl --membind={node}` and leave numa_node=None",
        )


def nearest(device: str) -> int | None:
    """The node that a GPU is attached to; None where the system does not tell, as on hosts with one node."""
    if platform_of(device) != "cuda":
        return None
    name = ctypes.create_string_buffer(16)
    library = cudart()
    library.check(library.handle.cudaDeviceGetPCIBusId(name, len(name), number_of(device)), f"bus id of {device}")
    return node_of(name.value.decode())


def node_of(bus_id: str) -> int | None:
    """The node that a PCI device is attached to, by its address ("0000:1B:00.0")."""
    try:
        node = int((PCI_DEVICES / bus_id.lower() / "numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None
