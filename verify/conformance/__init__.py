"""What a controller of host pools must keep to, as checks that anybody can run against his own.

    from verify.conformance import CHECKS, Rig, fits

    for check in CHECKS:
        for seed in range(5):
            if fits(check, "mamba", "emulated"):
                with Rig(MyController, "mamba", "emulated", "kernel", seed=seed) as rig:
                    check(rig)

`MyController(stack, hooks, write_fence, load_fence, runtime)` has the methods of `refimpl.controller.Controller` and
submits its work through the runtime, so that hooks are reached. `rig.py` is the stack that is worked on, `checks/` are
the checks, `faults.py` are controllers with a fault each, to show that the checks find it.

On a GPU set CUDA_DEVICE_MAX_CONNECTIONS=32 before it is used: with fewer queues than streams, work waits for streams
that are held and have nothing to do with it.
"""

from verify.conformance.checks import CHECKS
from verify.conformance.rig import KINDS, Rig, fits

__all__ = ["CHECKS", "KINDS", "Rig", "fits"]
