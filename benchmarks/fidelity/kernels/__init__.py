"""Kernels in plain NKI that are run in the place of published ones.

They do what the published descriptions say, without further optimisation. Inputs and results are in HBM, unless a
docstring says otherwise. `mode` is the name of a `nki.isa.dge_mode`: what writes the descriptors of the DMAs.
"""

import simulate

simulate.install("simulate")
