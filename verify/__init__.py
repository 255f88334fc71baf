"""The verification suite: matrix, proofs, mutants, benchmark. `python -m verify --help` lists the commands."""

import os

# OpenMP threads spin while they wait, and on a busy machine take the cores from the threads that they wait for (copies
# were seen to take twenty times as long). The runtime reads this when it is first loaded, so it is set before torch is.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
