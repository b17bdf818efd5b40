"""Attention without causal mask that reuses keys and values of the text before a block of masked tokens.

A pass over a whole text stores the keys and values of all positions. A later pass computes the rows from a block on,
and reads the stored keys and values of the positions before it (`StepShape.prefix`). These are those of the last whole
pass, in which the block was still masked: without a causal mask they would change with every token of the block. So
reuse is an approximation, the prefix cache of Fast-dLLM; a whole pass at the start of every block bounds its age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic
from model.layers.attention import Attention
from model.layers.layer import States


@dataclass(frozen=True)
class BlockCachedAttention(Attention):
    """Attention layer whose tokens see all positions, and which keeps its keys and values between passes."""

    @property
    def _has_cache(self) -> bool:
        return True

    def _append_to_cache(
        self, new: Sequence[np.ndarray], states: States, numpy: Arithmetic
    ) -> Sequence[np.ndarray]:
        """Return all keys and values, [heads, positions, head_dim] each: those in `states`, then `new`.

        Without entries of this layer `states` receives `new`. Otherwise `states` stays unchanged, as the next pass
        computes the same positions anew.
        """
        names = [f"{self.name}.{name}" for name in ("keys", "values")]
        if names[0] in states:
            return [np.concatenate([states[name], array], axis=1) for name, array in zip(names, new)]
        states.update(zip(names, new))
        return new
