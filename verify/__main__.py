"""python -m verify run | report | mutants | adapter | check-report."""

import sys

from verify.cli import main

sys.exit(main())
