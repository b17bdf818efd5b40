"""The kernels that stand for published ones, in plain NKI: what their descriptions say, and nothing cleverer."""

import simulate

simulate.install("simulate")
