"""Speed of the simulator and of models on it, as ratios to named references measured in the same run.

`python -m benchmarks.speed` runs all of it.
"""
