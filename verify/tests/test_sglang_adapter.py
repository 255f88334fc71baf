"""The adapters of SGLang without SGLang: what they say is absent, and that they hand over the right addresses.

On a CPU nothing of SGLang's can move a byte, so a stand-in does it, by the address arithmetic that its functions
document: whoever passes a wrong table, stride, index or item size gets wrong bytes. Where SGLang is installed, its own
pools are built too.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from verify import cli
from verify.adapters import protocol, runner, sglang_pieces, suite
from verify.adapters.sglang_functions import PATHS, Functions
from verify.adapters.sglang_pools import LAYOUTS, Built, Pools
from verify.adapters.suite import Group
from verify.sglang_stand_in import StandIn

pytestmark = pytest.mark.vectors

NAMES = [name for name in protocol.SHIPPED if name.startswith("sglang")]
GROUPS = {group.geometry["id"]: group for group in suite.groups()}
CLEAN = ("passed", "unsupported")


@pytest.fixture
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has none of it, whatever this one has."""

    def absent(name: str) -> Any:
        raise sglang_pieces.Absent(f"{sglang_pieces.PIECES[name]}: not installed")

    monkeypatch.setattr(sglang_pieces, "piece", absent)


# ---- absent pieces


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_loads_without_sglang_and_names_what_is_absent(name: str, without_sglang: None) -> None:
    found = protocol.load(name)
    absent = {piece: why for piece, why in found.versions.items() if piece in sglang_pieces.PIECES}
    assert absent
    assert all(why.startswith("absent (") for why in absent.values()), absent


def test_a_cell_is_refused_for_its_layout_before_a_piece_is_looked_for(without_sglang: None) -> None:
    group = GROUPS["mha-wide/page_first_direct"]
    reason = Functions("staged").capabilities(group.geometry, "page_first_direct", "backup")
    assert reason == "staged: it has no backup in page_first_direct"


def test_a_cell_that_exists_is_refused_because_a_piece_is_absent(without_sglang: None) -> None:
    group = GROUPS["mha-wide/page_first"]
    reason = Functions("staged").capabilities(group.geometry, "page_first", "backup")
    assert reason == "staged: sglang.kernels.ops.kvcache.hicache: not installed"
    reason = Pools("kernel").capabilities(group.geometry, "page_first", "backup")
    assert reason == "sglang.srt.mem_cache.pool_host.mha: not installed"


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        ("asymmetric-tiny", "layer_first", "SGLang's pool has no layer_first"),
        ("mla-layers-130", "page_first_direct", r"fewer host pages than layers in page_first_direct: 3 and 130"),
        ("mla-tiny", "page_first", "SGLang's pool has no direct transfers in page_first"),
    ],
)
def test_a_pool_that_would_raise_while_it_is_built_is_refused_before(
    name: str, layout: str, reason: str, without_sglang: None
) -> None:
    """What it has registered by then stays so, and whoever is given the same memory afterwards cannot be built."""
    said = Pools("direct").capabilities(GROUPS[f"{name}/{layout}"].geometry, layout, "backup")
    assert said
    assert re.search(reason, said)


def test_a_package_whose_start_fails_still_gives_its_pieces(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "starts_badly"
    package.mkdir()
    (package / "__init__.py").write_text("import a_package_that_nobody_has\n")
    (package / "kernels.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sglang_pieces.PIECES, "badly", "starts_badly.kernels")
    assert sglang_pieces.piece("badly").answer == 42
    monkeypatch.setitem(sglang_pieces.PIECES, "nowhere", "starts_badly.pools")
    with pytest.raises(sglang_pieces.Absent, match=r"starts_badly\.pools: No module named"):
        sglang_pieces.piece("nowhere")


def test_the_command_prints_pieces_and_versions(capsys: pytest.CaptureFixture[str], without_sglang: None) -> None:
    cli.main(["--adapter", "sglang", "--family", "mamba", "--same-process"])
    first = capsys.readouterr().out.splitlines()[0]
    assert f"torch {torch.__version__}" in first
    assert "hicache absent (" in first


# ---- what they hand over


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_pieces, "piece", lambda _: StandIn())


def wrong(adapter: Any, groups: list[Group]) -> tuple[int, list[str]]:
    """How many that must move did, and messages of those of them that are wrong."""
    loaded = protocol.Loaded("sglang", adapter, {}, "CPU", ())
    outcomes = [o for _, test, o in runner.run(loaded, groups) if test["result"] == "ok"]
    return sum(o.status == "passed" for o in outcomes), [o.message for o in outcomes if o.status not in CLEAN]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_moves_the_right_bytes_wherever_it_offers_to(path: str, stand_in: None) -> None:
    moved, failures = wrong(Functions(path, where="cpu"), [*suite.groups()])
    assert not failures, "\n".join(failures[:5])
    assert moved


@pytest.mark.parametrize("file", sorted(sglang_pieces.EXPECTED.iterdir()), ids=lambda file: file.stem)
def test_what_is_expected_to_fail_are_lists_that_must_be_refused_or_wide_rows(file: Path) -> None:
    lines = protocol.expected_failures(file)
    hit = {line.pattern: [t for g in GROUPS.values() for t in g.tests if line.matches(t["id"])] for line in lines}
    for pattern, tests in hit.items():
        assert tests, f"{pattern} is no case"
        assert {test["note"] for test in tests if test["result"] != "must-refuse"} <= {"wide-rows"}, pattern


LIKE_MHA = GROUPS["mha-tiny/page_first"]


def test_a_list_beyond_the_margins_is_not_handed_over(stand_in: None) -> None:
    """A stand-in would write to that address as well, and end this process; nothing moved, so the case has failed."""
    wild = next(test for test in GROUPS["mha-tiny/layer_first"].tests if test["id"].endswith("beyond-32-bits"))
    loaded = protocol.Loaded("sglang", Functions("ops", where="cpu"), {}, "CPU", ())
    outcome = runner.check(loaded, GROUPS["mha-tiny/layer_first"], wild)
    assert (outcome.status, outcome.refused) == ("failed", False)


class Beside(StandIn):
    """Also writes the byte after the first host buffer."""

    def _ops(self, name: str, *args: Any, **more: Any) -> None:
        super()._ops(name, *args, **more)
        end = more["dst_k"].data_ptr() + more["dst_k"].numel()
        ctypes.memset(end, 0, 1)


class HalfWay(StandIn):
    """Moves, and then refuses."""

    def _ops(self, name: str, *args: Any, **more: Any) -> None:
        super()._ops(name, *args, **more)
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("fault", "said"), [(Beside, "memory beside a buffer was written"), (HalfWay, "RuntimeError: no")]
)
def test_what_a_function_did_before_an_error_is_seen(
    fault: type[StandIn], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_pieces, "piece", lambda _: fault())
    test = next(test for test in LIKE_MHA.tests if test["result"] == "ok" and test["direction"] == "backup")
    loaded = protocol.Loaded("sglang", Functions("ops", where="cpu"), {}, "CPU", ())
    outcome = runner.check(loaded, LIKE_MHA, test)
    assert outcome.status == "failed"
    assert said in outcome.message
    refused = suite.unmoved(LIKE_MHA, test)
    assert outcome.sha256 != refused, "the bytes that moved are among those that were judged"


# ---- pools


class Pool:
    """As SGLang's pools are built and asked, with torch operations inside. Rows of a layer: `[row, byte]`."""

    can_use_write_back_jit = True

    def __init__(self, described: Any = None, **asked: Any) -> None:
        self.layout, self.asked = asked["layout"], asked
        self.device = device = self.rows(described, asked)
        self.unit = asked.get("slot_page_size", asked.get("swa_page_size", 0))  # pools of page rows
        self.page = 1 if self.unit else asked["page_size"]
        rows = asked["num_host_pages"] if self.unit else asked["host_token_capacity"]
        self.kv_buffer = [torch.zeros(rows * len(of) * of[0].shape[1], dtype=torch.uint8) for of in device]

    def rows(self, described: Any, asked: Any) -> list[list[torch.Tensor]]:
        """Device rows of each part."""
        if described is None:
            found = asked.get("device_buffers") or [pool.kv_score_buffer.kv_score for pool in asked["state_pools"]]
            return [found]
        split = isinstance(described.buffers, SimpleNamespace)
        parts = [described.buffers.k, described.buffers.v] if split else [described.buffers]
        return [[row.reshape(row.shape[0], -1) for row in part] for part in parts]

    def host_rows(self, part: int, layer: int) -> torch.Tensor:
        """A view `[page, token, byte]`."""
        layers, width = len(self.device[part]), self.device[part][0].shape[1]
        whole = self.kv_buffer[part]
        return {
            "layer_first": lambda: whole.view(layers, -1, self.page, width)[layer],
            "page_first": lambda: whole.view(-1, self.page, layers, width)[:, :, layer],
            "page_first_direct": lambda: whole.view(-1, layers, self.page, width)[:, layer],
        }[self.layout]()

    def lists(self, *given: torch.Tensor) -> list[torch.Tensor]:
        return [items[:: self.unit] // self.unit if self.unit else items for items in given]

    def backup_from_device_all_layer(self, _: None, host: torch.Tensor, device: torch.Tensor, backend: str) -> None:
        host, device = self.lists(host, device)
        for part, layers in enumerate(self.device):
            for layer, rows in enumerate(layers):
                self.host_rows(part, layer)[host // self.page, host % self.page] = rows[device]

    def load_to_device_per_layer(
        self, _: None, host: torch.Tensor, device: torch.Tensor, layer: int, backend: str
    ) -> None:
        host, device = self.lists(host, device)
        for part, layers in enumerate(self.device):
            layers[layer][device] = self.host_rows(part, layer)[host // self.page, host % self.page]

    def destroy(self) -> None:
        """Nothing of a CPU's memory is registered."""


POOLS = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost", "MLATokenToKVPoolHost")
POOLS = (*POOLS, "DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool")
INFOS = ("KVBuffers", "MHABufferInfo", "MLABufferInfo")


@pytest.mark.parametrize("backend", LAYOUTS)
def test_pools_are_built_over_the_buffers_and_move_what_they_are_told(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = SimpleNamespace(NHD="nhd")
    named = dict.fromkeys(POOLS, Pool) | dict.fromkeys(INFOS, SimpleNamespace) | {"KVBufferLayout": layout}
    monkeypatch.setattr(sglang_pieces, "piece", lambda _: SimpleNamespace(**named))
    of_pools = [g for g in suite.groups() if g.geometry["layout"] != "page_head"]  # a layout that the stand-in lacks
    moved, failures = wrong(Pools(backend, where="cpu"), of_pools)
    assert not failures, "\n".join(failures[:5])
    assert moved > 100


class Registered(Pool):
    """A pool that holds its memory until it is destroyed, under its name."""

    held: ClassVar[list[str]] = []
    refused: ClassVar[dict[str, str]] = {}  # method by the name of the pool that raises there

    def __init__(self, **asked: Any) -> None:
        super().__init__(**asked)
        self.name = asked["pool_name"]
        self.fails_at("built")
        self.held.append(self.name)

    def destroy(self) -> None:
        self.held.remove(self.name)
        self.fails_at("destroyed")

    def fails_at(self, step: str) -> None:
        if self.refused.get(self.name) == step:
            raise RuntimeError(f"{self.name} cannot be {step}")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> type[Registered]:
    monkeypatch.setattr(sglang_pieces, "piece", lambda _: SimpleNamespace(DeepSeekV4PagedHostPool=Registered))
    monkeypatch.setattr(Registered, "held", [])
    monkeypatch.setattr(Registered, "refused", {})
    return Registered


def why_not_built(adapter: Pools, name: str) -> str | None:
    layout = "page_first_direct"
    return adapter.capabilities(GROUPS[f"{name}/{layout}"].geometry, layout, "backup")


TWO_POOLS, ONE_POOL = "v4_paged-fp4-indexer", "v4_paged-tiny"


def test_a_pool_is_destroyed_if_the_one_beside_it_cannot_be_built(registered: type[Registered]) -> None:
    registered.refused["scale"] = "built"
    said = why_not_built(Pools("direct", where="cpu"), TWO_POOLS)
    assert said == "its pool cannot be built: RuntimeError: scale cannot be built"
    assert not registered.held


def test_pools_that_cannot_be_destroyed_are_a_reason_once_and_keep_no_other(registered: type[Registered]) -> None:
    adapter = Pools("direct", where="cpu")
    assert why_not_built(adapter, TWO_POOLS) is None
    assert registered.held == ["payload", "scale"]
    registered.refused["payload"] = "destroyed"
    said = why_not_built(adapter, ONE_POOL)
    assert said == "its pool cannot be built: RuntimeError: payload cannot be destroyed"
    assert not registered.held
    assert why_not_built(adapter, ONE_POOL) is None


@pytest.mark.skipif(bool(sglang_pieces.why_absent("mha pools")), reason="SGLang is not installed")
@pytest.mark.parametrize("name", ["mha-wide", "asymmetric-wide", "mla-wide", "v4_paged-indexer", "v4_state-wide"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_pools_of_an_installed_sglang_hold_the_bytes_of_the_vectors(name: str, layout: str) -> None:
    group = GROUPS[f"{name}/{layout}"]
    full = {s: {b["name"]: f for b, f in zip(group.geometry[s], group.filled[s], strict=True)} for s in suite.SIDES}
    pools = Built(group.geometry, layout, "cpu")
    pools.fill(full["host"], full["device"])
    back = {side: {name: data * 0 for name, data in of.items()} for side, of in full.items()}
    pools.hand_back(back["host"], back["device"])
    pools.close()
    for side, of in back.items():
        for name, data in of.items():
            assert (data == full[side][name]).all(), f"{side} {name}"
