"""Backend `auto`: the fastest by the table, of those that can."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels_cupy import auto, calibrate
from kernels_cupy.auto import BACKENDS, BUILT_IN, Demand, explain, predicted
from kernels_cupy.copy_engine import count_descriptors, descriptors
from kernels_cupy.jobs import runs_and_bytes
from kernels_cupy.pieces import pieces
from kernels_cupy.runtimes import emulated
from kernels_cupy.specs import HASH
from refimpl import Budget, DevicePool, HostPool, presets, slots_of
from refimpl.runtime import Stuck
from refimpl.transfer import Transfer
from verify.guarded import on_the_device

pytestmark = pytest.mark.emulated

SPEC = presets.mha(layers=3, heads=2, head_dim=8, dtype=torch.bfloat16, page_size=4)
SLOW = {"latency_s": 1.0, "gb_per_s": [[1, 1.0], [2**20, 1.0]]}
FAST = {"latency_s": 1e-6, "gb_per_s": [[1, 50.0], [2**20, 50.0]]}


def prepared(
    layout: str = "page_first", direction: str = "load", pages: tuple[int, ...] = (4, 5, 0), there: bool = False
) -> Transfer:
    host, device = HostPool(SPEC, layout, 9, "auto", platform="emulated"), DevicePool(SPEC, 9)
    to = slots_of([1, 2, 7][: len(pages)], 4)
    return host.prepare(device, slots_of(list(pages), 4), on_the_device(to, complete=True) if there else to, direction)


def rated(monkeypatch: pytest.MonkeyPatch, fastest: str, direction: str) -> None:
    """A table by which one backend is the fastest in one direction, and the slowest in the other."""
    ways = {True: FAST, False: SLOW}
    rates = {
        name: {way: ways[(name == fastest) == (way == direction)] for way in ("backup", "load")} for name in BACKENDS
    }
    monkeypatch.setattr(auto, "table", lambda platform: {"backends": rates})


@pytest.mark.parametrize("direction", ["backup", "load"])
@pytest.mark.parametrize("fastest", BACKENDS)
def test_the_fastest_in_this_direction_is_chosen(fastest: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rated(monkeypatch, fastest, direction)
    transfer = prepared(direction=direction)
    receipt = transfer.backend.execute(transfer.plan(), transfer.layers, transfer.items, direction)
    receipt.wait()
    assert receipt.path == f"auto: {fastest}"
    assert explain(transfer).endswith(f"choice: {fastest}")


def test_a_backend_that_fails_to_close_does_not_keep_auto_from_closing_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rated(monkeypatch, "kernel", "backup")
    host, device = HostPool(SPEC, "page_first", 9, "auto", platform="emulated"), DevicePool(SPEC, 9)
    staged = host._mover._backends["staged"]  # pyright: ignore[reportAttributeAccessIssue]
    release = emulated().gate("held")
    with emulated().on("held"):
        assert host.backup(device, slots_of([0], 4), slots_of([0], 4)).path == "auto: kernel"
    with pytest.raises(Stuck):
        host.close()
    assert staged._buffer is None
    release()
    emulated().synchronize()


def test_a_list_on_the_device_rules_out_who_cannot_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rated(monkeypatch, "direct", "load")
    transfer = prepared(there=True)
    told = explain(transfer)
    assert "direct  out: the device indices stay on the device" in told
    assert not told.endswith("choice: direct")
    transfer.run().wait()


def test_a_layout_rules_out_who_refuses_it() -> None:
    told = explain(prepared("layer_first"))
    assert "staged  out: staged copies whole pages" in told


def test_memory_that_cannot_be_had_rules_out_staged() -> None:
    host = HostPool(SPEC, "page_first", 9, "auto", platform="emulated", device_budget=Budget(1))
    transfer = host.prepare(DevicePool(SPEC, 9), slots_of([1], 4), slots_of([2], 4), "load")
    assert "staged  out: kv needs 7,680 bytes, 1 of the budget of 1 are left" in explain(transfer)


def test_only_auto_explains() -> None:
    host = HostPool(SPEC, "page_first", 9)
    with pytest.raises(ValueError, match="only backend 'auto' chooses"):
        explain(host.prepare(DevicePool(SPEC, 9), slots_of([1], 4), slots_of([2], 4), "load"))


@pytest.mark.parametrize(
    ("each", "seconds"),
    [
        (512, 2 / 10),  # a shorter piece takes as long, and there are twice as many
        (1024, 1 / 10),
        (2560, (102.4 + 4096 / 30) / 2 / 2560),  # half-way between 102.4 and 136.5 ns
        (4096, 1 / 30),
        (2**30, 1 / 30),
    ],
)
def test_a_piece_between_measured_sizes_takes_a_time_between_theirs(each: int, seconds: float) -> None:
    rates: dict[str, Any] = {"latency_s": 1e-3, "gb_per_s": [[1024, 10.0], [4096, 30.0]]}
    assert predicted(rates, Demand(10**9, each)) == pytest.approx(1e-3 + seconds)


def test_a_rate_that_a_longer_piece_does_not_reach_is_not_believed() -> None:
    rates: dict[str, Any] = {"latency_s": 0.0, "gb_per_s": [[1024, 90.0], [2048, 20.0], [4096, 40.0]]}
    assert predicted(rates, Demand(10**9, 1024)) == predicted(rates, Demand(10**9, 2048)) == pytest.approx(1 / 20)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head", "page_unified"])
@pytest.mark.parametrize("pages", [(4, 5, 0), (3, 1, 8), (4, 5, 6), (2,)])
def test_loads_are_what_the_backends_submit(layout: str, pages: tuple[int, ...]) -> None:
    transfer = prepared(layout, pages=pages)
    plan, layers, items = transfer.plan(), transfer.layers, transfer.items
    runs, nbytes = runs_and_bytes(plan, layers, len(items))
    made = descriptors(plan, layers, items)[2]
    assert int(made.sum()) == nbytes == len(items) * SPEC.page_bytes
    assert count_descriptors(plan, layers, items) == len(made)
    loads = {name: auto.DEMANDS[name](plan, layers, items, "load") for name in BACKENDS}
    assert loads["kernel"] == Demand(nbytes, nbytes / runs)
    assert loads["direct"] == Demand(nbytes, nbytes / len(made))
    found = pieces(plan, layers, exact=False)
    assert loads["staged"].each == pytest.approx(sum(piece.nbytes for piece in found) / len(found))
    assert loads["staged"].nbytes == sum(piece.nbytes for piece in found) * len(items)


def test_a_calibration_rates_every_backend_by_size_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: replace(p, sizes=p.sizes[:2], payload=1 << 16, most=16) for name, p in calibrate.PROBES.items()}
    monkeypatch.setattr(calibrate, "PROBES", few)
    found = calibrate.measure("emulated")
    assert (found["device"], found["kernels"]) == ("emulated", HASH)
    for name, probe in few.items():
        for direction in ("backup", "load"):
            rates = found["backends"][name][direction]
            assert [piece for piece, _ in rates["gb_per_s"]] == list(probe.sizes)
            assert predicted(rates, Demand(10**6, 512)) > rates["latency_s"] > 0


def test_the_built_in_table_rates_every_backend_in_both_directions() -> None:
    content = json.loads(BUILT_IN.read_text(encoding="utf-8"))
    assert (content["device"], content["kernels"]) == ("NVIDIA H200", HASH), "calibrate again on an H200"
    rates = content["backends"]
    assert set(rates) == set(BACKENDS)
    for way in (rates[name][direction] for name in BACKENDS for direction in ("backup", "load")):
        sizes, speeds = zip(*way["gb_per_s"], strict=True)
        assert list(sizes) == sorted(set(sizes))
        assert min(*speeds, way["latency_s"]) > 0


@pytest.mark.parametrize("fastest", ["kernel", "direct"])
def test_closing_waits_for_whoever_was_chosen(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rated(monkeypatch, fastest, "load")
    transfer = prepared()
    receipt = transfer.run()
    assert receipt.event is not None
    assert not receipt.event.query()
    transfer.backend.close()
    assert receipt.event.query()
