"""The norm of a kernel's rows as its arguments give it, and the steps that every layout shares.

The layouts of rows in SBUF are the other files of this package: `row_tiles`, `blocks`, `hidden_spans` and `runs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl


@dataclass
class Norm(nl.NKIObject):
    """A norm of rows of H elements: RMSNorm with a weight, LayerNorm with a weight and a bias.

    Without a weight rows are not normalised; a kernel passes such a Norm on if its rows arrive normalised.

    weight, bias: [1, H] @ HBM, or None. offset: number that is added to the weight. eps: number that is added to the
    mean of the squares.
    """

    weight: nl.NkiTensor | None
    bias: nl.NkiTensor | None
    offset: float
    eps: float

    def check(self, hidden):
        """Raise AssertionError unless weight and bias are [1, hidden] or None; a bias needs a weight."""
        assert self.bias is None or self.weight is not None, (
            "norm_bias is given without norm_weight: give both, or no bias"
        )
        for name, row in (("norm_weight", self.weight), ("norm_bias", self.bias)):
            assert row is None or row.shape == (1, hidden), f"{name} has to be [1, {hidden}], not {row.shape}"


def create_rms_norm(weight, eps):
    """Return an RMSNorm with a weight [1, H] @ HBM as a `Norm` without bias and offset; None for a weight of None."""
    return None if weight is None else Norm(weight, None, 0.0, eps)


def compute_inverse_root(squares, scale, eps, roots=None):
    """Write 1 / sqrt(squares * scale + eps) to `roots` and return it; by default to a new float32 tile in SBUF.

    Args:
        squares: tile [P, …] of any float dtype.
        scale: a number, such as 1 / H for sums over H elements.
        eps: a column [P or more, 1] float32 in SBUF.
    """
    if roots is None:
        roots = nl.ndarray(squares.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=roots, op=nl.rsqrt, data=squares, scale=scale, bias=eps[0 : squares.shape[0], :])
    return roots
