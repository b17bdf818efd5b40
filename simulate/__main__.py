"""`python -m simulate`."""

import sys

from nkw.process import begin, imported, leave

if __name__ == "__main__":
    begin()
    from simulate.cli import main

    imported()
    try:
        sys.exit(main(isolates=True))
    except KeyboardInterrupt as stopped:
        leave(stopped)
