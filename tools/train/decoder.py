"""The decoder that is trained, a Llama or a Qwen3-MoE in torch, and its weights in a file with Hugging Face names."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tools.train.corpus import CONTEXT, IGNORE


@dataclass(frozen=True)
class Sizes:
    """Sizes in a config.json. `experts` is 0 for a Llama.

    Else each token chooses `chosen` experts of width `hidden`. Without `causal`, a token sees all tokens of its row.
    """

    width: int
    hidden: int
    head: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    eps: float
    theta: float
    experts: int = 0
    chosen: int = 0
    balance: float = 0.0
    causal: bool = True

    @classmethod
    def read(cls, folder: Path) -> "Sizes":
        """Return the sizes in a folder's config.json; `model_type` "qwen3_moe" has experts."""
        config = json.loads((folder / "config.json").read_text())
        sparse = config["model_type"] == "qwen3_moe"
        return cls(
            config["hidden_size"],
            config["moe_intermediate_size" if sparse else "intermediate_size"],
            config["head_dim"],
            *(config[f"num_{n}"] for n in ("attention_heads", "key_value_heads", "hidden_layers")),
            config["vocab_size"],
            config["rms_norm_eps"],
            config["rope_theta"],
            *(
                (config[n] for n in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef"))
                if sparse
                else ()
            ),
        )

    @property
    def sites(self) -> int:
        """Number of places where dropout applies: the embedding, and two in each layer."""
        return 1 + 2 * self.layers


class Attention(nn.Module):
    """Attention with rotary embedding and grouped queries, and with norms of queries and keys in Qwen3-MoE."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, head = sizes.width, sizes.head
        self.q_proj = nn.Linear(width, sizes.heads * head, bias=False)
        self.k_proj = nn.Linear(width, sizes.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, sizes.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(sizes.heads * head, width, bias=False)
        if sizes.experts:  # as in Qwen3
            self.q_norm, self.k_norm = nn.RMSNorm(head, sizes.eps), nn.RMSNorm(head, sizes.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the output [batch, tokens, width]; cos and sin are [tokens, head]."""
        b, t, _ = x.shape
        heads, kv_heads, head = self.sizes.heads, self.sizes.kv_heads, self.sizes.head

        def rotate(y: Tensor) -> Tensor:
            a, c = y.chunk(2, -1)
            return y * cos.to(y.dtype) + torch.cat((-c, a), -1) * sin.to(y.dtype)

        q = self.q_proj(x).view(b, t, heads, head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, kv_heads, head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, kv_heads, head).transpose(1, 2)
        if self.sizes.experts:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q), rotate(k)
        k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (k, v))
        # Written out: at this size it is faster on a CPU than F.scaled_dot_product_attention.
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(head)
        if self.sizes.causal:
            seen = torch.ones(t, t, dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -1e9)
        y = scores.softmax(-1).to(v.dtype) @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, t, heads * head))


class MLP(nn.Module):
    """A gated MLP, or experts next to each other in one matrix.

    All experts are computed for every token, which at this size costs less than sorting tokens by expert.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, hidden = sizes.width, sizes.hidden * max(1, sizes.experts)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        if sizes.experts:
            self.gate = nn.Linear(width, sizes.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the experts' load imbalance: 1 if balanced, as transformers computes it.

        0 without experts.
        """
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        if not self.sizes.experts:
            return self.down_proj(hidden), x.new_zeros(())
        shares = self.gate(x).float().softmax(-1)
        best = shares.topk(self.sizes.chosen, -1)
        weights = torch.zeros_like(shares).scatter(
            -1, best.indices, best.values / best.values.sum(-1, keepdim=True)
        )
        used = (weights > 0).float().flatten(0, -2).mean(0) / self.sizes.chosen
        uneven = self.sizes.experts * (used * shares.flatten(0, -2).mean(0)).sum()
        return self.down_proj(
            hidden * weights.to(hidden.dtype).repeat_interleave(self.sizes.hidden, -1)
        ), uneven


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each after a norm and with a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.mlp = MLP(sizes)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, keep: list[Tensor | float]
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output and its experts' load imbalance.

        `keep` has the dropout masks of attention and MLP.
        """
        x = x + self.self_attn(self.input_layernorm(x), cos, sin) * keep[0]
        out, uneven = self.mlp(self.post_attention_layernorm(x))
        return x + out * keep[1], uneven


class Dropout:
    """Dropout masks, cut at random positions from one pool of random numbers.

    Drawing millions of random numbers in every step would take a third of the time.
    """

    def __init__(self, p: float, sizes: Sizes, generator: np.random.Generator) -> None:
        self.rng, self.sizes = generator, sizes
        self.pool = (torch.rand(1 << 25) >= p).to(torch.bfloat16) / (1 - p)

    def __call__(self, rows: int, width: int) -> Tensor:
        """Return masks for all sites of a batch, bfloat16 [sites, rows, width, model width], scaled by 1 / (1 - p)."""
        shape = self.sizes.sites, rows, width, self.sizes.width
        count = math.prod(shape)
        start = 64 * int(self.rng.integers((len(self.pool) - count) // 64))
        return self.pool[start : start + count].view(shape)


class Decoder(nn.Module):
    """The model of a config.json; parameters have Hugging Face's names without `model.`, and experts are stacked."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, sizes.eps)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                shrink = (
                    math.sqrt(2 * sizes.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                )
                nn.init.normal_(p, std=0.02 / shrink)
        freq = sizes.theta ** (-torch.arange(0, sizes.head, 2) / sizes.head)
        angle = torch.outer(torch.arange(2 * CONTEXT), torch.cat((freq, freq)))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the summed cross entropy of the targets; `keep` has the dropout masks, or None.

        In training a model with experts, their load imbalance is added, weighted by the number of targets.
        """
        x, uneven = self.compute_states(ids, keep)
        logits = F.linear(x, self.embed_tokens.weight).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        if not self.training or not self.sizes.experts:
            return loss
        return loss + self.sizes.balance * (targets != IGNORE).sum() * uneven / self.sizes.layers

    def compute_states(self, ids: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the normalised hidden states, [rows, tokens, width], and the summed load imbalance of experts."""
        t = ids.shape[1]
        masks: list[Tensor | float] = [1.0] * self.sizes.sites if keep is None else list(keep.unbind())
        x = self.embed_tokens(ids) * masks[0]
        uneven = x.new_zeros((), dtype=torch.float32)
        for i, layer in enumerate(self.layers):
            x, imbalance = layer(x, self.cos[:t], self.sin[:t], masks[2 * i + 1 : 2 * i + 3])
            uneven = uneven + imbalance
        return self.norm(x), uneven


def list_checkpoint_names(name: str, sizes: Sizes) -> list[str]:
    """Return the checkpoint names of one parameter: one for each expert, or the name with the prefix `model.`."""
    stem, dot, last = name.rpartition(".mlp.")
    if not sizes.experts or not dot or last.startswith("gate.weight"):
        return [f"model.{name}"]
    return [f"model.{stem}.mlp.experts.{expert}.{last}" for expert in range(sizes.experts)]


def experts_axis(name: str) -> int:
    """Return the axis along which the experts' matrices are stacked in a parameter."""
    return 1 if name.endswith("down_proj.weight") else 0


def save(model: Decoder, folder: Path) -> None:
    """Write model.safetensors to a folder in bfloat16, with one tensor per expert; the file is replaced at once."""
    weights = {}
    for name, parameter in model.state_dict().items():
        keys = list_checkpoint_names(name, model.sizes)
        for key, tensor in zip(keys, parameter.to(torch.bfloat16).chunk(len(keys), experts_axis(name))):
            weights[key] = tensor.contiguous()
    temporary = folder / "model.safetensors.part"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    os.replace(temporary, folder / "model.safetensors")


def load(model: Decoder, folder: Path) -> None:
    """Load the weights of a folder's model.safetensors into a model, in float32."""
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(
        {
            name: torch.cat(
                [weights[key].float() for key in list_checkpoint_names(name, model.sizes)], experts_axis(name)
            )
            for name in model.state_dict()
        }
    )
