"""Prints rows of the table of documented arguments for a review, drawn with a fixed seed.

    python -m tests.contract.documented.draw [COUNT] [--seed SEED]

`free` rows come first, then rows that only rules about types hold.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from tests.contract.documented.table import Row, expand, read_table

SEED = 31
_OF_TYPES = expand(("NKW-DTYPE", "NKW-FLAG", "NKW-NAME-TEXT", "NKW-ENUM", "number"))


def draw_rows(count: int, seed: int = SEED) -> list[Row]:
    """Return `count` rows: `free` rows first, then rows with rules about types only; fewer if there are no more."""
    rows = [row for row in read_table()[1] if row.argument != "name"]
    free = [row for row in rows if row.free]
    typed = [row for row in rows if not row.free and row.codes <= _OF_TYPES]
    source = random.Random(seed)
    drawn = source.sample(free, min(count, len(free)))
    return drawn + source.sample(typed, min(count - len(drawn), len(typed)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the drawn rows with their sentences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("count", type=int, nargs="?", default=40)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(arguments)
    for number, row in enumerate(draw_rows(options.count, options.seed), 1):
        held_by = f"free: {row.free}" if row.free else ", ".join(row.rules)
        print(f"{number}. nki.{row.module}.{row.instruction}({row.argument}) — {held_by}")
        for sentence in row.documented:
            print(f"   {sentence}")


if __name__ == "__main__":
    main()
