"""Command-line options of the benchmark, shared by `python -m verify.bench` and `python -m verify run`."""

from __future__ import annotations

import argparse
from dataclasses import replace

import psutil

from refimpl import LAYOUTS, presets
from refimpl.devices import absent
from refimpl.support import BACKENDS
from verify.arguments import listed, nbytes, one_of, positive, seconds, seed
from verify.bench.measure import Settings, memory_needed

DEFAULT_MODELS = ("llama-3.1-8b", "deepseek-v3", "deepseek-v4-flash", "qwen3-next")


def add(parser: argparse.ArgumentParser) -> None:
    """Options that `settings` reads. Their values are checked by argparse: one line on stderr, exit code 2."""
    models = one_of("model", presets.MODELS)
    parser.add_argument(
        "--model", type=models, metavar="M,M", help=f"of {listed(presets.MODELS)}; default: {listed(DEFAULT_MODELS)}"
    )
    parser.add_argument("--page-size", type=positive, metavar="N", help="tokens a page, if not as the presets have it")
    parser.add_argument(
        "--pages", type=positive, metavar="N", help="pages that move in every pool; overrides --payload"
    )
    parser.add_argument(
        "--payload",
        type=nbytes,
        metavar="SIZE",
        help="bytes that move, in whole pages; 16MiB (256MiB on a GPU) if not given",
    )
    parser.add_argument(
        "--layouts", type=one_of("layout", LAYOUTS), default=LAYOUTS, metavar="L,L", help=listed(LAYOUTS)
    )
    backends = tuple(backend for backend, platforms in BACKENDS.items() if "cpu" in platforms)
    parser.add_argument(
        "--backends", type=one_of("backend", backends), default=backends, metavar="B,B", help=listed(backends)
    )
    parser.add_argument(
        "--seconds", type=seconds, default=0.3, help="time for the samples of a row (default: %(default)s)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of page choice and fill (default: %(default)s)")


def settings(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Settings:
    """What was asked for. Ends the program like any other mistake in the arguments if it cannot fit into memory."""
    models = args.model or DEFAULT_MODELS
    asked = Settings(
        models,
        args.layouts,
        args.backends,
        args.pages,
        args.payload or Settings.payload_bytes,
        seconds=args.seconds,
        seed=args.seed,
        page_size=args.page_size,
    )
    try:
        needed = memory_needed(asked)
    except ValueError as error:  # the model has pages of another size only
        parser.error(str(error))
    fewer = "fewer --pages" if asked.pages else "a smaller --payload"
    require_memory(parser, needed, f"ask for {fewer}", memory_needed(replace(asked, pages=1)), "--page-size")
    return asked


def require_memory(
    parser: argparse.ArgumentParser, needed: int, way_out: str, of_a_page: int = 0, page_size: str = ""
) -> None:
    """Ends the program where so many bytes are not to be had; `page_size` is the option for pages that are too big."""
    free = psutil.virtual_memory().available
    if of_a_page > free:
        way_out = f"ask for a smaller {page_size}"
    if needed > free:
        parser.error(f"this needs {needed / 1e9:,.1f} GB of memory, {free / 1e9:,.1f} GB are free: {way_out}")


def require_platform(parser: argparse.ArgumentParser, platform: str) -> None:
    """Ends the program where a GPU is asked for and there is none."""
    if why := absent(platform):
        parser.error(f"{why}: --platform emulated does without")
