"""python -m verify.bench: measure the matrix, print it, write it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from verify.arguments import Parser, new_file
from verify.bench import measure, options, report, results
from verify.bench.provenance import command_line


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m verify.bench", description=__doc__)
    options.add(parser)
    parser.add_argument("--out", type=new_file, metavar="FILE.json", help="write all samples to this file")
    args = parser.parse_args(argv)
    settings = options.settings(args, parser)
    rows = list(tqdm(measure.rows(settings), total=measure.count_rows(settings), unit="row", file=sys.stderr))
    content = results.as_json(settings, rows, command_line("verify.bench"))
    print(report.as_text(report.matrix(content)), *report.verdicts(content), sep="\n")
    if args.out:
        results.write(args.out, content)
    return int(report.counts(content)["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
