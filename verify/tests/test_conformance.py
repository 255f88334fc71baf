"""The controller keeps to every check, on every platform and in many orders; and every check finds its faults."""

from __future__ import annotations

import re
from typing import Any

import pytest

from refimpl.controller import Controller
from verify.conformance import CHECKS, Rig, fits
from verify.conformance.checks import Check
from verify.conformance.faults import FAULTS, Fault

pytestmark = pytest.mark.ordering

STACKS = ("mha", "dsa", "mamba", "swa-mamba", "v4", "six-states")

# Platform, backend, layout -> stacks. Together every backend meets every feature; kernels on a CPU take their time.
WAYS = {
    ("cpu", "torch", "layer_first"): STACKS,
    ("cpu", "numba", "page_first"): ("mha", "swa-mamba"),
    ("emulated", "direct", "page_first_direct"): STACKS,
    ("emulated", "kernel", "page_first"): STACKS,
    ("emulated", "staged", "page_first"): ("mha", "mamba", "v4"),
    ("emulated", "staged", "page_first_direct"): ("swa-mamba", "six-states"),
    ("emulated", "auto", "page_first"): ("mamba",),
    ("cuda", "direct", "page_first_direct"): STACKS,
    ("cuda", "kernel", "page_first"): STACKS,
    ("cuda", "staged", "page_first"): ("mha", "mamba", "v4"),
    ("cuda", "staged", "page_first_direct"): ("swa-mamba", "six-states"),
    ("cuda", "auto", "page_first"): ("mamba", "v4"),
}
Way = tuple[str, str, str]

# Orders tried: of correct controllers, all pass; of a fault, one is enough.
SEEDS = {"cpu": 1, "emulated": 2, "cuda": 2}
TRIES = 6


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")


def case(check: Check, kind: str, way: Way) -> Any:
    mark = {"emulated": [pytest.mark.emulated], "cuda": [pytest.mark.gpu]}.get(way[0], [])
    return pytest.param(check, kind, way, id="-".join((name_of(check), kind, *way)), marks=mark)


CASES = [
    case(check, kind, way)
    for way, kinds in WAYS.items()
    for kind in kinds
    for check in CHECKS
    if fits(check, kind, way[0])
]


@pytest.mark.parametrize(("check", "kind", "way"), CASES)
def test_the_controller_passes(check: Check, kind: str, way: Way) -> None:
    for seed in range(SEEDS[way[0]] if getattr(check, "races", True) else 1):
        with Rig(Controller, kind, *way, seed=seed) as rig:
            check(rig)


PAIRS = [
    pytest.param(fault, check, way, id=f"{fault.make.__name__}-{name_of(check)}-{fault.kind}-{way[1]}-{way[2]}")
    for fault in FAULTS
    for check in fault.checks
    for way in WAYS
    if way[0] == "emulated" and fault.shows_with(*way[1:]) and fits(check, fault.kind, way[0])
]


@pytest.mark.emulated
@pytest.mark.parametrize(("fault", "check", "way"), PAIRS)
def test_a_check_finds_a_fault(fault: Fault, check: Check, way: Way) -> None:
    said = set[str]()
    for seed in range(TRIES):
        said.add(finding(fault, check, way, seed))
        if any(re.search(fault.says, each, re.DOTALL) for each in said):
            return
    pytest.fail(f"of {fault.make.__name__} {check.__name__} is to say {fault.says!r}, it says {said}")


def finding(fault: Fault, check: Check, way: Way, seed: int) -> str:
    """What is said of a controller with a fault; nothing if it passes."""
    try:
        with Rig(fault.make, fault.kind, *way, seed=seed) as rig:
            check(rig)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_stack_that_there_is_none_of_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no stack 'gpt'; there are mha, mha-draft, mla, dsa"):
        Rig(Controller, "gpt")


def test_every_check_finds_some_fault() -> None:
    assert set(CHECKS) == {check for fault in FAULTS for check in fault.checks}
