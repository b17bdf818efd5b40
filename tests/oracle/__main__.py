"""`python -m tests.oracle --instructions 1000000 --seed 7`: as many random instructions as asked for."""

from __future__ import annotations

import argparse
import sys

from tests.oracle.instructions import INSTRUCTIONS
from tests.oracle.lockstep import TARGETS, Difference, run


def main() -> int:
    """Run the lockstep; 1 at the first difference, which is printed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.oracle", description="simulator and oracle in lockstep", allow_abbrev=False
    )
    parser.add_argument(
        "--instructions", type=int, default=20_000, help="how many to compare (default 20000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the streams (default 0)")
    parser.add_argument(
        "--target", choices=TARGETS, action="append", help="a target; several are taken in turn"
    )
    parser.add_argument(
        "--only", choices=sorted(INSTRUCTIONS), action="append", help="draw these instructions only"
    )
    options = parser.parse_args()
    try:
        only = frozenset(options.only) if options.only else None
        tally = run(options.instructions, options.seed, tuple(options.target or TARGETS), only=only)
    except (Difference, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for name in sorted(tally.compared | tally.refused):
        print(f"{name:26} {tally.compared[name]:8} compared {tally.refused[name]:6} refused by both")
    print(f"{tally.instructions} instructions agree (and {tally.fills} fills of operands)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
