"""`python -m verify COMMAND`: each command is a program of the module that it is about, imported when it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from verify.arguments import Parser

# Command -> module, its function of the arguments that follow, and what it is for.
COMMANDS = {
    "run": ("verify.run", "main", "execute the notebooks, measure, advise, and print the matrix"),
    "report": ("verify.report", "main", "write the support matrix as a page"),
    "compare": ("verify.bench.compare", "main", "two result files side by side: devices, or commits"),
    "mutants": ("verify.mutants", "main", "how strong the suite is: every built-in fault must be caught"),
    "adapter": ("verify.adapters.command", "adapter", "check an implementation against the golden vectors"),
    "check-report": ("verify.adapters.command", "check_report", "verify the report of an implementation"),
    "findings": ("verify.findings.command", "main", "what was found in other projects, worked out again"),
    "dictionary": ("verify.dictionary.tables", "main", "what other engines call the same bytes, and false friends"),
    "audit": ("verify.audit.costs", "main", "the paths that other engines' rules take, and what each costs"),
    "docs": ("verify.docs", "main", "write the computed parts of README.md anew"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where something was wrong, 2 for a mistake in the arguments, 130 after an interrupt."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["--adapter"], ["--report"]):
        argv = ["adapter", *argv]
    module, function, _ = COMMANDS[_parser().parse_args(argv[:1]).command]
    try:
        return getattr(import_module(module), function)(argv[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:14}{purpose}" for name, (_, _, purpose) in COMMANDS.items()]
    parser = Parser(
        prog="python -m verify",
        description="\n".join(["commands; each has its own --help:", *lines]),
        usage="python -m verify COMMAND [ARGUMENTS]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser
