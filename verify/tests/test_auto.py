"""Backend `auto`: the fastest by the table, of those that can."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels_cupy import auto, calibrate
from kernels_cupy.auto import BACKENDS, BUILT_IN, Demand, explain, predicted, seconds_of
from kernels_cupy.copy_engine import count_descriptors, descriptors
from kernels_cupy.jobs import runs_and_bytes
from kernels_cupy.pieces import pieces
from kernels_cupy.runtimes import emulated
from kernels_cupy.specs import HASH
from refimpl import Budget, Component, DevicePool, HostPool, PoolSpec, cudart, oracle, presets, slots_of
from refimpl.pinned import HostMemory
from refimpl.runtime import Stuck
from refimpl.transfer import Transfer
from verify import fill
from verify.guarded import on_the_device

pytestmark = pytest.mark.emulated

SPEC = presets.mha(layers=3, heads=2, head_dim=8, dtype=torch.bfloat16, page_size=4)
Times = dict[str, Any]


def times(call_s: float, of_a_byte: float) -> Times:
    return {"call_s": call_s, "piece_s": [[1, of_a_byte], [2**20, 2**20 * of_a_byte]]}


NOTHING, FAST, SLOW = times(0.0, 0.0), times(1e-6, 2e-11), times(1.0, 1e-9)


def prepared(
    layout: str = "page_first", direction: str = "load", pages: tuple[int, ...] = (4, 5, 0), there: bool = False
) -> Transfer:
    host, device = HostPool(SPEC, layout, 9, "auto", platform="emulated"), DevicePool(SPEC, 9)
    to = slots_of([1, 2, 7][: len(pages)], 4)
    return host.prepare(device, slots_of(list(pages), 4), on_the_device(to, complete=True) if there else to, direction)


def rated(monkeypatch: pytest.MonkeyPatch, fastest: str, direction: str) -> None:
    """A table by which one backend is the fastest in one direction, and the slowest in the other."""
    ways = {True: {"device": FAST, "host": NOTHING}, False: {"device": SLOW, "host": NOTHING}}
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


@pytest.mark.parametrize(("fastest", "brought"), [("kernel", 2), ("staged", 1), ("direct", 0)])
def test_lists_come_to_the_device_when_a_transfer_is_prepared_not_when_it_runs(
    fastest: str, brought: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rated(monkeypatch, fastest, "load")
    transfer = prepared()
    monkeypatch.setattr(emulated(), "upload", lambda array: pytest.fail("a list is sent when it is needed already"))
    receipt = transfer.run()
    receipt.wait()
    assert (receipt.path, receipt.index_uploads) == (f"auto: {fastest}", brought)


def rated_by_size(monkeypatch: pytest.MonkeyPatch, for_many: str) -> None:
    """A table by which one layer of `prepared()` goes by `kernel`, and all of them by another backend."""
    rates = {name: {"device": SLOW, "host": NOTHING} for name in BACKENDS}
    rates["kernel"] = {"device": times(0.0, 1e-9), "host": NOTHING}
    rates[for_many] = {"device": times(0.0, 5e-10), "host": times(1e-6, 0.0)}
    both_ways = {name: dict.fromkeys(("backup", "load"), rate) for name, rate in rates.items()}
    monkeypatch.setattr(auto, "table", lambda platform: {"backends": both_ways})


@pytest.mark.parametrize("for_many", ["direct", "staged"])
def test_one_layer_may_go_another_way_than_all(for_many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rated_by_size(monkeypatch, for_many)
    transfer = prepared()
    monkeypatch.setattr(emulated(), "upload", lambda array: pytest.fail("a list is sent when it is needed already"))
    one_layer, all_layers = transfer.run((0,)), transfer.run()
    all_layers.wait()
    assert 1e-9 * one_layer.bytes < 1e-6 < 1e-9 * all_layers.bytes, "the host's time for a call decides"
    assert (one_layer.path, all_layers.path) == ("auto: kernel", f"auto: {for_many}")
    assert (one_layer.index_uploads, all_layers.index_uploads) == (2, 0)


def test_a_list_on_the_device_is_read_once_on_a_stream_whoever_moves_which_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rated_by_size(monkeypatch, "staged")
    host, device, right = HostPool(SPEC, "page_first", 9, "auto", platform="emulated"), *pair_of_device_pools()
    fill.fill_host(host, 1)
    here, there = slots_of([4, 5, 0], 4), slots_of([1, 2, 7], 4)
    oracle.load(host, right, here, there)
    indices = on_the_device(there.clone(), complete=True)
    transfer = host.prepare(device, here, indices, "load")
    with emulated().on("loads"):
        two_layers = transfer.run((0, 1))
        two_layers.wait()
        indices.copy_(slots_of([3, 6, 8], 4))
        one_layer = transfer.run((2,))
        one_layer.wait()
    assert (two_layers.path, one_layer.path) == ("auto: staged", "auto: kernel")
    for name in ("k", "v"):
        for layer in range(3):
            assert torch.equal(device.buffer(name, layer), right.buffer(name, layer)), (name, layer)


def pair_of_device_pools() -> tuple[DevicePool, DevicePool]:
    return DevicePool(SPEC, 9, "emulated"), DevicePool(SPEC, 9, "emulated")


def test_what_is_said_of_side_states_and_of_small_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    rated(monkeypatch, "kernel", "load")
    spec = PoolSpec("state", 0, 1, (Component("state", torch.uint8, dim=16, side=True),))
    host, device = HostPool(spec, "page_first", 4, "auto", platform="emulated"), DevicePool(spec, 4)
    told = explain(host.prepare(device, torch.tensor([2]), torch.tensor([1]), "load"))
    assert told.splitlines()[0] == "kernel    0.0 GB/s predicted, 1.0 µs"
    assert told.endswith("choice: kernel")


def test_a_receipt_by_direct_tells_what_was_sent_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rated_by_size(monkeypatch, "direct")
    transfer = prepared()
    all_layers, one_layer = transfer.run(), transfer.run((1,))
    one_layer.wait()
    assert (all_layers.path, all_layers.index_uploads) == ("auto: direct", 2)
    assert (one_layer.path, one_layer.index_uploads) == ("auto: kernel", 0)


def test_side_states_have_their_lists_when_a_load_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    rated(monkeypatch, "kernel", "load")
    spec = PoolSpec("state", 0, 1, (Component("state", torch.uint8, dim=16, side=True),))
    host, device = HostPool(spec, "page_first", 4, "auto", platform="emulated"), DevicePool(spec, 4)
    transfer = host.prepare(device, torch.tensor([2]), torch.tensor([1]), "load")
    monkeypatch.setattr(emulated(), "upload", lambda array: pytest.fail("a list is sent when it is needed already"))
    receipt = transfer.run()
    receipt.wait()
    assert (receipt.bytes, receipt.index_uploads) == (16, 2)


def test_a_table_of_another_form_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "CACHE", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(cudart, "cudart", lambda: SimpleNamespace(driver=13000))
    (tmp_path / f"NVIDIA H200 driver 13000 kernels {HASH}.json").write_text('{"backends": {}}', encoding="utf-8")
    assert auto.table("cuda:0") == json.loads(BUILT_IN.read_text(encoding="utf-8"))
    auto.table_path("cuda:0").write_text('{"backends": "of this form"}', encoding="utf-8")
    assert auto.table("cuda:0") == {"backends": "of this form"}


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
    of_call = {"call_s": 1e-3, "piece_s": [[1024, 102.4e-9], [4096, 4096e-9 / 30]]}
    assert seconds_of(of_call, Demand(10**9, each)) == pytest.approx(1e-3 + seconds)


def test_a_rate_that_a_longer_piece_does_not_reach_is_not_believed() -> None:
    rates = {"call_s": 0.0, "piece_s": [[1024, 1024e-9 / 90], [2048, 2048e-9 / 20], [4096, 4096e-9 / 40]]}
    assert seconds_of(rates, Demand(10**9, 1024)) == seconds_of(rates, Demand(10**9, 2048)) == pytest.approx(1 / 20)


@pytest.mark.parametrize("slower", ["device", "host"])
def test_the_slower_of_device_and_host_counts(slower: str) -> None:
    rates = {"device": FAST, "host": FAST} | {slower: SLOW}
    assert predicted(rates, Demand(10**9, 1024)) == seconds_of(SLOW, Demand(10**9, 1024)) > 1


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
            for who in ("device", "host"):
                of_who = found["backends"][name][direction][who]
                assert [piece for piece, _ in of_who["piece_s"]] == list(probe.sizes)
            assert found["backends"][name][direction]["host"]["call_s"] > 0, "no call is for nothing"


def test_pages_more_tell_what_each_piece_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = {"device": 7e-6, "host": 40e-6}, {"device": 107e-6, "host": 140e-6}
    monkeypatch.setattr(calibrate, "_one_more", lambda port, t: one if len(t.items) == 1 else many)
    probe = replace(calibrate.PROBES["direct"], sizes=(64,), payload=11 * 64, most=16)
    found = [*calibrate._times("direct", probe, 64, "emulated", HostMemory())]
    assert [(way, who) for way, who, _, _ in found] == [*product(("backup", "load"), ("device", "host"))]
    assert [of_call for _, _, of_call, _ in found] == [7e-6, 40e-6] * 2
    assert [of_piece for _, _, _, of_piece in found] == pytest.approx([1e-5] * 4)


def test_one_transfer_more_is_told_apart_from_what_all_of_a_row_take_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_held", lambda port, transfer, count, hold: 5e-3 + count * 1e-4)
    waited = iter([3e-5, 2e-5] * calibrate.SUBMITS)
    monkeypatch.setattr(calibrate, "_submitted", lambda transfer: next(waited))
    assert calibrate._one_more(emulated(), prepared()) == pytest.approx({"device": 1e-4, "host": 2e-5})


def test_the_built_in_table_rates_every_backend_in_both_directions() -> None:
    content = json.loads(BUILT_IN.read_text(encoding="utf-8"))
    assert (content["device"], content["kernels"]) == ("NVIDIA H200", HASH), "calibrate again on an H200"
    rates = content["backends"]
    assert set(rates) == set(BACKENDS)
    for name, direction, who in product(BACKENDS, ("backup", "load"), ("device", "host")):
        of_who = rates[name][direction][who]
        sizes, seconds = zip(*of_who["piece_s"], strict=True)
        assert list(sizes) == sorted(set(sizes))
        assert 0 < of_who["call_s"] < 1e-3
        assert min(seconds) > 0 or (who, name) == ("host", "kernel"), "a launch costs the same for any number of runs"


@pytest.mark.parametrize("fastest", ["kernel", "direct"])
def test_closing_waits_for_whoever_was_chosen(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rated(monkeypatch, fastest, "load")
    transfer = prepared()
    receipt = transfer.run()
    assert receipt.event is not None
    assert not receipt.event.query()
    transfer.backend.close()
    assert receipt.event.query()
