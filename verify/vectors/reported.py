"""Pools and page lists of publicly reported faults, in our formula, with the checksums that are known from elsewhere.

`crc32` was computed by a program that shares no code with this project, under a formula of its own
(`verify.reported.T`); `verify/tests/test_vectors.py` has the plain NumPy consumer arrive at the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from refimpl import presets
from verify.vectors.cases import BF16, BYTE, Case, Geometry

SHORT = {"layer_first": "lf", "page_first": "pf", "page_first_direct": "pfd", "page_head": "ph"}
LF_PF = ("layer_first", "page_first")
LF_PF_PFD = (*LF_PF, "page_first_direct")


@dataclass(frozen=True)
class Reported:
    """A geometry with its cases; `crc32` by case and layout, one for each component in turn."""

    geometry: Geometry
    cases: tuple[Case, ...]
    crc32: dict[str, dict[str, str]] = field(default_factory=dict)

    def in_layout(self, layout: str) -> list[Case]:
        return [replace(case, crc32=self._known(case, layout)) for case in self.cases]

    def _known(self, case: Case, layout: str) -> dict[str, str]:
        """A load does not depend on the layout."""
        known = self.crc32.get(case.name, {})
        sums = known.get("load" if case.direction == "load" else SHORT[layout], "").split()
        return dict(zip((c.name for c in self.geometry.spec.components), sums, strict=False))


_PAIRING = "Lists in an order of their own: entry i of one goes to entry i of the other."
_WAY_BACK = "The way back: every component has to be carried, or the page stays poison."

REPORTED: dict[str, tuple[Reported, ...]] = {
    "mha": (
        Reported(
            Geometry("B13", presets.mha(2, 2, 16, BF16, 4), (), 8, 10, layouts=tuple(SHORT), threads=("FlexKV#186",)),
            (
                Case("pairing", "backup", (7, 2, 5), (1, 6, 3), _PAIRING),
                Case("pairing-one-side", "backup", (4, 5, 6), (9, 3, 4), "Runs join on one side only."),
                Case("pairing", "load", (7, 2, 5), (1, 6, 3), _PAIRING),
            ),
            {
                "pairing": {
                    "lf": "35e278fd 138d677f",
                    "pf": "6a9f3caa 03d83a62",
                    "pfd": "dada6bbb 972c3f8d",
                    "ph": "6e1a2177 5b3dceae",
                    "load": "46e6d52b b4e5f567",
                },
                "pairing-one-side": {
                    "lf": "03bb54e5 6751afc1",
                    "pf": "6686d011 3634cabe",
                    "pfd": "e84c1b02 db047046",
                    "ph": "6fa7af04 2cedd41d",
                },
            },
        ),
        Reported(
            Geometry("B14", presets.mha(2, 2, 16, BF16, 16), (), 8, 8, layouts=LF_PF_PFD, threads=("vllm#28951",)),
            (
                Case(
                    "pages-of-16", "load", (5, 6, 7), (1, 2, 3), "A device that already holds the first page keeps it."
                ),
            ),
            {"pages-of-16": {"load": "a5e4a6a9 d1696b56"}},
        ),
        Reported(
            Geometry("B14-64", presets.mha(2, 2, 16, BF16, 64), (), 2, 2, layouts=LF_PF_PFD, threads=("vllm#28951",)),
            (
                Case(
                    "part-of-a-page",
                    "load",
                    tuple(range(80, 128)),
                    tuple(range(16, 64)),
                    "Skipping the part of a page that the device already holds: refused where whole pages move.",
                    "indices",
                    result="must-refuse",
                    reason="partial page",
                ),
            ),
        ),
        Reported(
            Geometry(
                "B16", presets.mha(3, 4, 16, BF16, 4), (), 3, 3, layouts=("page_head",), threads=("sglang#11615",)
            ),
            (Case("heads-outside", "backup", (1, 2), (2, 1), "Heads lie outside tokens and layers inside a page."),),
            {"heads-outside": {"ph": "cb553f3a 54bf3587"}},
        ),
        Reported(
            Geometry(
                "B19",
                presets.mha(2, 2, 64, BYTE, 8),
                (),
                4,
                4,
                layouts=tuple(SHORT),
                threads=("kvcached#387", "kvcached#388"),
            ),
            (Case("fp8-bytes", "backup", (1, 2), (3, 0), "FP8 rows are bytes: a copy by value loses NaNs."),),
            {
                "fp8-bytes": {
                    "lf": "39e78d37 5ae1369f",
                    "pf": "02a9f740 18a0077d",
                    "pfd": "818ffcfa 6e442431",
                    "ph": "7d3e7df8 bacf3f82",
                }
            },
        ),
    ),
    "mla": (
        Reported(
            Geometry("B04-rows", presets.mla(2, 288, BF16, 64), (), 4, 4, layouts=LF_PF_PFD, threads=("sglang#17085",)),
            (Case("mirrored", "backup", (1,), (3,), _WAY_BACK), Case("mirrored", "load", (1,), (3,), _WAY_BACK)),
            {"mirrored": {"lf": "4b5bb53a", "pf": "1bbe0c5f", "pfd": "44e8fafa"}},
        ),
        Reported(
            Geometry("B18-target", presets.mla(4, 32, BF16, 16), (), 9, 8, layouts=LF_PF, threads=("sglang#27953",)),
            (Case("target-page", "backup", (8,), (7,), "The target's pool, whose indices the draft shares."),),
            {"target-page": {"lf": "aff612c5", "pf": "6373f298"}},
        ),
        Reported(
            Geometry("B18-draft", presets.mla(1, 32, BF16, 16), (), 9, 8, (4,), LF_PF, ("sglang#27953",)),
            (Case("draft-page", "backup", (8,), (7,), "The draft's pool is as long as the indices it shares."),),
            {"draft-page": {"lf": "efb8e10e", "pf": "efb8e10e"}},
        ),
        Reported(
            Geometry(
                "B18-packed", presets.mla(4, 32, BF16, 16, drafts=1), (), 9, 8, layouts=LF_PF, threads=("sglang#27953",)
            ),
            (
                Case("packed-page", "backup", (8,), (7,), "Target and draft in one pool, the draft's layer last."),
                Case("draft-layer", "load", (8,), (7,), "The draft's layer comes back too.", layers=(4,)),
            ),
            {"packed-page": {"lf": "4de335dc", "pf": "5a1f744a"}},
        ),
    ),
    "dsa": (
        Reported(
            Geometry("B04-index", presets.dsa_indexer(2), (), 4, 4, (2,), LF_PF_PFD, ("sglang#17085",)),
            (Case("mirrored", "backup", (1,), (3,), _WAY_BACK), Case("mirrored", "load", (1,), (3,), _WAY_BACK)),
            {"mirrored": {"lf": "78fd2fb9", "pf": "878077b5", "pfd": "878077b5"}},
        ),
        Reported(
            Geometry("B05", presets.dsa_indexer(2), (), 8, 8, (2,), LF_PF, ("sglang#31218", "TensorRT-LLM#13124")),
            (
                Case("row-of-a-page", "backup", (2,), (5,), "Rows are pages here: token 320 is row 5."),
                Case("one-entry", "backup_entries", (2 * 64 + 7,), (5 * 64 + 7,), "A key and its scale.", "entries"),
                Case(
                    "not-whole-pages",
                    "backup",
                    tuple(range(128, 191)),
                    tuple(range(320, 383)),
                    "No multiple of the page size: an error, and nothing is written.",
                    "indices",
                    result="must-refuse",
                    reason="partial page",
                ),
            ),
            {"row-of-a-page": {"lf": "8ca085a4", "pf": "b13fa6f0"}},
        ),
        Reported(
            Geometry("B05-tokens", presets.dsa_indexer(2, page_size=1), (), 8, 8, (2,), LF_PF, ("sglang#31218",)),
            (Case("row-of-a-token", "backup", (2, 3), (5, 6), "With pages of one token a row is a token."),),
        ),
    ),
    "v4_paged": (
        Reported(
            Geometry("B27-rows", presets.v4_paged("c128", 3, 1728), (), 6, 6, (6,), LF_PF, ("sglang#25889",)),
            (
                Case("whole-rows", "backup", (2, 4), (5, 0), "Rows of 1728 B, no multiple of 128, padding included."),
                Case(
                    "two-rows-of-entries",
                    "backup_entries",
                    (4, 5, 8, 9),
                    (10, 11, 0, 1),
                    "The padding stays.",
                    "entries",
                ),
            ),
            {"whole-rows": {"lf": "11798744", "pf": "b3770278"}},
        ),
    ),
    "v4_state": (
        Reported(
            Geometry("B27-states", presets.v4_state("c4_state", 2, 8, 512), (), 4, 4, (7,), LF_PF, ("sglang#27294",)),
            (
                Case("window-page", "backup", (1,), (2,), "One ring for each page of the window."),
                Case(
                    "a-token-short",
                    "backup",
                    tuple(range(256, 511)),
                    tuple(range(512, 767)),
                    "255 tokens are no page of 256.",
                    "indices",
                    result="must-refuse",
                    reason="partial page",
                ),
            ),
            {"window-page": {"lf": "ac844b10", "pf": "66fe3dc2"}},
        ),
    ),
}
