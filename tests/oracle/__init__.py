"""The second opinion: every instruction once more, plainly and slowly, and a runner that compares the two.

Nothing here but `lockstep` and `draw` knows the simulator. The instructions are written from NKI's documentation:
element values are computed in float64 and rounded once per documented float32 step, memory is bytes behind lists of
byte addresses, formats are sign, exponent and mantissa.

Where the documentation is silent, the decision that the simulator's own instruction page states is taken over, so
that it is tested too: NaN becomes the integer 0, an overflow of float8_e4m3fn NaN, integers wrap, maximum and minimum
pass NaN on, accumulators belong to the rows of an operand (row i to register i) and take float32 values before the
cast to dst.
"""
