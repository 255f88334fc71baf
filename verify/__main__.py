"""python -m verify COMMAND; `--help` lists the commands."""

import os
import signal
import sys

from verify.cli import main
from verify.score import PACKAGES


def run() -> int:
    """A command; what its surroundings lack is told without a traceback."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # here, where it can still be answered
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE
    except ImportError as error:
        if not error.name or error.name.partition(".")[0] in PACKAGES:
            raise
        print(f"python -m verify: {error}; `make run` makes .venv, and .venv/bin/python has it", file=sys.stderr)
        return 2


sys.exit(run())
