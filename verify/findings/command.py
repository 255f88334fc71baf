"""`python -m verify findings`, and the file that it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from verify.arguments import Parser
from verify.bench.provenance import ROOT
from verify.findings import flexkv, kvbm, sglang_dispatch, sglang_tests, sglang_transfers, vllm
from verify.findings.finding import Finding

FILE = ROOT / "FINDINGS.md"

FINDINGS: dict[str, Callable[[], Finding]] = {
    "sglang-layers-alike": sglang_tests.layers_alike,
    "sglang-staged-at-page-one": sglang_dispatch.staged_at_page_one,
    "sglang-loads-of-page-rows": sglang_dispatch.loads_of_page_rows,
    "sglang-moves-exactly": sglang_transfers.moves_exactly,
    "sglang-wide-rows": sglang_transfers.wide_rows,
    "sglang-lists-trusted": sglang_transfers.lists_trusted,
    "vllm-store-unseen": vllm.store_unseen,
    "kvbm-fill-aliases": kvbm.fill_aliases,
    "flexkv-fill-aliases": flexkv.fill_aliases,
}

INTRODUCTION = """\
# Findings

What this suite and its measurements showed in the tests, kernels and dispatch of other projects. Each is worked out
anew by the command under it, from the upstream test that it is about or from the committed record of a GPU; then the
command that measures stands there too. They are meant as reports to these projects, whose sources and threads this one
is built on. Generated: `python -m verify findings --write`.
"""


def as_markdown(name: str, finding: Finding) -> str:
    lines = [
        f"## {finding.engine}: {finding.title}",
        "",
        f"{finding.claim} **{'Confirmed' if finding.confirmed else 'Refuted'}.**",
        "",
        f"- Where: {finding.source}",
        f"- Cell: {finding.cell}",
        *(f"- {line}" for line in finding.evidence),
        f"- {finding.consequence}",
        *([f"- Measure, on a GPU with SGLang: {finding.measure}"] if finding.measure else []),
        f"- {'Work out' if finding.measure else 'Reproduce'}: `python -m verify findings {name}`",
    ]
    return "\n".join(lines) + "\n"


def as_file(found: Mapping[str, Finding]) -> str:
    return "\n".join([INTRODUCTION, *(as_markdown(name, finding) for name, finding in found.items())])


def main(argv: Sequence[str]) -> int:
    """Work out findings again. Exit code: 0, 1 where a claim does not hold."""
    parser = Parser(prog="python -m verify findings", description=main.__doc__)
    parser.add_argument("name", nargs="*", metavar="NAME", help=", ".join(FINDINGS))
    parser.add_argument("--write", action="store_true", help="write FINDINGS.md anew")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.name if name not in FINDINGS]:
        parser.error(f"there is no finding {unknown[0]!r}; there are {', '.join(FINDINGS)}")
    if args.write and args.name:
        parser.error("the file has all of them: --write without names")
    found = {name: FINDINGS[name]() for name in args.name or FINDINGS}
    if args.write:
        FILE.write_text(as_file(found), encoding="utf-8")
    print(*(as_markdown(name, finding) for name, finding in found.items()), sep="\n", end="")
    return int(not all(finding.confirmed for finding in found.values()))
