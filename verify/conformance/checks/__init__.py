"""The checks, a module for each subject.

Each gets a `Rig` that was entered, and raises `AssertionError` saying what is wrong.
B numbers are those of `test_reported_faults.py`.
"""

from verify.conformance.checks import (
    acknowledgements,
    failures,
    layers,
    lifetimes,
    lists,
    order,
    queueing,
    trees,
)
from verify.conformance.checks.registry import CHECKS, Check

__all__ = [
    "CHECKS",
    "Check",
    "acknowledgements",
    "failures",
    "layers",
    "lifetimes",
    "lists",
    "order",
    "queueing",
    "trees",
]
