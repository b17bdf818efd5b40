"""`python -m simulate`."""

import sys

from nkw.process import begin, leave

if __name__ == "__main__":
    begin()
    from simulate.cli import main

    try:
        sys.exit(main(is_process=True))
    except KeyboardInterrupt as stopped:
        leave(stopped)
