"""What measuring writes down and reporting reads: sessions with their ceilings, rows of cells, raw samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from verify.bench.record import Timing


@dataclass
class Ceiling:
    """A plain memcpy. `direction` is "backup", "load", or "both" at once (`payload_bytes` then counts both)."""

    direction: str
    payload_bytes: int
    timing: Timing
    gb_per_s: float


@dataclass
class Call:
    """A call of the runtime alone: a "batch" of `count` copies, a "launch", or an "event" and a wait for it.

    held  all were submitted before the device began; None where there is no device
    """

    name: str
    count: int
    submit: Timing
    held: bool | None


@dataclass
class Interference:
    """A loop of matmuls alone and with transfers beside it throughout, in alternation.

    alone_per_s, beside_per_s  matmuls a second, one sample a round
    slowdown                   1 - median beside / median alone
    gb_per_s                   median rate of the transfers meanwhile
    kernel_s                   seconds a transfer in which a kernel of its own ran; None where that cannot be profiled
    """

    alone_per_s: list[float]
    beside_per_s: list[float]
    slowdown: float
    gb_per_s: float
    kernel_s: float | None


@dataclass
class Cell:
    """One way to move the bytes of a row.

    mover               its name, unique in the row; what it consists of follows
    blocks              SM blocks asked for; None: the backend's own choice
    staging_pages       pages of staging asked for; None: the backend's own choice
    layerwise           loads of one layer after another, submitted in a row
    status              "measured"; "refused" before a byte moved; "wrong": other bytes than the oracle's, so not
                        timed; "failed": it raised
    reason              why it is not measured
    path … host_syncs   of one transfer, from its receipts
    held                everything was submitted before the device began
    prepare_s           seconds to check indices once
    timing              device time of a transfer
    submit              host time of a transfer, the device being held
    own_s               the same less what calls of the device took in it, in transfers of their own; none if not held
    latency             from submitting one single page until it is there
    gb_per_s            payload, counted once, over the median; GB = 1e9 bytes
    percent_of_ceiling  of the plain memcpy in this direction, same session
    """

    mover: str
    backend: str
    blocks: int | None = None
    staging_pages: int | None = None
    layerwise: bool = False
    status: str = "measured"
    reason: str = ""
    path: str | None = None
    descriptors: int | None = None
    kernels: int | None = None
    index_uploads: int | None = None
    host_syncs: int | None = None
    held: bool | None = None
    prepare_s: float | None = None
    timing: Timing | None = None
    submit: Timing | None = None
    own_s: float | None = None
    latency: Timing | None = None
    gb_per_s: float | None = None
    percent_of_ceiling: float | None = None
    interference: Interference | None = None


@dataclass
class Row:
    """One pool in one layout and direction, and its cells.

    session      position of the session whose ceilings its percents are of
    runs         contiguous pieces that move: {"bytes": of each, "count": of them}, shortest first
    piece_bytes  bytes of a host page that lie together (of its smallest buffer); 0 where layers lie apart
    dispatch     paths that SGLang would take, see `refimpl.sglang`
    """

    portion: str
    session: int
    case: str
    pool: str
    layout: str
    direction: str
    scattered: bool
    pages: int
    page_bytes: int
    payload_bytes: int
    runs: list[dict[str, int]] = field(default_factory=list)
    piece_bytes: int = 0
    dispatch: list[str] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
