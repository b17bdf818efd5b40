"""`nki.experimental`: where the text on registers places `while_loop`, which 0.6 has in `nki.language` as well."""

from __future__ import annotations

from simulate.nki.loops import while_loop

__all__ = ["while_loop"]
