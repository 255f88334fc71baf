"""What a check is, and the list of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from verify.conformance.rig import Rig

Check = Callable[[Rig], None]
CHECKS: list[Check] = []
Function = TypeVar("Function", bound=Check)


def check(*needs: str, races: bool = True) -> Callable[[Function], Function]:
    """Of stacks that have something of each kind ("states", "recurrent", "windows"); "device": not on a CPU.

    races  whether it depends on the order in which a device works: then it is worth another try
    """

    def listed(function: Function) -> Function:
        function.needs, function.races = needs, races  # type: ignore[attr-defined]
        CHECKS.append(function)
        return function

    return listed
