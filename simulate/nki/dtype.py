"""`nki.dtype`: the dtypes of `nki.language` under the module path that public code annotates with."""

from __future__ import annotations

from simulate.numerics import DTYPES, DType

globals().update(DTYPES)

__all__ = ["DType", *DTYPES]
