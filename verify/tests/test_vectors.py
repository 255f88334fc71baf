"""The golden vectors: frozen, complete, right, and read by consumers that share no code with the project."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import numpy as np
import pytest

from refimpl import LAYOUTS
from verify.reported import T
from verify.vectors import check, faults, payload
from verify.vectors.cases import FAMILIES, REASONS, Case, Geometry, of, refused
from verify.vectors.faults import Fault
from verify.vectors.reported import REPORTED
from verify.vectors.write import FOLDER, ROOT, Pools, generate, groups

pytestmark = pytest.mark.vectors

CONSUMERS = Path(__file__).parents[1] / "consumers"
NUMPY, C = CONSUMERS / "check_vectors.py", CONSUMERS / "check_vectors.c"
SCHEMAS = ROOT / "data" / "schemas"
GEOMETRIES = [g for family in FAMILIES.values() for g in family] + [r.geometry for rs in REPORTED.values() for r in rs]

Json = dict[str, Any]


@cache
def manifest() -> Json:
    return json.loads((FOLDER / "manifest.json").read_text())


@cache
def vectors(family: str) -> Json:
    return json.loads((FOLDER / f"{family}.json").read_text())


def every_case() -> Iterator[tuple[Json, Json]]:
    """Every group and test."""
    for family in FAMILIES:
        for group in vectors(family)["groups"]:
            for test in group["tests"]:
                yield group, test


def caught(group: Json, test: Json) -> set[str]:
    return {*test["flags"], *(group["flags"] if test["result"] == "ok" else ())}


# ---- frozen and well formed


def test_the_generator_writes_them_byte_for_byte() -> None:
    files = generate()
    assert sorted(files) == sorted(f.name for f in FOLDER.iterdir() if f.suffix in (".json", ".txt"))
    changed = [name for name, text in files.items() if (FOLDER / name).read_bytes() != text.encode()]
    assert not changed, "these are frozen: another content is another version"


# Of the cases of a version: how many there were when it came out, and the SHA-256 of their lines.
FROZEN = {
    1: (2931, "282e6437d19ec559b6b4121470cfe31a9ea59351c6d3d2810f26b0e84aba0e21"),
    2: (3237, "a598821a278d4cf529f49d9f4e8f37f4b25b2636f50d8a1efc095e4444b26d83"),
}


@pytest.mark.parametrize("version", FROZEN)
def test_no_version_changes_the_cases_of_an_earlier_one(version: int) -> None:
    lines = [line for family in FAMILIES for line in _lines_of(family, version)]
    cases = sum(line.startswith("case ") for line in lines)
    assert (cases, hashlib.sha256("".join(lines).encode()).hexdigest()) == FROZEN[version]
    assert max(FROZEN) == manifest()["version"]


def _lines_of(family: str, version: int) -> Iterator[str]:
    """The groups of a version in the text form: bytes and lists, neither notes nor flags."""
    since, kept = {group["id"]: group["since"] for group in vectors(family)["groups"]}, False
    for line in (FOLDER / f"{family}.txt").read_text().splitlines(keepends=True)[1:]:
        if line.startswith("group "):
            kept = since[line.split()[1]] <= version
        if kept:
            yield line


def test_the_manifest_names_every_file_with_its_digest() -> None:
    named = {file["name"]: file["sha256"] for file in manifest()["files"]}
    held = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in FOLDER.iterdir()}
    assert named == {n: digest for n, digest in held.items() if n not in ("manifest.json", "README.md")}
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 4.9e6


@pytest.mark.parametrize("file", ["manifest", *FAMILIES])
def test_files_follow_their_schema(file: str) -> None:
    content = manifest() if file == "manifest" else vectors(file)
    jsonschema.validate(content, json.loads((SCHEMAS / content["schema"]).read_text()))


def test_a_case_that_must_berefused_cannot_have_digests() -> None:
    schema = json.loads((SCHEMAS / "vectors.schema.json").read_text())
    content = json.loads(json.dumps(vectors("mha")))
    refused = next(t for t in content["groups"][0]["tests"] if t["result"] == "must-refuse")
    refused["sha256"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema)


def test_ids_notes_flags_and_counts_hold_together() -> None:
    ids = [test["id"] for _, test in every_case()]
    assert len(set(ids)) == len(ids) == manifest()["cases"] == sum(vectors(f)["cases"] for f in FAMILIES)
    for family in FAMILIES:
        used = {test["note"] for group in vectors(family)["groups"] for test in group["tests"]}
        assert used == set(vectors(family)["notes"])
    flags = set().union(*(caught(*pair) for pair in every_case()))
    assert flags == set(manifest()["flags"]), "a flag that no case has proves nothing"


# ---- complete


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_is_moved_both_ways_or_must_berefused(family: str) -> None:
    for geometry in FAMILIES[family]:
        for layout in LAYOUTS:
            (group,) = [g for g in vectors(family)["groups"] if g["id"] == f"{geometry.name}/{layout}"]
            results = {(t["direction"], t["result"], t.get("reason")) for t in group["tests"]}
            ways = ["backup", "load"]
            if geometry.allowed(layout):
                entries = geometry.spec.entries and not {"some", "all"}.isdisjoint(geometry.sets)
                ways += ["backup_entries", "load_entries"] if entries else []
                assert {(way, "ok", None) for way in ways} <= results
            else:
                assert results == {(way, "must-refuse", "layout") for way in ways}


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mamba"])
def test_every_reason_to_refuse_occurs_both_ways(family: str) -> None:
    """States are their own pages: none of their lists is misaligned."""
    found = {(t["direction"], t.get("reason")) for g in vectors(family)["groups"] for t in g["tests"]}
    assert {(way, reason) for way in ("backup", "load") for reason in REASONS} <= found


def test_twins_are_the_layouts_with_the_same_bytes() -> None:
    filled = {
        group["id"]: [buffer["filled"] for buffer in group["host"]]
        for family in FAMILIES
        for group in vectors(family)["groups"]
    }
    for family in FAMILIES:
        for group in vectors(family)["groups"]:
            name, layout = group["id"].split("/")
            alike = {other for other in LAYOUTS if filled.get(f"{name}/{other}") == filled[group["id"]] != []}
            present = {other for other in group["twins"] if f"{name}/{other}" in filled}
            assert present == alike - {layout}, group["id"]


# ---- what data/vectors/README.md says

GUIDE = (FOLDER / "README.md").read_text()


def test_the_guide_has_the_payload_of_the_manifest() -> None:
    assert "\n".join(manifest()["payload"]["formula"]) in GUIDE


def test_the_guide_has_every_version() -> None:
    assert [int(n) for n in re.findall(r"(?m)^(\d+)\. ", GUIDE.split("## Versions")[1])] == [*FROZEN]


def test_the_guide_says_how_far_the_vectors_reach() -> None:
    """What is cut to 16 bits (pages and indices) or to 32 (offsets), signed or not, stays what it is."""
    pools = [(g, side) for family in FAMILIES for g in vectors(family)["groups"] for side in ("host", "device")]
    page = max(g[f"{side}_pages"] - 1 for g, side in pools)
    index = max(g[f"{side}_pages"] * g["page_size"] - 1 for g, side in pools)
    size = max(buffer["bytes"] for g, side in pools for buffer in g[side])
    sentence = (
        f"the largest page is {page:,}, the largest index {index:,}, and the largest buffer has {size:,} bytes. "
        "So page numbers or indices that are cut to 16 bits pass, and so do offsets that are cut to 32,"
    )
    assert sentence in " ".join(GUIDE.split())
    assert page <= index < 2**15
    assert size < 2**31


@pytest.mark.parametrize("family", FAMILIES)
def test_the_guide_tells_where_a_byte_lies(family: str) -> None:
    """Its formulas, filled with the payload, come to the digests of every buffer."""
    formulas = dict(re.findall(r"(?m)^ {6}(\w+) +(.+)$", GUIDE))
    assert {*formulas} == {*LAYOUTS}
    for group in (group for group in vectors(family)["groups"] if group["since"] == 1):  # the small ones
        for side in ("host", "device"):
            for buffer in group[side]:
                formula = formulas[group["layout"] if side == "host" else "layer_first"]
                data = _filled_by(formula.replace("/", "//"), group, buffer, group[f"{side}_pages"])
                assert hashlib.sha256(data.tobytes()).hexdigest() == buffer["filled"], (group["id"], buffer["name"])


def _filled_by(formula: str, group: Json, buffer: Json, pages: int) -> np.ndarray:
    named = {c["name"]: c for c in group["components"]}
    layers, held, first = buffer["layers"], [named[name] for name in buffer["components"]], buffer["first_byte"]
    tokens, heads = group["page_size"] if held[0]["unit"] == "token" else 1, held[0]["heads"] or 1
    counts = {"L": len(layers), "C": len(held), "P": pages, "T": tokens, "H": heads, "W": buffer["head_bytes"]}
    counts["E"] = heads // (group["head_groups"] if held[0]["heads"] else 1)
    data = np.full(buffer["bytes"], payload.POISON, np.uint8)
    p, t, h, b = np.ogrid[:pages, :tokens, :heads, : buffer["head_bytes"]]
    for c, i in np.ndindex(len(held), len(layers)):
        width = held[c]["lanes"] * held[c]["element_bytes"]
        rows = payload.rows(held[c]["id"], layers[i], pages, tokens, heads, width)
        at = eval(formula, counts | {"l": i, "c": c, "p": p, "t": t, "h": h, "b": b})
        data[at] = rows[..., first : first + b.size]
    return data


# ---- the payload


def _words(geometry: Geometry) -> np.ndarray:
    """Every whole word of both sides; host pages are device pages as far as their bytes go."""
    pages = max(geometry.host_pages, geometry.device_pages)
    found = []
    for c in geometry.spec.components:
        for layer in geometry.spec.layers_of(c):
            number = geometry.numbers[c.name], payload.SIDE if layer is None else layer
            width = c.row_bytes // c.head_count
            rows = payload.rows(*number, pages, geometry.spec.tokens_per_page(c), c.head_count, width)
            assert rows.min() > 0
            assert rows.max() <= payload.BASE < payload.POISON
            whole = np.ascontiguousarray(rows[..., : width // 8 * 8])
            found.append(whole.reshape(-1).view(np.uint64))
    return np.concatenate(found)


@pytest.mark.parametrize(
    "names", [*[(g.name,) for g in GEOMETRIES], ("B04-rows", "B04-index"), ("B18-target", "B18-draft")]
)
def test_no_two_words_of_a_case_are_alike(names: tuple[str, ...]) -> None:
    words = np.concatenate([_words(g) for g in GEOMETRIES if g.name in names])
    assert len(np.unique(words)) == len(words)


def test_a_word_tells_its_place() -> None:
    rng = np.random.default_rng(8)
    for _ in range(200):
        at = payload.Place(*(int(rng.integers(1 << bits)) for bits in payload.BITS.values()))
        n = 0
        for value, bits in zip(
            (at.component, at.layer, at.page, at.token, at.head, at.word), payload.BITS.values(), strict=True
        ):
            n = n << bits | value
        mixed = int(payload.mix(np.array([n], np.uint64))[0])
        word = bytes(mixed // payload.BASE**i % payload.BASE + 1 for i in range(8))
        assert payload.place(word) == at
    assert payload.place(bytes([payload.POISON] * 8)) is None
    assert sum(payload.BITS.values()) == 63


# ---- right


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("family", FAMILIES)
def test_our_backends_agree(family: str, backend: str) -> None:
    for name, geometry, layout, cases in groups():
        if name == family:
            assert not [*check.against(backend, geometry, layout, cases)], f"{geometry.name} in {layout}"


def test_a_backend_that_is_wrong_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that moves nothing, one that refuses nothing, one that spoils its source."""
    geometry = FAMILIES["mha"][0]
    cases = [*of(geometry, "page_head"), *refused(geometry)]
    moved = {case.name for case in cases if case.result != "must-refuse" and case.host}
    with monkeypatch.context() as patch:
        patch.setattr(check, "_run", lambda pools, case: None)
        assert {*check.against("torch", geometry, "page_head", cases)} == {case.name for case in cases if case.host}
    run = check._run

    def spoil(pools: Pools, case: Case) -> None:
        run(pools, case)
        pools.poison("device" if case.direction == "backup" else "host")

    monkeypatch.setattr(check, "_run", spoil)
    assert {*check.against("torch", geometry, "page_head", cases)} >= moved


def consumer(*changes: tuple[str, str]) -> ModuleType:
    """The NumPy consumer, with its source changed."""
    spec = importlib.util.spec_from_loader("check_vectors", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(changed(NUMPY, *changes), str(NUMPY), "exec"), module.__dict__)
    return module


def changed(file: Path, *changes: tuple[str, str]) -> str:
    text = file.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file.name}"
        text = text.replace(old, new)
    return text


def reported_payload(group: str) -> Callable[..., np.ndarray]:
    """The payload of the public reports, in place of ours: see `verify.reported.T`."""

    def rows(component: int, layer: int, pages: list[int], tokens: int, heads: int, width: int) -> np.ndarray:
        slots = [page * tokens + token for page in pages for token in range(tokens)]
        lanes = np.arange(heads * width)
        if group.startswith("B18-packed") and layer == 4:
            component, layer = 4, 0
        if group.startswith("B19"):  # every FP8 code
            found = [(lanes + 17 * slot + 101 * layer + 53 * component) % 256 for slot in slots]
        else:
            found = [T(component, layer, slot, lanes) for slot in slots]
        return np.stack(found).astype(np.uint8).reshape(len(pages), tokens, heads, width)

    return rows


REPORTED_TESTS = [(g, t) for g, t in every_case() if "crc32" in t]


@pytest.mark.parametrize(("group", "test"), REPORTED_TESTS, ids=[t["id"] for _, t in REPORTED_TESTS])
def test_the_consumer_arrives_at_checksums_from_elsewhere(group: Json, test: Json) -> None:
    module = consumer()
    module.__dict__["payload"] = reported_payload(group["id"])
    buffers, sums = module.move(group, test), dict[str, int]()
    for buffer, data in zip(group[module.destination(test)], buffers, strict=True):
        (name,) = buffer["components"]
        sums[name] = zlib.crc32(data.tobytes(), sums.get(name, 0))
    assert {name: f"{value:08x}" for name, value in sums.items()} == test["crc32"]


FAULTY = {
    "LayersNotAskedFor": ('if layer not in test.get("layers", [layer]):', "if False:"),
    "LayersSwapped": (
        "return rows_on(group, component, layer, origins)",
        'owned = component["layers"]\n'
        "            return rows_on(group, component, owned[(owned.index(layer) + 1) % len(owned)], origins)",
    ),
    "FirstSourceRunsOn": (
        "return rows_on(group, component, layer, origins)",
        'count = group[f"{source}_pages"]\n'
        "            return rows_on(group, component, layer, [(origins[0] + i) % count for i in range(len(origins))])",
    ),
    "HeadsShifted": (
        "return rows_on(group, component, layer, origins)",
        "return np.roll(rows_on(group, component, layer, origins), -1, axis=2)",
    ),
    "TokensShifted": (
        "return rows_on(group, component, layer, origins)",
        "return np.roll(rows_on(group, component, layer, origins), -1, axis=1)",
    ),
    "SideStatesLost": ("if rows is not None:", 'if rows is not None and not component["side"]:'),
    "ScalesLost": ('begin += segment["entries"] * width', 'begin += segment["entries"] * width\n                break'),
}


@cache
def filled() -> dict[str, dict[str, list[np.ndarray]]]:
    """By group: its buffers, full."""
    module = consumer()
    return {group["id"]: module.filled(group) for family in FAMILIES for group in vectors(family)["groups"]}


@pytest.mark.parametrize("flag", FAULTY)
def test_flags_name_the_very_cases_that_catch_a_fault(flag: str) -> None:
    """Neither more nor fewer. Single entries have loops of their own in the consumer."""
    module, in_rows_of = consumer(FAULTY[flag]), flag in ("LayersNotAskedFor", "SideStatesLost", "ScalesLost")
    right = [(g, t) for g, t in every_case() if t["result"] == "ok" and (in_rows_of or "host_entries" not in t)]
    failed = {t["id"] for g, t in right if module.wrong(g, t, filled()[g["id"]])}
    assert failed == {t["id"] for g, t in right if flag in caught(g, t)} != set()


AT_SIZE = {
    "PagesBeyond128Lost": LAYOUTS,
    "PagesBeyond256Lost": LAYOUTS,
    "PageNumbersAsBytes": LAYOUTS,
    "LayersBeyond64Lost": LAYOUTS,
    "LayersBeyond128Lost": tuple(layout for layout in LAYOUTS if layout != "page_head"),
    "BeyondFirst16KLost": LAYOUTS,
    "TailOf16KLost": LAYOUTS,
}


@pytest.mark.parametrize("flag", AT_SIZE)
def test_a_fault_of_real_sizes_shows_in_every_layout_and_in_no_pool_of_version_1(flag: str) -> None:
    groups = {group["id"]: group for group, test in every_case() if flag in caught(group, test)}
    assert {group["since"] for group in groups.values()} == {2}
    assert {group["layout"] for group in groups.values()} == {*AT_SIZE[flag]}


# A fault with a limit, by that limit: which ones show in the very same cases, from the least to the greatest.
LIMITS: dict[str, tuple[Callable[[int], Fault], int, int]] = {
    "PagesBeyond128Lost": (lambda n: Fault("", pairs=faults.first_pages(n)), 65, 129),
    "PagesBeyond256Lost": (lambda n: Fault("", pairs=faults.first_pages(n)), 130, 259),
    "LayersBeyond64Lost": (lambda n: Fault("", moves=faults.first_layers(n)), 5, 69),
    "LayersBeyond128Lost": (lambda n: Fault("", moves=faults.first_layers(n)), 70, 129),
    "BeyondFirst16KLost": (lambda n: Fault("", kept=faults.first_bytes(n)), 8448, 32767),
}


@pytest.mark.parametrize("flag", LIMITS)
def test_a_flag_says_which_limits_show_in_its_cases(flag: str) -> None:
    limited, least, greatest = LIMITS[flag]
    cases = {(g, c) for _, g, layout, cs in groups() for c in cs if g.allowed(layout) and c.result == "ok"}

    def shown(limit: int) -> set[tuple[Geometry, Case]]:
        return {(g, c) for g, c in cases if faults.shows(limited(limit), g, c)}

    flagged = {(g, c) for g, c in cases if flag in faults.flags(g, c)}
    assert f"from {least:,} to {greatest:,}" in manifest()["flags"][flag]
    assert shown(least) == shown(greatest) == flagged
    assert shown(least - 1) > flagged > shown(greatest + 1)


@pytest.mark.parametrize("width", [16 << 10, 32 << 10])
def test_the_tail_of_a_tile_is_lost_in_the_same_cases_for_tiles_of_16_and_32_kib(width: int) -> None:
    cases = {(g, c) for _, g, layout, cs in groups() for c in cs if g.allowed(layout) and c.result == "ok"}
    for g, c in cases:
        lost = faults.shows(Fault("", kept=faults.whole_tiles(width)), g, c)
        assert lost is ("TailOf16KLost" in faults.flags(g, c)), f"{g.name}, {c.name}"


def test_no_two_faults_show_in_the_very_same_cases() -> None:
    """So a diagnosis that names one names no other."""
    shown: dict[frozenset[str], list[str]] = {}
    for flag in manifest()["flags"]:
        where = frozenset(test["id"] for group, test in every_case() if flag in caught(group, test))
        shown.setdefault(where, []).append(flag)
    assert [flags for flags in shown.values() if len(flags) > 1] == []


# ---- the consumers


def run_numpy(folder: Path, *changes: tuple[str, str]) -> subprocess.CompletedProcess[str]:
    """The consumer as anybody runs it: in a process that has never heard of the project."""
    script = folder / "check_vectors.py"
    script.write_text(changed(NUMPY, *changes))
    return subprocess.run(
        [sys.executable, "-P", script.name, "."], cwd=folder, capture_output=True, text=True, timeout=60
    )


def run_c(folder: Path, *changes: tuple[str, str]) -> subprocess.CompletedProcess[str]:
    source, program = folder / "check_vectors.c", folder / "check_vectors"
    source.write_text(changed(C, *changes))
    warnings = [] if changes else ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", "-std=c99", "-O2", *warnings, source, "-o", program], check=True, timeout=60)
    files = sorted(map(str, folder.glob("*.txt")))
    return subprocess.run([program, *files], capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the vectors, to be tampered with."""
    for file in FOLDER.iterdir():
        shutil.copy2(file, tmp_path)
    return tmp_path


@pytest.mark.parametrize("run", [run_numpy, run_c])
def test_a_plain_consumer_checks_the_whole_set(run: Any, folder: Path) -> None:
    done = run(folder)
    assert (done.returncode, done.stdout) == (0, f"{manifest()['cases']} cases checked, 0 wrong\n"), done.stderr


def _with_another_digit(text: str, after: str, nth: int = 0) -> str:
    """The first digit that follows the nth `after`, made another one."""
    at = -1
    for _ in range(nth + 1):
        at = text.index(after, at + 1)
    at = next(i for i in range(at + len(after), len(text)) if text[i].isdigit())
    return text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]


@pytest.mark.parametrize(
    ("file", "after"),
    [
        ("mha.json", '"sha256":{"k":"'),
        ("mha.json", '"filled":"'),
        ("mamba.json", '"host_pages":['),
        ("v4_paged.json", '"host_entries":[8,'),
        ("v4_paged.json", '"segments":[{"entries":2,"bytes":'),
        ("dsa.json", '"base64":{"index_k":"'),
        ("manifest.json", '"value": '),
        ("manifest.json", '"cases": '),
    ],
)
def test_the_numpy_consumer_sees_one_digit(folder: Path, file: str, after: str) -> None:
    text = (folder / file).read_text()
    (folder / file).write_text(_with_another_digit(text, after))
    assert run_numpy(folder).returncode != 0


@pytest.mark.parametrize(
    ("file", "after"),
    [
        ("mha.txt", "sha256 2 "),
        ("mha.txt", "buffer 0 8 384 1 0 2 0 1 "),
        ("mamba.txt", "\nhost 3 "),
        ("v4_paged.txt", "\ndevice 3 "),
        ("mla.txt", "vectors "),
    ],
)
def test_the_c_consumer_sees_one_digit(folder: Path, file: str, after: str) -> None:
    text = (folder / file).read_text()
    (folder / file).write_text(_with_another_digit(text, after))
    assert run_c(folder).returncode != 0


def test_the_c_consumer_without_files_checks_nothing_and_says_so(tmp_path: Path) -> None:
    done = run_c(tmp_path)
    assert (done.returncode, "no files: " in done.stderr) == (2, True)
    (section,) = re.findall('see "(.+)" in README.md', done.stderr)
    assert f"\n## {section}\n" in GUIDE
    assert f'("{section}")' in C.read_text().split("#include")[0]


@pytest.mark.parametrize("arguments", [(), ("elsewhere",)])
def test_the_numpy_consumer_without_vectors_says_where_it_looked(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, NUMPY, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    looked = tmp_path.joinpath(*arguments or ("data", "vectors"), "manifest.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"No such file or directory: {looked}; name the folder of the vectors: python check_vectors.py " in line


NUMPY_MISTAKES = [
    (
        '"page_first": (tokens * layers * row, layers * row, row,',
        '"page_first": (tokens * layers * row, row, tokens * row,',
    ),
    (
        "column, layers * lanes, lanes, heads * column, column, 0)",
        "column, lanes, tokens * lanes, heads * column, column, 0)",
    ),
    ("components * tokens * part, one, lanes, tokens * part)", "tokens * part, one, lanes, layers * tokens * part)"),
    ("rows[..., first : first + lanes]", "rows[..., :lanes]"),
    ("(begin + entry % every * width for entry", "(begin + entry // every * width for entry"),
    ("if any(start % size for start in starts):", "if False:"),
    ("if side == destination(test) and", "if"),
    ("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB"),
]
C_MISTAKES = [
    (
        "((page * tokens + token) * layers + layer) * heads + head",
        "((page * layers + layer) * tokens + token) * heads + head",
    ),
    ("((page * heads + head) * tokens + token) * layers", "((page * tokens + token) * heads + head) * layers"),
    ("* layers + layer) * parts + part) * tokens", "* parts + part) * layers + layer) * tokens"),
    ("page, token, head, b->first + k)", "page, token, head, k)"),
    ("lane - s->first)]", "lane - b->first)]"),
    ("if (l->at[i] % p) return MISALIGNED;", "if (0) return MISALIGNED;"),
    ("turn(a, 22)", "turn(a, 23)"),
]


@pytest.mark.parametrize("mistake", NUMPY_MISTAKES)
def test_the_numpy_consumer_fails_where_its_arithmetic_is_wrong(folder: Path, mistake: tuple[str, str]) -> None:
    assert run_numpy(folder, mistake).returncode == 1


@pytest.mark.parametrize("mistake", C_MISTAKES)
def test_the_c_consumer_fails_where_its_arithmetic_is_wrong(folder: Path, mistake: tuple[str, str]) -> None:
    assert run_c(folder, mistake).returncode == 1


# ---- the consumers, asked about an implementation that is not theirs


def tiny() -> list[tuple[Json, Json]]:
    """Every case of a pool, but for the layout that it cannot have."""
    groups = [g for g in vectors("mha")["groups"] if g["id"].startswith("mha-tiny/") and g["host"]]
    return [(g, t) for g in groups for t in g["tests"]]


def _does_nothing(right: Callable[..., None], group: Json, test: Json, memory: Json) -> None:
    pass


def _refuses_everything(right: Callable[..., None], group: Json, test: Json, memory: Json) -> None:
    raise MemoryError("no room")


def _refuses_when_it_has_written(right: Callable[..., None], group: Json, test: Json, memory: Json) -> None:
    for data in memory["host" if test["direction"] == "backup" else "device"]:
        data[-1] = 1
    right(group, test, memory)


def _spoils_the_source(right: Callable[..., None], group: Json, test: Json, memory: Json) -> None:
    for data in memory["device" if test["direction"] == "backup" else "host"]:
        data[-1] ^= 1
    right(group, test, memory)


@pytest.mark.parametrize(
    ("mover", "said", "where"),
    [
        (_does_nothing, " has other bytes", lambda t: t["result"] != "must-refuse" and t["host_pages"] != []),
        (_does_nothing, "was not refused, though it must be: ", lambda t: t["result"] == "must-refuse"),
        (_refuses_everything, "was refused: MemoryError: no room", lambda t: t["result"] == "ok"),
        (_refuses_when_it_has_written, " has other bytes", lambda t: t["result"] == "must-refuse"),
        (_spoils_the_source, "device buffer v@1 has other bytes", lambda t: t["direction"] == "backup"),
    ],
)
def test_the_numpy_consumer_tells_what_a_mover_did_wrong(
    mover: Callable[..., None], said: str, where: Callable[[Json], bool]
) -> None:
    module = consumer()
    module.__dict__["transfer"] = partial(mover, module.transfer)
    told = {t["id"] for g, t in tiny() if said in module.wrong(g, t, filled()[g["id"]])}
    assert told == {t["id"] for g, t in tiny() if where(t)} != set()


BESIDE = [(-256, "256 bytes before"), (-1, "1 bytes before"), (0, "1 bytes behind"), (255, "256 bytes behind")]


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize(("at", "said"), BESIDE)
def test_the_numpy_consumer_sees_a_write_beside_a_buffer(side: str, at: int, said: str) -> None:
    """By address, as a library would; `at` from the buffer's start, or from its end. In every case, refused or not."""
    module = consumer()
    right = module.transfer

    def beside(group: Json, test: Json, memory: dict[str, list[np.ndarray]]) -> None:
        data = memory[side][0]
        ctypes.memset(data.ctypes.data + (at if at < 0 else data.size + at), 0, 1)
        right(group, test, memory)

    module.__dict__["transfer"] = beside
    for group, test in tiny():
        told = module.wrong(group, test, filled()[group["id"]])
        assert told == f"{side} buffer {group[side][0]['name']}: a write {said} the buffer", test["id"]


def mover_in_c(before: str) -> tuple[str, str]:
    """Does what is right after `before`."""
    text = "static int move(const Group *g, Case *t, uint8_t **bytes[2]) {{ {}; return right_move(g, t, bytes); }}"
    return "#define move right_move", text.format(before)


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize(("at", "said"), BESIDE)
def test_the_c_consumer_sees_a_write_beside_a_buffer(side: str, at: int, said: str, tmp_path: Path) -> None:
    shutil.copy2(FOLDER / "mha.txt", tmp_path)
    end = 0 if at < 0 else f"g->buffer[{side.upper()}][0].bytes"
    done = run_c(tmp_path, mover_in_c(f"if (g->buffers[HOST]) bytes[{side.upper()}][0][{end} + ({at})] = 0"))
    written = [t["id"] for group in vectors("mha")["groups"] if group["host"] for t in group["tests"]]
    lines = [f"{name}: {side} buffer 0: a write {said} the buffer" for name in written]
    count = f"{vectors('mha')['cases']} cases checked, {len(written)} wrong"
    assert (done.returncode, done.stdout.splitlines()) == (1, [*lines, count])


def test_the_c_consumer_names_the_case_that_ruined_the_heap(tmp_path: Path) -> None:
    """Memory from `malloc` can no longer be had then, not even to print."""
    shutil.copy2(FOLDER / "mha.txt", tmp_path)
    done = run_c(tmp_path, mover_in_c("memset(bytes[DEVICE][0] + g->buffer[DEVICE][0].bytes + GUARD, 0xAB, 4096)"))
    assert done.returncode == 1, done.stderr
    assert re.search(r"^mha-tiny/\S+: died of signal \d+; .*-fsanitize=address", done.stdout)


def test_consumers_import_nothing_of_ours() -> None:
    imported = {
        line.split()[1].split(".")[0]
        for line in NUMPY.read_text().splitlines()
        if line.startswith(("import ", "from "))
    }
    assert imported == {"base64", "hashlib", "json", "sys", "pathlib", "numpy"}
    included = {line for line in C.read_text().splitlines() if line.startswith("#include ")}
    assert all("<" in line for line in included - {"#include MOVER"})
