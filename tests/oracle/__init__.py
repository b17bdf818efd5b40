"""The oracle: a second, plain and slow implementation of every instruction, and a runner that compares both.

Only `lockstep` and `streams` import the simulator. The instructions are written from NKI's documentation: element
values are computed in float64 and rounded once per documented float32 step. Memory is bytes behind lists of byte
addresses. Formats are sign, exponent and mantissa.

Where the documentation is silent, the oracle takes over the decision that the simulator's instruction page states, so
that the decision is tested too. NaN becomes the integer 0, an overflow of float8_e4m3fn NaN; integers wrap; maximum and
minimum propagate NaN. Accumulators belong to the rows of an operand (row i to register i) and take float32 values
before the cast to dst.
"""
