"""`nki.meta`: the home of `nki.tensor` since 0.2. Nothing of it is documented but the name; it annotates a shape."""

from __future__ import annotations

from simulate.nki.typing import tensor

__all__ = ["tensor"]
