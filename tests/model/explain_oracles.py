"""Residuals and attention to the text in a pass of diffusers' denoisers with random weights, stored for tests.

`python -m tests.model.explain_oracles` writes `explain_oracles.npz` with diffusers 0.42.1. Attention weights are
computed again from the queries and keys that torch's `scaled_dot_product_attention` is given.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.model import flux_oracles, pipeline_oracles, sd3_oracles
from tests.model.pipeline_oracles import PROMPTS

STORED = Path(__file__).with_suffix(".npz")
PASS = 2
"""Number of the pass, from 1."""
CASES: dict[str, tuple[Any, str]] = {
    "pixart": (pipeline_oracles, "t5"),
    "flux": (flux_oracles, "schnell"),
    "sd3": (sd3_oracles, "sd3.5"),
}
"""Module of the pipeline's oracles and its case."""
QUANTITIES = ("norms", "shares", "positions", "weights", "rows")


class BlockCall:
    """Call of a block: its residuals [images, patches, hidden] before and after, and weights of its attentions."""

    def __init__(self, is_text_first: bool) -> None:
        self.is_text_first = is_text_first
        self.residuals: list[np.ndarray] = []
        self.attention: list[np.ndarray] = []

    def list_text_weights(self) -> np.ndarray:
        """Return the weights of the text's rows, averaged over patches: [images, heads, rows]."""
        patches = self.residuals[0].shape[1]
        (weights,) = [array for array in self.attention if array.shape[3] != patches]
        if weights.shape[2] != patches:  # joint attention
            text = weights.shape[2] - patches
            weights = weights[:, :, text:, :text] if self.is_text_first else weights[:, :, :patches, patches:]
        means: np.ndarray = weights.mean(axis=2)
        return means


@contextmanager
def observing_blocks(calls: list[BlockCall]) -> Iterator[None]:
    """Append a record for each call of a transformer block of diffusers within the context."""
    import torch
    from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
    from diffusers.models.transformers.transformer_flux import (
        FluxSingleTransformerBlock,
        FluxTransformerBlock,
    )

    functional = torch.nn.functional
    attend, current = functional.scaled_dot_product_attention, list[BlockCall]()

    def observe_attention(*arguments: Any, **options: Any) -> Any:
        if current:
            bound = dict(zip(("query", "key", "value", "attn_mask"), arguments)) | options
            assert not bound.get("is_causal") and bound.get("scale") is None
            scores = bound["query"] @ bound["key"].transpose(-1, -2) / bound["query"].shape[-1] ** 0.5
            mask = bound.get("attn_mask")
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            current[0].attention.append(weights.detach().numpy())
        return attend(*arguments, **options)

    def observe_block(forward: Callable[..., Any], is_text_first: bool) -> Callable[..., Any]:
        def observed(self: Any, hidden_states: Any, *arguments: Any, **options: Any) -> Any:
            current.append(BlockCall(is_text_first))
            outputs = forward(self, hidden_states, *arguments, **options)
            after = outputs[-1] if isinstance(outputs, tuple) else outputs
            current[0].residuals += [hidden_states.detach().numpy(), after.detach().numpy()]
            calls.append(current.pop())
            return outputs

        return observed

    classes = {
        BasicTransformerBlock: False,
        JointTransformerBlock: False,
        FluxTransformerBlock: True,
        FluxSingleTransformerBlock: True,
    }
    forwards = {block: block.forward for block in classes}
    functional.scaled_dot_product_attention = observe_attention
    try:
        for block, is_text_first in classes.items():
            block.forward = observe_block(forwards[block], is_text_first)
        yield
    finally:
        functional.scaled_dot_product_attention = attend
        for block, forward in forwards.items():
            block.forward = forward


def record(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Return what diffusers computes in the pass with the prompts, float32 or int64.

    Norms are [prompts, residuals], shares of the text [prompts, blocks], positions and weights of each head's strongest
    row of the text [prompts, blocks, heads], and weights of all rows [prompts, rows].
    """
    module, case_name = CASES[name]
    case, calls = module.CASES[case_name], list[BlockCall]()
    with observing_blocks(calls):
        module.record(case, module.write_pipeline(folder, case, module.list_shapes(case)))
    blocks = len(calls) // case.steps
    calls = calls[(PASS - 1) * blocks : PASS * blocks]
    residuals = [calls[0].residuals[0], *(call.residuals[1] for call in calls)]
    # The last images are those of the prompts, after those of the negative prompts.
    norms = [np.linalg.norm(array[-len(PROMPTS) :], axis=2).mean(axis=1) for array in residuals]
    weights = np.stack([call.list_text_weights()[-len(PROMPTS) :] for call in calls], axis=1)
    return {
        "norms": np.stack(norms, axis=1),
        "shares": weights.sum(axis=3).mean(axis=2),
        "positions": weights.argmax(axis=3),
        "weights": weights.max(axis=3),
        "rows": weights.mean(axis=(1, 2)),
    }


if __name__ == "__main__":
    recordings = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            recorded = record(name, Path(folder))
            recordings |= {f"{name} {quantity}": array for quantity, array in recorded.items()}
    np.savez_compressed(STORED, **recordings)
