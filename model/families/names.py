"""How the checkpoints of a family call their tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertNames:
    """The tensors of routed experts in a layer: the router, and under `experts`.<number> those of an expert.

    Those of shared experts are one block under `shared`, their gate is `shared_gate`; `choice_bias` stands under the
    router.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""
    choice_bias: str = ""
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True)
class LatentNames:
    """The tensors of latent attention in a layer: projections to and from latents, and the norms of these."""

    query: str = "self_attn.q_proj"
    query_latent: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_of_latent: str = "self_attn.q_b_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    expand: str = "self_attn.kv_b_proj"


@dataclass(frozen=True)
class StackedExpertNames:
    """The tensors of routed experts in a layer, where one holds those of all, [experts, in, out].

    Outputs of gate and up stand in turn. Biases have `_bias` behind the name.
    """

    router: str = "mlp.router"
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"

    def in_layer(self, prefix: str) -> tuple[str, ...]:
        """All tensors that are stacked, of a layer."""
        return tuple(f"{prefix}.{name}{bias}" for name in (self.gate_up, self.down) for bias in ("", "_bias"))


@dataclass(frozen=True)
class Names:
    """The tensors of a checkpoint: those around the layers, the prefix of a layer, and those of a layer.

    Every name gets `.weight` or `.bias` behind it. `qkv` and `gate_up` are fused tensors, which stand for those of
    their parts. `transposed` projections are [in, out]. `bare` is the prefix that names of a checkpoint may lack.
    `masks` are buffers of a layer, which follow from the config. `per_layer` are those of the inputs of every layer;
    `scale` is a number, which has no `.weight` behind its name.
    """

    table: str = "model.embed_tokens"
    positions: str = ""
    last_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers"
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    qkv: str = ""
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    down: str = "mlp.down_proj"
    transposed: bool = False
    bare: str = ""
    masks: tuple[str, ...] = ()
    scale: str = ""
    per_layer: PerLayerNames | None = None
    experts: ExpertNames | StackedExpertNames = ExpertNames()
    sinks: str = "self_attn.sinks"
    latent: LatentNames = LatentNames()


@dataclass(frozen=True)
class PerLayerNames:
    """The tensors of the inputs of every layer: around the layers `table`, `projection` and `norm`, else of a layer."""

    table: str
    projection: str
    norm: str
    gate: str
    output: str
    after: str


LLAMA = Names()
