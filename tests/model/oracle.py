"""Models of transformers as an oracle: their logits without rounding, and what rounding costs transformers itself.

A model of transformers in float64 is none: frequencies and angles of rotations, softmax and RMSNorms are float32 in a
model of any dtype. Where a model amplifies, what these roundings change exceeds what float32 costs besides by an order
of magnitude, and both its models share them. So the oracle computes in float64 what transformers asks float32 for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

_CONFIGS = {name: f"{name}TextConfig" for name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")}
_CLASSES = {"GPT2": "GPT2LMHeadModel"}


def random_model(family: str, fields: dict[str, Any], seed: int) -> Any:
    """Return a float32 model of transformers whose random weights are far from initial zeros and ones."""
    import torch
    import transformers

    config = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))(
        **fields, attn_implementation="eager", experts_implementation="eager"
    )
    torch.manual_seed(seed)
    model = getattr(transformers, _CLASSES.get(family, f"{family}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 1.5 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.5
            center = float(parameter.mean()) if parameter.ndim == 1 else 0.0
            center -= 4.0 * name.endswith("linear_attn.A_log")  # so that states are not forgotten at once
            parameter.copy_(center + spread * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape))
    return model


ORDERS = 8
"""In how many orders transformers adds up, to see what its sums cost."""


@dataclass(frozen=True, eq=False)
class Oracle:
    """The logits of a model after each prefix of `ids` from `prompt` tokens on, and what dtypes cost it."""

    model: Any
    ids: Sequence[int]
    prompt: int

    @cached_property
    def logits(self) -> np.ndarray:
        """Float64 [prefixes, vocabulary], each prefix computed from its first token on."""
        prefixes = range(self.prompt, len(self.ids) + 1)
        with _exact(self.model) as model:
            return np.stack([_logits(model, self.ids[:end])[-1] for end in prefixes])

    @cached_property
    def logits_after_each_token(self) -> np.ndarray:
        """Float64 [tokens, vocabulary], all computed at once."""
        with _exact(self.model) as model:
            return _logits(model, self.ids)

    @lru_cache(maxsize=2)  # noqa: B019 - an oracle lives as long as its bounds
    def bound(self, dtype: str = "float32") -> float:
        """Return twice the largest error of a dtype in transformers, over all tokens and several orders of sums.

        Where scores amplify, one error of a token is a number of any size between nothing and its spread, so that the
        ratio of two programs' errors has no bound. The largest of many such errors is one of their spread.
        """
        import torch

        worst = 0.0
        for order in range(ORDERS):
            other = type(self.model)(self.model.config).eval()
            other.load_state_dict(reordered(self.model.state_dict(), order))
            rows = _logits(other.to(getattr(torch, dtype)), self.ids)
            worst = max(worst, float(np.abs(rows - self.logits_after_each_token).max()))
        return 2 * worst


def _logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Return the logits after each token, in float64."""
    import torch

    with torch.no_grad():
        rows: np.ndarray = model(torch.tensor([ids])).logits[0].double().numpy()
    return rows


_ROWS = (
    "o_proj out_proj down_proj fc2 conv1 norm norm_f layernorm ln_1 ln_2 ln_f per_layer_projection".split()
)
_COLUMNS = "embed_tokens lm_head wte wpe q_proj k_proj v_proj qkv_proj gate_proj up_proj gate_up_proj".split()
_COLUMNS += "embed_positions fc1 proj_out per_layer_input_gate per_layer_model_projection gate router".split()
_COLUMNS += "embeddings in_proj q_a_proj kv_a_proj_with_mqa".split()
_COLUMNS += "in_proj_qkvz in_proj_ba in_proj_qkv in_proj_z in_proj_b in_proj_a shared_expert_gate".split()
_OTHERS = "q_norm k_norm per_layer_projection_norm embed_tokens_per_layer".split()
_OTHERS += "conv1d x_proj dt_proj mixer linear_attn q_b_proj kv_b_proj q_a_layernorm kv_a_layernorm".split()
"""Tensors without an axis of hidden dimensions, beside numbers of a layer."""
_INNER_NORMS = (".mixer.norm.weight", ".linear_attn.norm.weight")
_TABLES = ("embed_tokens.weight", "wte.weight", "embeddings.weight")


def reordered(weights: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return weights of the same function with the hidden dimensions, and so the sums, in another order."""
    import torch

    def hidden_axis(name: str) -> int | None:
        """Return the axis of a tensor's hidden dimensions; of conv2, which has two, the first."""
        *_, module, leaf = name.split(".")
        if module in ("c_attn", "c_fc"):  # stored [in, out]
            return 0 if leaf == "weight" else None
        if module == "c_proj":
            return 1 if leaf == "weight" else 0
        if module == "experts":  # stacked: [experts, out, in], those of gpt-oss [experts, in, out]
            first = 1 if f"{name}_bias" in weights else 2
            return {"gate_up_proj": first, "down_proj": 3 - first, "down_proj_bias": 1}.get(leaf)
        if leaf in ("sinks", "e_score_correction_bias", "expert_bias"):
            return None
        if module in _OTHERS or name.endswith(_INNER_NORMS) or leaf == "layer_scalar":
            return None
        if module in _COLUMNS:
            return 1 if leaf == "weight" else None
        assert module.rpartition("_")[2] in _ROWS or module in (*_ROWS, "conv2"), name
        return 0

    table = next(weight for name, weight in weights.items() if name.endswith(_TABLES))
    order = torch.randperm(table.shape[1], generator=torch.Generator().manual_seed(seed))
    axes = {name: hidden_axis(name) for name in weights}
    changed = {
        name: weight if (axis := axes[name]) is None else weight.index_select(axis, order)
        for name, weight in weights.items()
    }
    return {
        name: weight.index_select(1, order) if name.endswith("conv2.weight") else weight
        for name, weight in changed.items()
    }


@contextmanager
def _exact(model: Any) -> Iterator[Any]:
    """Yield the same model with float64 wherever transformers asks for float32."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Widened(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            def wide(value: Any) -> Any:
                return torch.float64 if value is torch.float32 else value

            function = torch.Tensor.double if function is torch.Tensor.float else function
            return function(
                *map(wide, arguments), **{key: wide(argument) for key, argument in (named or {}).items()}
            )

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widened():
            other = type(model)(model.config).eval()
            other.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
            yield other
    finally:
        torch.set_default_dtype(before)
