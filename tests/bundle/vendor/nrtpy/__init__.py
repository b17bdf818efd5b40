"""What is documented of nrtpy and used by run.py; anything else is refused (page "nrtpy model API", SDK 2.32).

The "NEFF" holds the time that a launch takes; three launches in four take a little longer.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np


class NrtpyTensor:
    @classmethod
    def from_numpy(cls, array, name=None, core_id=0):
        if not isinstance(array, np.ndarray):
            raise TypeError("from_numpy takes a numpy array")
        return cls()


class NrtpyModel:
    def __init__(self, time_ns):
        self._time_ns = time_ns
        self.input_tensors_info = {}

    @classmethod
    def load_from_neff(cls, neff_path, name=None, core_id=0, cc_enabled=False, rank_id=0, world_size=1):
        return cls(json.loads(Path(neff_path).read_text())["ns"])

    def benchmark(self, inputs, outputs=None, warmup_iter=5, benchmark_iter=5, mode="device"):
        if mode not in ("device", "host") or benchmark_iter < 1:
            raise ValueError("mode is device or host, benchmark_iter at least 1")
        if not all(isinstance(tensor, NrtpyTensor) for tensor in inputs.values()):
            raise TypeError("inputs are NrtpyTensors")
        times = [self._time_ns * (1 + 1e-3 * (number % 4)) / 1e6 for number in range(benchmark_iter)]
        return SimpleNamespace(durations_ms=times)
