"""Logits of a tiny Llama of transformers without causal mask, stored for tests.

`python -m tests.model.llada_oracle` writes `llada_oracle.npz` with transformers 5.20. Tests read this file where
transformers is not installed.

    whole     logits of all tokens of IDS, in float64
    reused    logits of the tokens from START on, of IDS with LATER tokens; the keys and values before START are those
              of a pass over IDS, which transformers keeps in a cache
    float32, bfloat16   for both, how far apart logits of a correct program may be with this dtype (`Oracle.bound`)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.model.folders import random_weights
from tests.model.oracle import Oracle

STORED = Path(__file__).with_suffix(".npz")
FIELDS: dict[str, Any] = dict(
    vocab_size=83,
    hidden_size=36,
    intermediate_size=50,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
"""Fields of the Llama."""
CONFIG: dict[str, Any] = dict(
    architectures=["LLaDAModelLM"],
    model_type="llada",
    vocab_size=83,
    d_model=36,
    mlp_hidden_size=50,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    max_sequence_length=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    mask_token_id=82,
)
"""Fields of the LLaDA with the same layers."""
MASK = 82
START = 5
IDS = [*np.random.default_rng(3).integers(3, MASK, START).tolist(), MASK, MASK, 17, MASK, MASK]
LATER = [*IDS[:START], 31, *IDS[START + 1 :]]


def draw_weights() -> dict[str, np.ndarray]:
    """Return the weights of the model under the names of a Llama."""
    return random_weights(FIELDS, 7)


def _build_model(fields: Mapping[str, Any], first_ids: list[int]) -> Any:
    """Return a Llama that sees all tokens; with `first_ids` it reuses their keys and values before START."""
    import torch
    import transformers

    class LlamaForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, ids: Any) -> Any:
            def see_all(rows: int, keys: int) -> Any:
                return torch.zeros(1, 1, rows, keys, dtype=self.lm_head.weight.dtype)

            length = ids.shape[1]
            if not first_ids:
                return super().forward(ids, attention_mask=see_all(length, length), use_cache=False)
            first = super().forward(
                torch.tensor([first_ids]), attention_mask=see_all(length, length), use_cache=True
            )
            first.past_key_values.crop(START - length)
            return super().forward(
                ids[:, START:],
                attention_mask=see_all(length - START, length),
                past_key_values=first.past_key_values,
                position_ids=torch.arange(START, length)[None],
            )

    model = LlamaForCausalLM(transformers.LlamaConfig(**fields, attn_implementation="eager")).eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in draw_weights().items()})
    return model


def record() -> dict[str, np.ndarray]:
    """Return the arrays of the file."""
    arrays: dict[str, np.ndarray] = {}
    bounds: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for name, first_ids, ids in (("whole", [], IDS), ("reused", IDS, LATER)):
        model = _build_model(FIELDS, first_ids)
        oracle = Oracle(model, ids, len(ids))
        arrays[name] = oracle.logits_after_each_token
        for dtype, sums in bounds.items():
            sums.append(oracle.bound(dtype))
    return arrays | {name: np.array(sums) for name, sums in bounds.items()}


if __name__ == "__main__":
    np.savez_compressed(STORED, **record())
