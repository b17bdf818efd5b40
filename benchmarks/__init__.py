"""Benchmarks: `speed`, the simulator on this machine; `fidelity`, predicted against published times."""
