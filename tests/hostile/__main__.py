"""`python -m tests.hostile --seconds 600 --seed 7`: bad input for as long as asked; every fault is printed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.hostile.campaign import cases, tried


def main() -> int:
    """Run the campaign; 1 where any case has a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile", description="bad input for every command", allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=600, help="how long to go on (default 600)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case (default 0)")
    parser.add_argument("--only", help="cases of this kind only")
    parser.add_argument("--case", type=int, help="this case alone")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    counts: Counter[str] = Counter()
    faulty = 0
    for number, maker in cases(options.seed, options.only):
        if options.case is not None and number < options.case:
            continue
        if time.monotonic() > end:
            break
        case, faults = tried(number, maker)
        counts[maker.__name__] += 1
        faulty += bool(faults)
        for fault in faults:
            print(
                f"case {number} ({maker.__name__}) {case.words} {dict(case.environment)}\n  {fault}",
                file=sys.stderr,
            )
        if options.case is not None:
            break
    print(f"{sum(counts.values())} cases, {faulty} with faults: {dict(counts)}")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
