"""Wall time and peak memory of public kernels, if clones of their repositories are available.

The environment variable NKW_FOREIGN names the folder with the clones, as for `tests/foreign/runner.py`. The table of
that runner says how each kernel is called and what it is compared with. Each kernel runs in its own process. Both
figures include the start of its interpreter, its imports and its reference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.speed.measure import Row
from tests.foreign import runner

KERNELS = 20
SECONDS, MEBIBYTES = 10.0, 2048
"""What a kernel of the table may take on a laptop."""

_MEASURED = """
import json, resource, sys, time
from pathlib import Path
from tests.foreign.runner import Row, run
order = json.load(sys.stdin)
start = time.perf_counter()
outcome = run(Row(**order["row"]), Path(order["folder"]))
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([outcome.status, time.perf_counter() - start, peak]))
"""


def rows() -> Iterator[Row]:
    """Yield a row for each of up to KERNELS kernels, spread evenly over the table.

    Nothing if NKW_FOREIGN is not set.
    """
    folder = os.environ.get("NKW_FOREIGN")
    if not folder:
        return
    table = [row for row in runner.rows(runner.HERE / "table.toml") if not row.explained]
    table = [row for row in table if (Path(folder) / row.clone / row.file).is_file()]
    for index in range(min(KERNELS, len(table))):
        yield _measured(table[index * len(table) // min(KERNELS, len(table))], folder)


def _measured(row: runner.Row, folder: str) -> Row:
    """Run a kernel in its own process and return its row: time, outcome, peak memory, whether limits were kept."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED],
        input=json.dumps({"row": row.__dict__, "folder": str(Path(folder).resolve())}),
        capture_output=True,
        text=True,
        cwd=runner.ROOT,
        check=True,
    )
    status, taken, peak = json.loads(done.stdout.splitlines()[-1])
    mebibytes = peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    within = taken <= SECONDS and mebibytes <= MEBIBYTES
    verdict = "within" if within else "beyond"
    limits = f"{verdict} {SECONDS:.0f} s and {MEBIBYTES} MiB"
    return Row(f"foreign: {row.label}", f"{status}, peak memory {mebibytes:.0f} MiB, {limits}", taken, "s")
