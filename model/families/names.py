"""Tensor names in the checkpoints of a family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertNames:
    """Tensors of a layer's routed experts, stored expert by expert.

    router       the router
    choice_bias  the bias of the selection
    experts      prefix of the experts: the tensors of one expert begin with `experts`.<number>
    shared       prefix of the shared experts, which are stored as one expert
    shared_gate  the projection of the gate of the shared experts
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
    """Tensors of a layer's latent attention: projections to and from the latents, and the norms of the latents."""

    query: str = "self_attn.q_proj"
    query_latent: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_of_latent: str = "self_attn.q_b_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    expand: str = "self_attn.kv_b_proj"


@dataclass(frozen=True)
class StackedExpertNames:
    """Tensors of a layer's routed experts, stored as stacks [experts, inputs, outputs].

    The outputs of gate and up alternate in `gate_up`. The name of a bias is the name of its stack and `_bias`.
    """

    router: str = "mlp.router"
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"

    def list_stacks(self, prefix: str) -> tuple[str, ...]:
        """Return four tensor names of the layer with the prefix `prefix`: gate_up, its bias, down, its bias."""
        return tuple(f"{prefix}.{name}{bias}" for name in (self.gate_up, self.down) for bias in ("", "_bias"))


@dataclass(frozen=True)
class Names:
    """Tensors of a checkpoint, without the suffixes `.weight` and `.bias`; "" means that the family has no such tensor.

    Names of tensors inside a layer follow the prefix `layer`.<number>.

    qkv         fused tensor of queries, keys and values, which replaces `query`, `key` and `value`
    output_gate tensor of the gate of the attention; "" where it is fused with the queries
    gate_up     fused tensor of gate and up, which replaces `gate` and `up`
    transposed  whether projections are stored as [inputs, outputs]
    bare        prefix of all names that a checkpoint may omit
    masks       buffers of a layer that follow from the config and are not read
    scale       factor of a layer's output; its name has no suffix
    per_layer   tensors of the per-layer inputs
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
    output_gate: str = ""
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
    """Tensors of the per-layer inputs: `table`, `projection` and `norm` occur once, the others in every layer."""

    table: str
    projection: str
    norm: str
    gate: str
    output: str
    after: str


LLAMA = Names()
