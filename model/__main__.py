"""`python -m model`: the command `nkw`."""

import sys

from nkw.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
