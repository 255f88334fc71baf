"""Findings: FINDINGS.md says what the code finds, and every finding would say so if its claim did not hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from verify import cli, fill
from verify.bench.provenance import ROOT
from verify.findings import command, flexkv, kvbm, sglang_dispatch, sglang_tests, sglang_transfers, vllm
from verify.findings.command import FILE, FINDINGS
from verify.findings.finding import Finding

found = cache(lambda name: FINDINGS[name]())


def test_the_file_is_what_the_findings_say_now() -> None:
    now = command.as_file({name: found(name) for name in FINDINGS})
    assert FILE.read_text("utf-8") == now, "python -m verify findings --write"


@pytest.mark.parametrize("name", FINDINGS)
def test_every_claim_holds(name: str) -> None:
    assert found(name).confirmed, found(name).evidence


def with_names_of_places() -> Finding:
    return sglang_tests.layers_alike(fill.fill_device)


def with_every_block_compared() -> Finding:
    return vllm.store_unseen(compared=vllm.CPU_BLOCKS)


def with_other_blocks_drawn() -> Finding:
    """A seed with which some of the blocks that are written are among those compared."""
    return vllm.store_unseen(seed=1)


def with_k_and_v_apart() -> Finding:
    return kvbm.fill_aliases(lambda block, layer, outer: kvbm.sequential(block, layer, outer) + b"kv"[outer:])


def with_rows_numbered() -> Finding:
    return flexkv.fill_aliases(lambda layer, block, token: (layer << 20) + (block << 8) + token)


def figures(**changed: float) -> Sequence[dict[str, Any]]:
    """SGLang's, but for the fractions of these paths."""
    return [{**f, "fraction": changed.get(str(f["path"]), f["fraction"])} for f in sglang_dispatch.measured()]


def with_a_fast_staged_path() -> Finding:
    return sglang_dispatch.staged_at_page_one(figures(staged=0.95))


def with_another_path_chosen() -> Finding:
    return sglang_dispatch.staged_at_page_one([f | {"chosen": f["path"] == "AOT"} for f in figures()])


def with_fast_operators() -> Finding:
    return sglang_dispatch.loads_of_page_rows(figures(AOT=0.9))


def with_slow_bulk_copies() -> Finding:
    return sglang_dispatch.loads_of_page_rows(figures(TMA=0.6))


def record(name: str, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """SGLang's, but for one path."""
    content = deepcopy(sglang_transfers.recorded())
    change(next(path for path in content["paths"] if path["name"] == name))
    return content


def with_a_wrong_byte() -> Finding:
    return sglang_transfers.moves_exactly(record("sglang-ops", lambda path: path["moved"].update(wrong=1)))


def with_a_refusal_for_another_reason() -> Finding:
    return sglang_transfers.moves_exactly(record("sglang-direct", lambda path: path["moved"].update(refused=1)))


def with_a_path_that_moves_nothing() -> Finding:
    return sglang_transfers.moves_exactly(record("sglang-mamba", lambda path: path["moved"].pop("moved")))


def with_a_wide_row_that_moves() -> Finding:
    return sglang_transfers.wide_rows(record("sglang-bulk", lambda path: path["not_passed"][-1]["cases"].pop()))


def with_pools_that_take_another_kernel() -> Finding:
    return sglang_transfers.wide_rows(record("sglang-pools", lambda path: path["not_passed"].clear()))


def with_a_staged_backup_that_raises() -> Finding:
    return sglang_transfers.wide_rows(record("sglang-staged", lambda path: path["moved"].update(moved=98, refused=1)))


def with_a_backup_of_pools_that_fails() -> Finding:
    case = "mha-row-66080/page_first/backup/wide-rows"
    return sglang_transfers.wide_rows(record("sglang-pools", lambda path: path["not_passed"][0]["cases"].append(case)))


def with_gaps_refused() -> Finding:
    changed = {"not consecutive": {"refused": 16}}
    return sglang_transfers.lists_trusted(record("sglang-ops", lambda path: path["refused"].update(changed)))


def with_gaps_ignored() -> Finding:
    content = sglang_transfers.recorded()
    for path in content["paths"]:
        path["refused"]["not consecutive"] = {"nothing": 1}
    return sglang_transfers.lists_trusted(content)


def with_gaps_that_move_nothing_in_one_function() -> Finding:
    changed = {"not consecutive": {"moved": 15, "nothing": 1}}
    return sglang_transfers.lists_trusted(record("sglang-ops", lambda path: path["refused"].update(changed)))


def with_unequal_lists_moved() -> Finding:
    changed = {"unequal lengths": {"moved": 1, "refused": 7}}
    return sglang_transfers.lists_trusted(record("sglang-bulk", lambda path: path["refused"].update(changed)))


@pytest.mark.parametrize(
    "otherwise",
    [
        with_names_of_places,
        with_every_block_compared,
        with_other_blocks_drawn,
        with_k_and_v_apart,
        with_rows_numbered,
        with_a_fast_staged_path,
        with_another_path_chosen,
        with_fast_operators,
        with_slow_bulk_copies,
        with_a_wrong_byte,
        with_a_refusal_for_another_reason,
        with_a_path_that_moves_nothing,
        with_a_wide_row_that_moves,
        with_pools_that_take_another_kernel,
        with_a_staged_backup_that_raises,
        with_a_backup_of_pools_that_fails,
        with_gaps_refused,
        with_gaps_ignored,
        with_gaps_that_move_nothing_in_one_function,
        with_unequal_lists_moved,
    ],
    ids=lambda case: case.__name__,
)
def test_a_claim_that_does_not_hold_is_refuted(otherwise: Callable[[], Finding]) -> None:
    finding = otherwise()
    assert not finding.confirmed
    assert "**Refuted.**" in command.as_markdown("name", finding)


@pytest.mark.parametrize(
    ("finding", "path", "fraction"),
    [(sglang_dispatch.staged_at_page_one, "staged", 0.95), (sglang_dispatch.loads_of_page_rows, "AOT", 0.9)],
)
def test_what_is_measured_again_may_refute_a_claim(
    finding: Callable[[], Finding], path: str, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads((ROOT / sglang_dispatch.AGAIN).read_text(encoding="utf-8"))
    for row in content["rows"]:
        row["fraction"] = fraction if row["path"] == path else row["fraction"]
    another = tmp_path / "rates.json"
    another.write_text(json.dumps(content), encoding="utf-8")
    assert finding().confirmed
    monkeypatch.setattr(sglang_dispatch, "AGAIN", str(another))
    assert not finding().confirmed


def test_the_command_prints_one_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["findings", "kvbm-fill-aliases"]) == 0
    assert capsys.readouterr().out.startswith("## Dynamo KVBM: ")


def test_the_command_fails_where_a_claim_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FINDINGS, "kvbm-fill-aliases", with_k_and_v_apart)
    assert cli.main(["findings", "kvbm-fill-aliases"]) == 1
