"""An adapter to copy from, nothing of ours in it: whole pages of `layer_first`, moved by mover.c through ctypes.

cc -O2 -shared -fPIC mover.c -o mover.so && python -m verify adapter pages_in_c
"""

# pyright: basic

import ctypes
import pathlib

LIBRARY = ctypes.CDLL(str(pathlib.Path(__file__).with_name("mover.so")))
ADDRESS, NUMBER = ctypes.c_void_p, ctypes.c_int64
LIBRARY.check.argtypes = [ADDRESS, NUMBER, NUMBER, ADDRESS, NUMBER, NUMBER, NUMBER]
LIBRARY.move.argtypes = [ADDRESS, ADDRESS, ADDRESS, ADDRESS, NUMBER, NUMBER, NUMBER]
LIBRARY.move.restype = None


def capabilities(geometry, layout, direction):
    if layout != "layer_first" or direction.endswith("entries"):
        return "only whole pages in layer_first"


def transfer(geometry, layout, direction, host, device, host_indices, device_indices, layers):
    size, backup = geometry["page_size"], direction == "backup"
    ends = [(host_indices, geometry["host_pages"]), (device_indices, geometry["device_pages"])]
    (to, to_pages), (origin, pages) = ends if backup else ends[::-1]
    lists = to.ctypes.data, len(to), to_pages, origin.ctypes.data, len(origin), pages, size
    if reason := LIBRARY.check(*lists):
        raise ValueError(f"lists refused, reason {reason}")
    for buffer in geometry["host"]:
        layer_bytes = buffer["bytes"] // len(buffer["layers"])
        for position, layer in enumerate(buffer["layers"]):
            if layers is None or layer in layers:
                same = (buffer["components"], [layer])
                name = next(b["name"] for b in geometry["device"] if (b["components"], b["layers"]) == same)
                there = host[buffer["name"]].ctypes.data + position * layer_bytes
                here = device[name].ctypes.data
                a, b = (there, here) if backup else (here, there)
                each = layer_bytes // geometry["host_pages"]
                LIBRARY.move(a, to.ctypes.data, b, origin.ctypes.data, len(to), size, each)
