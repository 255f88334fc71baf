"""The benchmark of ranks, without a GPU: what it writes down follows from samples, and no rank waits for ever."""

from __future__ import annotations

import json
import re
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kernels_cupy.runtimes import runtime
from kernels_cupy.sm_copy import SmCopy
from refimpl.receipt import Receipt
from verify.bench import noise
from verify.bench.gpu.cases import Case
from verify.bench.gpu.ranks import __main__ as program
from verify.bench.gpu.ranks import cases, meeting, report, sentences
from verify.bench.gpu.ranks.cases import Play, Task, plays
from verify.bench.gpu.ranks.meeting import Meeting
from verify.bench.gpu.ranks.rank import Orders, Rank
from verify.bench.gpu.ranks.record import Played, compare
from verify.bench.record import Timing
from verify.toys import TOYS

DEVICES = ("emulated:0", "emulated:1")
TOY = Case("toy", TOYS["mha"](2), pages=3)
TASKS = (Task(TOY, "page_first", "kernel"), Task(TOY, "page_first", "staged"), Task(TOY, "page_head", "direct"))

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def content() -> Answer:
    """Of two processes."""
    (*_, last) = program.run(DEVICES, TASKS, 2000, samples=2, slow_s=60, seconds=60)
    return last


@pytest.mark.emulated
def test_a_result_file_follows_its_schema(content: Answer) -> None:
    jsonschema.validate(content, json.loads(program.SCHEMA.read_text(encoding="utf-8")))


@pytest.mark.emulated
def test_every_play_of_every_cell_is_measured(content: Answer) -> None:
    assert [device["device"] for device in content["devices"]] == list(DEVICES)
    found = [(row["layout"], cell["backend"]) for row in content["rows"] for cell in row["cells"]]
    assert found == [(task.layout, task.backend) for task in TASKS]
    played = [(play.name, list(play.directions)) for play in plays(2)]
    for row in content["rows"]:
        for cell in row["cells"]:
            assert (cell["status"], cell["path"]) == ("measured", [cell["backend"]] * 2)
            assert [(p["play"], p["directions"]) for p in cell["plays"]] == played
            for p in cell["plays"]:
                resting = [timing is None for timing in p["timings"]]
                assert resting == [direction is None for direction in p["directions"]]
                assert all(len(timing["samples_s"]) == 2 for timing in p["timings"] if timing)


@pytest.mark.emulated
def test_what_is_written_down_follows_from_the_samples(content: Answer) -> None:
    limits = {(c["play"], *c["directions"]): c["sum_gb_per_s"] for c in content["ceilings"]}
    for row in content["rows"]:
        for cell in row["cells"]:
            alone: dict[tuple[int, str], float] = {}
            for p in cell["plays"]:
                rates = {
                    at: row["payload_bytes"] / statistics.median(timing["samples_s"]) / 1e9
                    for at, timing in enumerate(p["timings"])
                    if timing
                }
                assert p["sum_gb_per_s"] == pytest.approx(sum(rates.values()))
                limit = limits[p["play"], *p["directions"]]
                assert p["percent_of_ceiling"] == pytest.approx(100 * sum(rates.values()) / limit)
                if p["play"] == "alone":
                    ((at, rate),) = rates.items()
                    alone[at, p["directions"][at]] = rate
                else:
                    kept = [rates[at] / alone[at, p["directions"][at]] for at in range(2)]
                    assert p["kept"] == pytest.approx(kept)


@pytest.mark.emulated
def test_reports_are_made_of_what_was_measured(content: Answer) -> None:
    text = "\n".join(program.summary(content))
    for task in TASKS:
        assert task.backend in text
    assert len(report.by_cell(content).body) == len(TASKS)
    (first, *backends) = report.kept(content).body
    assert first[0] == "plain copy"
    assert sorted(line[0] for line in backends) == ["direct", "kernel", "staged"]
    assert all(f"{sentence}." in text for sentence in sentences.of(content))
    title = report.title(content)
    for c in content["ceilings"]:
        if c["play"] == "same":
            assert f"all {c['directions'][0]} {c['sum_gb_per_s']:.1f} GB/s" in title


def plays_of(kept: float, load_beside_backup: float | None = None, ranks: int = 2) -> list[Answer]:
    """Of ranks that reach 10 GB/s alone; beside each other they keep so much of it."""
    least = load_beside_backup or kept
    keeps = {"same": {"backup": kept, "load": kept}, "opposite": {"backup": kept, "load": least}}

    def played(play: Play) -> Answer:
        kept = [keeps[play.name][way] for way in play.directions if way] if play.name in keeps else None
        rates = [10.0 * (kept[at] if kept else 1) if way else None for at, way in enumerate(play.directions)]
        return {
            "play": play.name,
            "directions": list(play.directions),
            "gb_per_s": rates,
            "sum_gb_per_s": sum(rate or 0 for rate in rates),
            "kept": kept,
            "percent_of_ceiling": {"alone": 90.0, "same": 40.0, "opposite": 50.0}[play.name],
        }

    return [played(play) for play in plays(ranks)]


def of_backends(plain: float = 1.0, **plays: list[Answer]) -> Answer:
    """The content of a result file with one row, and a cell without a rate."""
    cells: list[Answer] = [
        {
            "backend": name,
            "status": "measured",
            "path": [f"{name} backs up", f"{name} loads"],
            "descriptors": [1, 2],
            "plays": played,
        }
        for name, played in plays.items()
    ]
    late = {"backend": "late", "status": "left out", "reason": "the time was up", "plays": []}
    return {
        "settings": {"payload_bytes": 1 << 20, "samples": 2},
        "devices": [{"device": f"cuda:{at}", "gpu": None, "numa_node": None} for at in range(2)],
        "ceilings": plays_of(plain),
        "rows": [{"case": "toy", "pool": "kv", "layout": "page_first", "cells": [*cells, late]}],
    }


def test_backends_that_lose_least_come_first() -> None:
    found = report.kept(of_backends(direct=plays_of(0.5), kernel=plays_of(0.9, load_beside_backup=0.8))).body
    assert [line[0] for line in found] == ["plain copy", "kernel", "direct"]
    assert found[1][1:] == ["1", "90", "90", "90", "80", "40", "40", "50"]


def told(content: Answer, beginning: str) -> str:
    (found,) = [sentence for sentence in sentences.of(content) if sentence.startswith(beginning)]
    return found


SITUATIONS = ("backup beside backup", "load beside load", "backup beside load", "load beside backup")


@pytest.mark.parametrize(("plain", "shared"), [(1.0, False), (0.98, False), (0.96, True), (0.5, True)])
def test_a_bottleneck_is_told_where_plain_copies_lose_more_than_noise(plain: float, shared: bool) -> None:
    sentence = told(of_backends(plain), "Plain copies")
    assert f"at least {', '.join(f'{plain:.1%} in {situation}' for situation in SITUATIONS)}. " in sentence
    assert ("More than noise is lost everywhere: there the GPUs slow each other down" in sentence) is shared
    assert ("Nowhere is more lost than noise: the GPUs show no bottleneck" in sentence) is not shared


@pytest.mark.parametrize("keep", [[0.959, 0.96], [0.96, 1.0], [1.1, 0.2]])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_loss_is_told_of_its_situation_whatever_others_keep(situation: str, keep: list[float]) -> None:
    """In sums of all ranks, and in means of one situation, those that lose nothing would hide it."""
    content = of_backends(1.0)
    way, others = situation.split(" beside ")
    places = [
        (played, at)
        for played in content["ceilings"]
        for at in range(2)
        if (played["directions"][at], played["directions"][1 - at]) == (way, others)
    ]
    for (played, at), share in zip(places, keep, strict=True):
        played["kept"][at] = share
    sentence = told(content, "Plain copies")
    assert f"{min(keep):.1%} in {situation}" in sentence
    assert f"More than noise is lost in {situation}, and nowhere else: there the GPUs slow each other" in sentence
    assert "no bottleneck" not in sentence


def test_of_more_than_two_ranks_those_between_others_are_beside_both_directions() -> None:
    content = of_backends(direct=plays_of(0.9, load_beside_backup=0.8, ranks=4))
    content["ceilings"] = plays_of(1.0, ranks=4)
    table = report.kept(content)
    beside = ["backup beside backup", "load beside load", "backup beside both", "load beside both"]
    assert table.head[2:6] == [f"{situation}: kept, %" for situation in beside]
    assert table.head[6:] == [f"{name}: % of plain" for name in ("all backup", "all load", "opposite")]
    assert table.body[1][2:6] == ["90", "90", "90", "80"]
    assert f"in {beside[3]}. " in told(content, "Plain copies")


def test_what_the_others_do_is_told_of_each_rank_by_itself() -> None:
    *_, played = plays_of(1.0, ranks=3)
    assert played["directions"] == ["load", "backup", "load"]
    assert [report.said(one.situation) for one in report.moved(played)] == [
        "load beside both",
        "backup beside load",
        "load beside both",
    ]


def test_backends_are_ranked_only_where_noise_does_not_level_them() -> None:
    near = of_backends(direct=plays_of(0.97), kernel=plays_of(0.99, load_beside_backup=0.9))
    sentence = told(near, "Of its rate alone")
    assert "99.0% by kernel, 97.0% by direct (all level within noise)" in sentence
    assert "Most is lost in load beside backup: there it keeps 97.0% by direct, 90.0% by kernel" in sentence
    assert sentence.endswith("90.0% by kernel (direct loses least), and plain copies 100.0%")
    three = of_backends(direct=plays_of(0.98), kernel=plays_of(0.99), staged=plays_of(0.5))
    assert "50.0% by staged (kernel and direct level within noise)" in told(three, "Of its rate alone")


def test_situations_are_ranked_only_where_noise_does_not_level_them() -> None:
    level = told(of_backends(direct=plays_of(0.99, load_beside_backup=0.965)), "Of its rate alone")
    assert level.endswith("What the other ranks move makes no difference beyond noise")
    content = of_backends(direct=plays_of(1.0, load_beside_backup=0.9))
    content["rows"][0]["cells"][0]["plays"][5]["kept"] = [0.92, 0.92]  # both load
    assert "Most is lost in load beside load and load beside backup: there it" in told(content, "Of its rate alone")


def test_ranks_that_lose_much_are_counted_and_doubted_where_others_gain() -> None:
    assert told(of_backends(direct=plays_of(0.91)), "None of the 8 rates").endswith("10% below the rate alone")
    slow, slower = (plays_of(0.91, load_beside_backup=kept) for kept in (0.89, 0.6))
    sentence = told(of_backends(staged=slow, direct=slower, kernel=plays_of(1.09)), "Of the 24 rates")
    assert "4 are more than 10% below the rate alone (toy kv 4)" in sentence
    assert sentence.endswith("a load of toy kv in page_first by direct (load beside backup): 60% of it")
    doubted = told(of_backends(direct=slower, kernel=plays_of(1.11)), "Of the 16 rates")
    assert "But 8 are as far above it" in doubted


def test_placement_is_told_where_the_machine_shows_it() -> None:
    content = of_backends()
    assert told(content, "This machine shows no NUMA node").endswith("was not tested")
    content["devices"][1]["numa_node"] = 1
    assert told(content, "NUMA nodes") == "NUMA nodes of the GPUs: not shown, 1"
    content["devices"][0]["numa_node"] = 0
    assert told(content, "NUMA nodes") == "NUMA nodes of the GPUs: 0, 1"


def test_what_is_slow_alone_is_told_for_each_direction_and_cell_without_the_other_ranks() -> None:
    content = of_backends(direct=plays_of(0.5), kernel=plays_of(0.5))
    direct, kernel = (cell["plays"] for cell in content["rows"][0]["cells"][:2])
    assert report.slow_alone(content) == []
    direct[2]["percent_of_ceiling"] = report.LOW - 1  # a load of the first rank
    kernel[0]["percent_of_ceiling"] = report.LOW
    (found,) = report.slow_alone(content)
    assert [(rate.direction, rate.path, rate.descriptors, rate.beside, rate.percent_of_ceiling) for rate in found] == [
        ("load", "direct loads", 2, (), report.LOW - 1),
        ("load", "direct loads", 2, (), 90.0),
    ]
    kernel[1]["percent_of_ceiling"] = 60.0
    _, (first, _) = report.slow_alone(content)
    assert (first.direction, first.path, first.descriptors) == ("backup", "kernel backs up", 1)


def test_cells_without_a_rate_are_named_with_their_reason() -> None:
    (line,) = report.without_rates(of_backends(direct=plays_of(1.0)))
    assert line == "toy kv page_first late: left out: the time was up"


def test_a_rank_keeps_a_share_of_its_own_rate_alone() -> None:
    """Not of the other rank's, and not of the other direction's."""

    def played(name: str, directions: tuple[str | None, ...], rates: list[float | None]) -> Played:
        timings = [Timing([1.0, 1.0]) if rate else None for rate in rates]
        return Played(name, list(directions), timings, rates, sum(rate or 0 for rate in rates))

    found = [
        played("alone", ("backup", None), [50.0, None]),
        played("alone", (None, "backup"), [None, 40.0]),
        played("alone", ("load", None), [25.0, None]),
        played("alone", (None, "load"), [None, 20.0]),
        played("same", ("backup", "backup"), [30.0, 30.0]),
        played("opposite", ("load", "backup"), [5.0, 30.0]),
    ]
    compare(found, [played(p.play, tuple(p.directions), [100.0, None]) for p in found])
    assert [p.kept for p in found[4:]] == [[0.6, 0.75], [0.2, 0.75]]
    assert [p.percent_of_ceiling for p in found] == [50, 40, 25, 20, 60, 35]


def test_pools_are_those_of_a_tensor_parallel_rank() -> None:
    found = list(cases.tasks(("llama-3.1-8b", "deepseek-v3"), cases.LAYOUTS, cases.BACKENDS, 2))
    heads = {task.case.name: [c.heads for c in task.case.spec.components] for task in found}
    assert heads == {"llama-3.1-8b": [4, 4], "deepseek-v3": [None]}
    assert ("page_head", "deepseek-v3") not in {(task.layout, task.case.name) for task in found}
    assert ("layer_first", "staged") not in {(task.layout, task.backend) for task in found}


# ---- ranks that wait for each other, as threads


def at_once(work: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """What work comes to, or raises, by rank."""
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank waits for ever"
    return found


def shared(ranks: int = 2) -> memoryview:
    return memoryview(bytearray(meeting.nbytes(ranks)))


def test_a_vote_is_told_to_all_alike() -> None:
    memory, ballots = shared(3), [[True, True, True], [True, False, True], [False, True, True], [True, True, True]]

    def votes(rank: int) -> list[bool]:
        mine = Meeting(memory, rank, 3)
        return [mine.meet(ballot[rank]) for ballot in ballots]

    assert at_once(votes, 3) == [[True, False, False, True]] * 3


def test_nobody_goes_on_before_all_are_there() -> None:
    memory, came = shared(), [0.0, 0.0]

    def meets(rank: int) -> float:
        mine = Meeting(memory, rank, 2)
        time.sleep(0.2 * rank)
        came[rank] = time.monotonic()
        mine.meet()
        return time.monotonic()

    assert min(at_once(meets)) >= max(came)


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank 1 has not come within 0 s"):
        Meeting(shared(), 0, 2, timeout=0.05).meet()


def test_a_play_ends_when_all_have_what_they_need() -> None:
    memory, turns = shared(), [0, 0]

    def plays_on(rank: int) -> None:
        mine = Meeting(memory, rank, 2)
        for _ in range(50):
            mine.meet()
            mine.begin()
            if rank == 0:
                mine.rest()
                continue
            while not mine.all_ended():
                turns[rank] += 1
                mine.end()

    assert at_once(plays_on) == [None, None]
    assert turns[1] >= 50


def answered(tasks: tuple[Task, ...] = TASKS[:1], until: float = 0.0, slow_s: float = 60.0) -> list[list[Answer]]:
    """What two ranks answer, plain copies first."""
    orders = Orders(DEVICES, tasks, 2000, 2, slow_s, 0, until or time.monotonic() + 60)
    memory = shared()

    def work(rank: int) -> list[Answer]:
        port = runtime(DEVICES[rank])
        with port.on(port.stream()):
            at_work = Rank(orders, rank, Meeting(memory, rank, 2))
            try:
                return list(at_work.answers())
            finally:
                at_work.close()

    return at_once(work)


Execute = Callable[..., Receipt]


def on_the_second(monkeypatch: pytest.MonkeyPatch, instead: Callable[[Execute, int], Execute]) -> None:
    """Backend `kernel` of the second device does something else at its n-th transfer."""
    execute, count = SmCopy.execute, [0]

    def replaced(self: SmCopy, *arguments: Any) -> Receipt:
        if self._runtime.name == DEVICES[0]:
            return execute(self, *arguments)
        count[0] += 1
        return instead(execute, count[0])(self, *arguments)

    monkeypatch.setattr(SmCopy, "execute", replaced)


@pytest.mark.emulated
@pytest.mark.parametrize("at", [1, 3, 5])
def test_wrong_bytes_of_one_rank_are_found_and_no_rate_is_told(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load or a backup that moves nothing; in a play, one that writes where nobody else does."""

    def nothing(self: SmCopy, plan: Any, layers: Any, items: Any, direction: str) -> Receipt:
        if at == 5:
            plan.moves[0].host.tensors[0].fill_(0)
        return Receipt("kernel")

    on_the_second(monkeypatch, lambda execute, number: nothing if number == at else execute)
    first, second = (answers[1] for answers in answered())
    if at < 5:
        assert first == {"status": "left out", "reason": "another rank could not take part"}
        assert second["status"] == "wrong"
        assert second["reason"].startswith("load: byte" if at == 1 else "backup: byte")
    else:
        assert (first["status"], second["status"]) == ("measured", "wrong")
        assert second["reason"].startswith("after the plays: byte")


@pytest.mark.emulated
@pytest.mark.parametrize("at", [1, 6])
def test_a_rank_that_raises_keeps_no_other_waiting(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is verified, and in the middle of a play; the next task is measured again."""

    def fails(*arguments: Any) -> Receipt:
        raise RuntimeError("out of order")

    on_the_second(monkeypatch, lambda execute, number: fails if number == at else execute)
    first, second = answered(TASKS[:1] * 2)
    assert (second[1]["status"], second[1]["reason"]) == ("failed", "RuntimeError: out of order")
    assert [answers[2]["status"] for answers in (first, second)] == ["measured", "measured"]


@pytest.mark.emulated
def test_what_has_not_begun_when_the_time_is_up_is_left_out_by_all() -> None:
    for answers in answered(until=time.monotonic() - 1):
        assert answers[1] == {"status": "left out", "reason": "the time was up"}
        assert len(answers[0]["samples"]) == len(plays(2)), "plain copies are always measured"


@pytest.mark.emulated
def test_what_takes_too_long_to_be_repeated_is_left_out() -> None:
    for answers in answered(slow_s=1e-9):
        assert answers[1]["status"] == "left out"
        assert answers[1]["reason"].endswith("s, and every play repeats it")


MISTAKEN = {
    "--devices emulated:0": "two devices are needed at least, here are emulated:0",
    "--devices emulated:0,emulated:0": "a rank has a device of its own, got 'emulated:0,emulated:0'",
    "--devices emulated,emulated:0": "a rank has a device of its own",
    "--devices cpu,cpu": "ranks have GPUs, or emulated devices, got 'cpu'",
    "--devices nope,emulated:1": "ranks have GPUs, or emulated devices, got 'nope'",
    "--devices emulated:x,emulated:1": "'emulated:x' names no device",
    "--devices cuda:0,cuda:99": "a CUDA device is needed|there is no cuda:99",
    "--devices emulated:0,emulated:1 --backends numba": "there is no backend 'numba'; there are direct, kernel",
    "--devices emulated:0,emulated:1 --samples 1": "two samples are needed at least",
    "--devices emulated:0,emulated:1 --models deepseek-v4-flash --backends staged --samples 0": "positive integer",
    "--devices emulated:0,emulated:1 --seconds -1": "0 or more, got '-1'",
    "--devices emulated:0,emulated:1 --seed -1": "0 or more, got '-1'",
    "--devices emulated:0,emulated:1 --out /proc/x/y.json": "nothing can be written to",
}


@pytest.mark.parametrize("line", MISTAKEN)
def test_what_cannot_be_measured_is_told_in_a_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(line.split())
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.count("\n") == 1
    assert re.search(MISTAKEN[line], told), told


def test_emulated_devices_are_not_called_gpus() -> None:
    none = {"devices": [{"device": name, "gpu": None, "numa_node": None} for name in DEVICES]}
    assert sentences._placement(none).startswith("This machine shows no NUMA node of its emulated devices")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_plays_are_made_for_any_number_of_ranks(ranks: int) -> None:
    found = plays(ranks)
    assert len(found) == len(set(found)) == 2 * ranks + 4
    assert all(len(play.directions) == ranks for play in found)
    for play in found:
        moving = [direction for direction in play.directions if direction]
        assert {"alone": 1, "same": ranks, "opposite": ranks}[play.name] == len(moving)
        assert len(set(moving)) == (2 if play.name == "opposite" else 1)
        if play.name == "opposite":
            assert all(a != b for a, b in pairwise(moving))


def test_a_play_without_samples_of_a_rank_is_one_in_which_it_rests() -> None:
    found = Played.of(Play("alone", (None, "load")), [[], [0.5, 0.5]], 10**9)
    assert (found.timings[0], found.gb_per_s, found.sum_gb_per_s) == (None, [None, 2.0], 2.0)


def test_a_file_is_written_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Answer) -> None:
    monkeypatch.setattr(program, "run", lambda *arguments: iter([content]))
    path = tmp_path / "h200-x2" / "ranks.json"
    assert program.main(["--devices", ",".join(DEVICES), "--out", str(path)]) == 0
    assert json.loads(path.read_text(encoding="utf-8")) == content


RESULTS = sorted((program.ROOT / "data" / "results").glob("*/ranks.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_committed_results_are_clean_and_whole(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(found, json.loads(program.SCHEMA.read_text(encoding="utf-8")))
    assert found["provenance"]["commit"]
    assert found["provenance"]["dirty"] is False
    assert {cell["status"] for row in found["rows"] for cell in row["cells"]} <= {"measured", "left out"}


def test_committed_ranks_do_what_the_book_says_of_them() -> None:
    """Notebook 04: medians, and the time before most of what is slow beside another rank is slow alone."""
    before, last = (
        json.loads((program.ROOT / "data" / "results" / name / "ranks.json").read_text(encoding="utf-8"))
        for name in ("h200-x2-earlier", "h200-x2")
    )
    assert report.said(report.situations(before)[3]) == "load beside backup"
    for _, _, *shares in report.kept(before).body:
        assert min(int(share) for share in shares[:3]) >= 100 * (1 - noise.FLOOR)
        assert 94 <= int(shares[3]) <= 96
    for _, _, *shares in report.kept(last).body:
        assert min(int(share) for share in shares[:4]) >= 100 * (1 - noise.FLOOR)
    (again, _), (slow, alone) = slow_beside(last), slow_beside(before)
    assert again <= slow
    assert len(alone) > len(slow) / 2


def slow_beside(found: dict[str, Any]) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Pairs that are slow beside another rank, and those of them that are slow alone."""
    plain = statistics.median(c["sum_gb_per_s"] for c in found["ceilings"] if c["play"] == "alone")
    limit = plain * report.LOW / 100
    slow = [rate for rate in report.each(found) if rate.beside and rate.gb_per_s < limit]
    return {_pair(rate) for rate in slow}, {_pair(rate) for rate in slow if rate.gb_per_s / rate.kept < limit}


def _pair(rate: report.Rate) -> tuple[str, ...]:
    return (*(rate.row[name] for name in ("case", "pool", "layout")), rate.cell["backend"], rate.direction)
