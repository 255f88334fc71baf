"""python -m verify run | report | mutants."""

import sys

from verify.cli import main

sys.exit(main())
