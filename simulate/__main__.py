"""`python -m simulate`."""

import contextlib
import os
import sys

from simulate.cli import main

try:
    sys.exit(main())
except KeyboardInterrupt as interrupt:
    with contextlib.suppress(OSError):
        print("\n" + ": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        sys.stdout.flush()
    os._exit(130)  # at once: threads of simulated cores may wait for each other, and a plain exit joins them
