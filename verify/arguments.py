"""What the programs of `verify` share in reading their arguments: mistakes are told in one line, with exit code 2."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NoReturn

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class Parser(argparse.ArgumentParser):
    """Mistakes are told without the usage before them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def one_of(what: str, known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A type for argparse: names, separated by commas, each of them known."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {what} {name!r}; there are {listed(known)}")
        return names

    return parse


def positive(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A time that has an end.

    >>> seconds("0"), seconds("1.5")
    (0.0, 1.5)
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, got {text!r}")
    return found


def seed(text: str) -> int:
    """What every generator of random numbers takes."""
    if not re.fullmatch(r"\d{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be an integer of at most 18 digits, 0 or more, got {text!r}")
    return int(text)


def folder(text: str) -> Path:
    """A folder to write to. It is made, so that nothing is worked out for nothing."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"nothing can be written to {text!r}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"nothing can be written to {text!r}: it is not yours to write to")
    return path


def new_file(text: str) -> Path:
    """A file to write to, new or not."""
    if why := why_not_written(Path(text)):
        raise argparse.ArgumentTypeError(f"nothing can be written to {text!r}: {why}")
    return Path(text)


def why_not_written(path: Path) -> str:
    """Why nothing can be written to a file, or nothing. Its folder is made, and tried."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(prefix=path.name, dir=path.parent):
            return "it is no file" if path.exists() and not path.is_file() else ""
    except OSError as error:
        return error.strerror or str(error)


def file(text: str) -> Path:
    """A file to read."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)


def nbytes(text: str) -> int:
    """A size in bytes. Units are known in any case.

    >>> [nbytes(text) for text in ("4096", "16KiB", "2 MB")]
    [4096, 16384, 2000000]
    """
    factors = {"": 1} | {unit.upper(): factor for unit, factor in UNITS.items()}
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    if not found or found[2].upper() not in factors or not int(found[1]):
        raise argparse.ArgumentTypeError(f"must be a size such as 16MiB, in bytes or {listed(UNITS)}, got {text!r}")
    return int(found[1]) * factors[found[2].upper()]
