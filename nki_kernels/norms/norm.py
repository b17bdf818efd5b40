"""The norm of a kernel's rows as its arguments give it, and the steps that every layout shares."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl


@dataclass
class Norm(nl.NKIObject):
    """A norm of rows of H elements: RMSNorm, LayerNorm with a bias, none without a weight.

    weight, bias: [1, H] @ HBM, or None. offset: number that is added to the weight. eps: number that is added to the
    mean of the squares.
    """

    weight: nl.NkiTensor | None
    bias: nl.NkiTensor | None
    offset: float
    eps: float

    def check(self, hidden):
        """Refuse a weight or a bias of another length than the rows, and a bias without a weight."""
        assert self.bias is None or self.weight is not None, "norm_bias is given without norm_weight"
        for name, row in (("norm_weight", self.weight), ("norm_bias", self.bias)):
            assert row is None or row.shape == (1, hidden), f"{name} is [1, {hidden}], not {row.shape}"


def rms_norm_or_none(weight, eps):
    """Return the RMSNorm of a weight as a record, or None for None."""
    return None if weight is None else Norm(weight, None, 0.0, eps)


def inverse_root(squares, scale, eps, roots=None):
    """Return 1 / sqrt(squares * scale + eps) in `roots`, or in a new float32 tile of the same shape.

    eps: column of as many rows as `squares` has, or more.
    """
    if roots is None:
        roots = nl.ndarray(squares.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=roots, op=nl.rsqrt, data=squares, scale=scale, bias=eps[0 : squares.shape[0], :])
    return roots
