"""Reference implementation of host-memory pools for attention state: layouts, transfers, their order, and an oracle."""

from refimpl import oracle, presets
from refimpl.allocator import Budget, PageAllocator
from refimpl.assembler import Stack, build_stack
from refimpl.controller import Controller
from refimpl.device_pool import DevicePool
from refimpl.geometry import Component, PoolSpec, Segment
from refimpl.hooks import Hooks
from refimpl.host_pool import HostPool
from refimpl.indices import slots_of
from refimpl.layout import LAYOUTS, byte_offset
from refimpl.pinned import HostMemory
from refimpl.plan import plan
from refimpl.pool_group import HostPoolGroup, LogicalPool, PoolTransfer
from refimpl.radix import PrefixCache
from refimpl.rank_pool import RankPool
from refimpl.receipt import Receipt
from refimpl.support import Path, Refusal, UnsupportedPairing, support
from refimpl.windows import Window

__all__ = [
    "LAYOUTS",
    "Budget",
    "Component",
    "Controller",
    "DevicePool",
    "Hooks",
    "HostMemory",
    "HostPool",
    "HostPoolGroup",
    "LogicalPool",
    "PageAllocator",
    "Path",
    "PoolSpec",
    "PoolTransfer",
    "PrefixCache",
    "RankPool",
    "Receipt",
    "Refusal",
    "Segment",
    "Stack",
    "UnsupportedPairing",
    "Window",
    "build_stack",
    "byte_offset",
    "oracle",
    "plan",
    "presets",
    "slots_of",
    "support",
]
