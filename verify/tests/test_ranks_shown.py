"""What notebook 04 shows of ranks that are slow alone, from results made by hand; and whose results it shows."""

import json
from pathlib import Path
from typing import Any

import pytest

from notebooks import ranks
from refimpl import presets

Content = dict[str, Any]
MODEL = "llama-3.1-8b"


def cell(backend: str, path: str, gb_per_s: list[float], percent: float) -> Content:
    """Of two ranks, of which each loads alone; then both do, faster than they can."""
    alone = [
        {"play": "alone", "directions": way, "gb_per_s": rates, "kept": None, "percent_of_ceiling": percent}
        for way, rates in (
            (["load", None], [gb_per_s[0], None]),
            ([None, "load"], [None, gb_per_s[1]]),
        )
    ]
    both = {"play": "same", "directions": ["load"] * 2, "gb_per_s": [99.0] * 2, "kept": [3.0] * 2}
    plays = [*alone, both | {"percent_of_ceiling": 1.0}]
    paths = {"path": ["none", path], "descriptors": [7, 2000]}
    return {"backend": backend, "status": "measured", "plays": plays} | paths


def of_ranks() -> Content:
    """Only `direct` in page_first is slow alone."""
    slow, fast = cell("direct", "direct", [30.0, 31.0], 55.0), cell("direct", "direct", [44.0, 46.0], 81.0)
    kernel, auto = cell("kernel", "kernel", [50.0, 50.0], 90.0), cell("auto", "auto: kernel", [53.0, 53.0], 95.0)
    row = {"case": MODEL, "pool": "kv", "payload_bytes": 5 * 10**9}
    pages = [("page_first", [slow, kernel, auto]), ("page_head", [fast])]
    return {"ceilings": [], "rows": [row | {"layout": layout, "cells": cells} for layout, cells in pages]}


def of_one_gpu(**other: Any) -> Content:
    """10 GB that take the device 0.2 s, and the host 0.25 s to describe in 1000 descriptors; a row of others first."""

    def measured(mover: str, seconds: float) -> Content:
        times = {"timing": {"median_s": 0.8 * seconds}, "submit": {"median_s": seconds}}
        return {"mover": mover, "status": "measured", "descriptors": 1000} | times

    wanted = {"layout": "page_first", "direction": "load", "pool": "kv"}
    row = {
        "portion": "core",
        "case": MODEL,
        "page_bytes": presets.model(MODEL)["kv"].page_bytes,
        "payload_bytes": 10**10,
        "scattered": True,
    }
    cells = [measured("kernel", 2.0), measured("direct", 0.25)]
    decoy = row | wanted | {"direction": "backup", "cells": [measured("direct", 5.0)]}
    return {"rows": [decoy, row | wanted | {"cells": cells} | other]}


def test_what_is_slow_alone_stands_beside_one_gpu_and_the_fastest_backend_that_is_no_choice_of_others() -> None:
    (line,) = ranks.slow(of_ranks(), of_one_gpu())
    assert line == [f"{MODEL} kv load", "page_first", "direct", "30.0, 31.0", "40.0", "10.0", "kernel, 50.0"]


@pytest.mark.parametrize("other", [{"layout": "page_head"}, {"pool": "mamba"}, {"scattered": False}])
def test_where_one_gpu_was_not_measured_alike_nothing_is_told_of_it(other: Content) -> None:
    (line,) = ranks.slow(of_ranks(), of_one_gpu(**other))
    assert line[4:6] == ["-", "-"]


def test_the_ranks_shown_are_those_of_the_folder_or_else_the_committed_ones(tmp_path: Path) -> None:
    assert ranks.shown(str(tmp_path))[0] == ranks.shown("committed")[0] == ranks.COMMITTED
    own = tmp_path / ranks.COMMITTED.name
    own.write_bytes(ranks.COMMITTED.read_bytes())
    assert ranks.shown(str(tmp_path)) == (own, json.loads(own.read_text()))


def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path) -> None:
    own = tmp_path / ranks.COMMITTED.name
    for text in '{"rows": [', '{"rows": []}':
        own.write_text(text)
        with pytest.raises(ValueError, match=rf"{own}: .*; delete it, or run make bench-gpus"):
            ranks.shown(str(tmp_path))
