"""Loading while computing, without a GPU: the prediction, the layers, and that no step reads what has not arrived."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from refimpl import DevicePool, Refusal, support
from refimpl.backends.torch_backend import TorchBackend
from refimpl.controller import Controller
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt
from refimpl.support import DIRECTIONS
from verify.arena import Arena
from verify.bench.gpu import here
from verify.bench.gpu.clock import clock
from verify.bench.gpu.overlap import __main__ as program
from verify.bench.gpu.overlap import measure, report
from verify.bench.gpu.overlap.cases import TOYS, WORKLOADS, Workload
from verify.bench.gpu.overlap.layers import Rows, layers
from verify.bench.gpu.overlap.pipeline import Pace, break_even, finishes
from verify.bench.gpu.overlap.record import Sample, Timeline

SIZES = (2000, 4000)
GIB = 1 << 30
TOY = replace(TOYS["cpu"][0], steps={16: (4,)}, ways=(("page_first", "torch"),))
TIMELINES = ("loading", "layerwise", "all_first")


def measured(
    workloads: Sequence[Workload] = TOYS["cpu"], platform: str = "cpu", seconds: float = 100
) -> dict[str, Any]:
    *_, content = program.run(platform, workloads, seconds=seconds, sizes=SIZES)
    jsonschema.validate(content, json.loads(program.SCHEMA.read_text()))
    return content


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return measured()


def cells(content: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    return ((row, cell) for row in content["rows"] for cell in row["cells"])


# ---- the prediction


def simulated(load: Sequence[int], compute: Sequence[int], latency: int, begin: int) -> int:
    """Tick by tick: the bus brings one layer after another, the model computes what has come."""
    to_load, to_compute, now = list(load), list(compute), 0
    arrived = done = 0
    while done < len(compute):
        if now >= latency and arrived < len(load):
            to_load[arrived] -= 1
        if now >= begin and done < arrived:
            to_compute[done] -= 1
        now += 1
        arrived += arrived < len(load) and not to_load[arrived]
        done += not to_compute[done]
    return now


@pytest.mark.parametrize(("latency", "begin"), [(0, 0), (2, 0), (0, 4), (1, 2)])
def test_the_prediction_is_that_of_a_simulation(latency: int, begin: int) -> None:
    """Every load and every computation of three layers that take one to three ticks each."""
    for ticks in itertools.product((1, 2, 3), repeat=6):
        load, compute = ticks[:3], ticks[3:]
        arrived = [latency + n for n in itertools.accumulate(load)]
        assert finishes(arrived, compute, begin)[-1] == simulated(load, compute, latency, begin), ticks


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_layers_that_are_alike_need_no_simulation(layers: int) -> None:
    for load, compute, latency in itertools.product((1, 2, 3, 7), (1, 2, 3, 7), (0, 1, 4)):
        pace = Pace(layers, load, compute, latency)
        each = [load] * layers, [compute] * layers
        assert pace.by_layer == simulated(*each, latency, 0), pace
        assert pace.at_once == latency + sum(map(sum, each))
        assert pace.resident == sum(each[1])
        arrived = [latency + load * (layer + 1) for layer in range(layers)]
        if layers > 1:
            assert Pace.of(arrived, each[1]) == pace


def test_loading_pays_for_good_from_the_break_even_on() -> None:
    """Where the two cross more than once, the last time counts."""
    loaded = {1: 0, 2: 5, 3: 3, 4: 3, 5: 3}
    assert break_even(loaded.__getitem__, lambda tokens: tokens, loaded) == 4
    assert break_even(loaded.__getitem__, lambda tokens: 0, loaded) is None


# ---- the layers


@pytest.mark.parametrize("workload", TOYS["cpu"], ids=lambda w: w.model)
def test_new_tokens_see_the_prefix_and_each_other_up_to_themselves(workload: Workload) -> None:
    """A layer over some tokens after a prefix gives what it gives over all at once."""
    layer = layers(workload.shape, workload.spec, "cpu", 0)
    whole, pool = (DevicePool(workload.spec, 8) for _ in range(2))
    x = torch.randn(24, workload.shape.hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    expected = layer(x, whole, 1, Rows(4, 4, 28))
    parts = [layer(x[a:b], pool, 1, Rows(4, 4 + a, 4 + b)) for a, b in ((0, 16), (16, 21), (21, 24))]
    torch.testing.assert_close(torch.cat(parts), expected)
    other = x.clone()
    other[20] += 1
    changed = (layer(other, pool, 1, Rows(4, 4, 28)) != expected).any(1)
    assert not changed[:20].any(), "a token sees one that comes after it"
    assert changed[20:].all(), "a token does not see one that comes before it"


def test_rows_of_other_layers_and_tokens_stay_as_they_are() -> None:
    pool = DevicePool(TOY.spec, 8)
    layers(TOY.shape, TOY.spec, "cpu", 0)(torch.ones(4, TOY.shape.hidden).to(torch.bfloat16), pool, 1, Rows(4, 8, 12))
    for name in ("k", "v"):
        written = [pool.buffer(name, layer).flatten(1).any(1) for layer in range(TOY.spec.layers)]
        assert [int(rows.sum()) for rows in written] == [0, 4, 0]
        assert written[1][8:12].all()


# ---- what is measured


def test_every_way_is_measured_or_refused_with_its_reason(content: dict[str, Any]) -> None:
    statuses = {(row["model"], cell["layout"]): cell["status"] for row, cell in cells(content)}
    refused = [key for key, status in statuses.items() if status == "refused"]
    assert refused == [("toy MLA", "page_head")]
    assert set(statuses.values()) == {"measured", "refused"}
    assert all(row["repeatable"] for row in content["rows"])
    assert {done["status"] for done in content["recompute"]} == {"measured"}


def test_every_figure_follows_from_the_samples(content: dict[str, Any]) -> None:
    for row, cell in cells(content):
        found = [row["resident"], *(cell[name] for name in TIMELINES if cell[name])]
        assert len(found) == (4 if cell["status"] == "measured" else 1)
        for timeline in found:
            samples = timeline["timing"]["samples_s"]
            assert measure.SAMPLES[0] <= len(samples) <= measure.SAMPLES[1]
            assert timeline["timing"]["median_s"] == statistics.median(samples)
            assert 0 <= timeline["submitted_s"] <= max(samples)
            assert len(timeline["begun_s"]) == len(timeline["finished_s"]) == row["layers"]


def test_no_layer_is_computed_before_it_has_arrived(content: dict[str, Any]) -> None:
    for _, cell in cells(content):
        for name in ("layerwise", "all_first") if cell["status"] == "measured" else ():
            arrived, begun = cell[name]["arrived_s"], cell[name]["begun_s"]
            assert len(arrived) == (len(begun) if name == "layerwise" else 1)
            assert all(there <= begin for there, begin in zip(arrived, begun, strict=False))


def test_times_of_layers_are_medians() -> None:
    samples = [Sample(total, 0.5, [total], [total, 2 * total], [3.0, 4.0]) for total in (5.0, 1.0, 2.0)]
    timeline = Timeline.of(samples)
    assert timeline.timing.samples_s == [5.0, 1.0, 2.0]
    assert (timeline.arrived_s, timeline.begun_s, timeline.finished_s) == ([2.0], [2.0, 4.0], [3.0, 4.0])


@pytest.mark.emulated
def test_the_gpu_backends_load_for_an_emulated_device() -> None:
    found = measured(TOYS["emulated"], "emulated")
    by_layer = {(cell["layout"], cell["backend"]): cell["by_layer"] for _, cell in cells(found)}
    assert {cell["reason"] for _, cell in cells(found)} == {""}
    assert by_layer == {
        ("page_first", "kernel"): True,
        ("page_first", "staged"): False,  # every layer would take the whole page across the bus
        ("page_first_direct", "direct"): True,
    }
    for _, cell in cells(found):
        assert len(cell["layerwise"]["arrived_s"]) == 3
        assert len(cell["all_first"]["arrived_s"]) == 1


# ---- what must not be timed


class Scripted(measure.Bench):
    """Its pulses are those that a test wants."""

    def script(self, *pulses: float) -> None:
        self.told = iter(pulses)

    def pulse(self) -> float:
        return next(self.told)


@pytest.mark.parametrize(
    ("pulses", "until", "times"),
    [
        ((1, 1.2), math.inf, 1),
        ((1, 1.4, 1.2, 1.1), math.inf, 2),
        ((1.4, 1, 1.2, 1.1), math.inf, 2),
        ((1, 2, 2, 1, 2, 2), math.inf, 3),
        ((1, 2), 0, 1),
    ],
    ids=["quiet", "disturbed after", "disturbed before", "always disturbed", "no time left"],
)
def test_steps_are_timed_again_where_the_host_was_disturbed(
    pulses: tuple[float, ...], until: float, times: int
) -> None:
    bench, counted = Scripted(clock("cpu"), Arena(4096), 0, until, tries=3), list[int]()
    bench.script(*pulses)
    assert bench.quietly(lambda: counted.append(1)) == pulses[-2:]
    assert len(counted) == times


class LastItemForgotten(TorchBackend):
    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        host, device = items.checked()
        short = super().execute(plan, layers, Items(host[:-1], device[:-1]), direction)
        return replace(short, bytes=short.bytes // (len(host) - 1) * len(host))


class Broken(TorchBackend):
    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        raise RuntimeError("no more descriptors")


@pytest.mark.parametrize(
    ("backend", "status", "reason"),
    [
        (LastItemForgotten, "wrong", "by layer: token 12 of device buffer 0 is not what the oracle stored"),
        (Broken, "failed", "RuntimeError: no more descriptors"),
    ],
)
def test_a_wrong_or_broken_backend_is_told_and_not_timed(
    backend: type[TorchBackend], status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refimpl.backends.registry._load", lambda name: backend)
    found = measured([TOY])
    ((row, cell),) = cells(found)
    assert (cell["status"], cell["reason"]) == (status, reason)
    assert row["resident"] is not None
    assert {done["status"] for done in found["recompute"]} == {"measured"}


@pytest.mark.parametrize("workload", TOYS["cpu"], ids=lambda w: w.model)
def test_a_model_that_does_not_wait_has_another_result(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that figures of steps are those of steps that waited."""
    monkeypatch.setattr(Controller, "wait_until", lambda self, layer: None)
    ((_, cell),) = cells(measured([replace(workload, steps=TOY.steps, ways=TOY.ways)]))
    assert cell["reason"] == "by layer: the step has another result than with a resident prefix"
    assert cell["status"] == "wrong"


def test_what_has_no_time_left_is_left_out() -> None:
    found = measured([TOY], seconds=0)
    ((row, cell),) = cells(found)
    assert (cell["status"], cell["reason"], row["resident"]) == ("left out", "the time was up", None)
    assert {done["status"] for done in found["recompute"]} == {"left out"}


# ---- what it comes to


def timeline(total: float, submitted: float, arrived: list[float], begun: list[float], finished: list[float]) -> Any:
    return asdict(Timeline.of([Sample(total, submitted, arrived, begun, finished)] * 5))


def result(prefix: int, loading: float, by_layer: float, all_first: float) -> dict[str, Any]:
    """A row of two layers that take 1 s each to compute, the second 2 s beside a load."""
    cell = {
        "layout": "page_first",
        "backend": "kernel",
        "by_layer": True,
        "status": "measured",
        "loading": timeline(loading, 0.5, [loading / 2, loading], [0, 0], [0, 0]),
        "layerwise": timeline(by_layer, 0.5, [], [3.0, 4.0], [4.0, 6.0]),
        "all_first": timeline(all_first, 0.1, [4.0], [4.0, 5.0], [5.0, 6.0]),
    }
    sizes = {"prefix_tokens": prefix, "new_tokens": 2, "page_size": 4, "layers": 2, "layer_bytes": 10**9}
    resident = timeline(2.0, 0, [], [0.0, 1.0], [1.0, 2.0])
    return {"model": "toy", **sizes, "resident": resident, "cells": [cell, cell | {"status": "failed"}]}


def test_what_follows_from_a_measured_way() -> None:
    (way,) = report.ways({"rows": [result(8, loading=4.0, by_layer=5.0, all_first=6.0)]})
    assert way.hidden == 0.25
    assert way.ratio == 0.5
    assert way.slowdown == 0.5
    assert way.gb_per_s == 0.5
    assert way.compute_s == [1.0, 1.0]
    assert way.predicted_s == way.pace.by_layer == 5.0
    host_bound = result(8, loading=0.2, by_layer=5.0, all_first=6.0)
    assert report.ways({"rows": [host_bound]})[0].predicted_s == 2.5, "the model begins when all has been submitted"


def test_the_break_even_is_looked_for_between_measured_prefixes() -> None:
    rows = [result(4, 4.0, 5.0, 6.0), result(16, 4.0, 8.0, 7.0), result(1000, 4.0, 8.0, 7.0)]
    again = [(2, 2.0), (10, 6.0), (22, 12.0)]
    done = [{"model": "toy", "tokens": n, "status": "measured", "timing": {"median_s": s}} for n, s in again]
    (served,) = report.served({"rows": rows, "recompute": done})
    assert served.loaded == [(4, 5.0), (16, 7.0)], "a prefix that is longer than what was recomputed has no comparison"
    assert served.best == [("page_first, kernel", True), ("page_first, kernel", False)]
    assert served.recomputed == [4.0, 10.0]
    assert served.break_even == 8


def test_the_curve_is_that_of_the_prediction() -> None:
    curve = dict(report.predicted_curve(10))
    assert [curve[ratio] for ratio in (0.5, 1.0, 64.0)] == pytest.approx([0.45, 0.9, 0.9])


def test_committed_results_are_whole() -> None:
    path, found = here.shown("overlap", "committed")
    jsonschema.validate(found, json.loads(program.SCHEMA.read_text()))
    assert found["provenance"]["gpu"]["name"] in here.label(path, found)
    statuses = {cell["status"] for _, cell in cells(found)} | {done["status"] for done in found["recompute"]}
    assert statuses == {"measured"}
    assert {row["model"] for row in found["rows"]} == {workload.model for workload in WORKLOADS}
    assert all(row["repeatable"] for row in found["rows"])


# ---- the program


def test_the_program_writes_a_file_and_a_line_for_each_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "run", partial(program.run, sizes=SIZES))
    path = tmp_path / "new" / "overlap.json"
    assert program.main(["--platform", "cpu", "--out", str(path), "--seconds", "0"]) == 0
    found = json.loads(path.read_text())
    jsonschema.validate(found, json.loads(program.SCHEMA.read_text()))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(cells(found))) + len(found["recompute"])
    assert lines[0] == "toy GQA, 16 + 4 tokens, layer_first, torch: the time was up"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.model)
def test_what_a_gpu_is_asked_for_can_be_done(workload: Workload) -> None:
    for layout, backend in workload.ways:
        for direction in DIRECTIONS:
            answer = support(workload.spec, layout, backend, direction, "cuda")
            assert not isinstance(answer, Refusal), answer
    assert all(prefix % workload.spec.page_size == 0 for prefix in workload.steps)
    assert workload.memory_needed() < 6 * GIB
