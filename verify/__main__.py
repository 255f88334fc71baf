"""python -m verify COMMAND; `--help` lists the commands."""

import sys

from verify.cli import main

sys.exit(main())
