"""Speed of the simulator, as ratios against named references in one run: `python -m benchmarks.speed`."""
