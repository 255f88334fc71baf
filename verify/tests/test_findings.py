"""Findings: FINDINGS.md says what the code finds, and every finding would say so if its claim did not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from verify import cli, fill
from verify.findings import command, flexkv, kvbm, sglang_dispatch, sglang_tests, vllm
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
    ],
    ids=lambda case: case.__name__,
)
def test_a_claim_that_does_not_hold_is_refuted(otherwise: Callable[[], Finding]) -> None:
    finding = otherwise()
    assert not finding.confirmed
    assert "**Refuted.**" in command.as_markdown("name", finding)


def test_the_command_prints_one_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["findings", "kvbm-fill-aliases"]) == 0
    assert capsys.readouterr().out.startswith("## Dynamo KVBM: ")


def test_the_command_fails_where_a_claim_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FINDINGS, "kvbm-fill-aliases", with_k_and_v_apart)
    assert cli.main(["findings", "kvbm-fill-aliases"]) == 1
