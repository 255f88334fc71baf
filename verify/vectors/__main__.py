"""python -m verify.vectors writes data/vectors anew."""

import sys

from verify.vectors.check import main

sys.exit(main())
