"""The simulator under the name of the vendor's package, with one thing changed: what FAULT says.

It is made for tests of bundles, built into a wheel there, and installed in environments that a test makes. A launch
leaves a file `kernel.neff` in NKI_ARTIFACTS_DIR, as the vendor's package does; it holds the predicted time.
"""

import dataclasses
import functools
import json
import os
import signal
from pathlib import Path

import numpy as np

import simulate
import simulate.kernel
from simulate.isa.book import INSTRUCTIONS
from simulate.profile import profile

FAULT = json.loads((Path(__file__).parent / "fault.json").read_text())
"""instruction: the one that is changed; above: it is wrong for results larger than that, by a
factor of `times`; slower: it takes so many cycles more; refuse, crash, hang: the kernel that does not compile, or ends
the process, or never ends."""


def changed(planner):
    @functools.wraps(planner)
    def plan(*args, **kwargs):
        made = planner(*args, **kwargs)
        if "slower" in FAULT:
            cost = made.cost
            slower = dataclasses.replace(
                cost,
                interval_cycles=cost.interval_cycles + FAULT["slower"],
                latency_cycles=cost.latency_cycles + FAULT["slower"],
            )
            return dataclasses.replace(made, cost=slower)

        wrong = np.float32(FAULT.get("times", 1.25))

        def compute(*operands):
            right, *remaining = made.compute(*operands)
            return np.where(right > FAULT["above"], right * wrong, right), *remaining

        return dataclasses.replace(made, compute=compute)

    return plan


def launched(function, *args, **kwargs):
    if function.__name__ == FAULT.get("refuse"):
        raise RuntimeError("[NCC_TEST001] the compiler refuses this kernel")
    done = original(function, *args, **kwargs)
    folder = os.environ.get("NKI_ARTIFACTS_DIR")
    if folder:
        time_ns = profile(done.streams, done.hardware).length_ns
        Path(folder, "kernel.neff").write_text(json.dumps({"ns": time_ns}))
    if function.__name__ == FAULT.get("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    while function.__name__ == FAULT.get("hang"):
        signal.pause()
    return done


if "instruction" in FAULT:
    INSTRUCTIONS[FAULT["instruction"]] = changed(INSTRUCTIONS[FAULT["instruction"]])
original, simulate.kernel.launch = simulate.kernel.launch, launched
simulate.install("simulate")
