"""`nki.meta`: the module that has `nki.tensor` since 0.2. Only its name is documented; `tensor` annotates a shape."""

from __future__ import annotations

from simulate.nki.typing import tensor

__all__ = ["tensor"]
