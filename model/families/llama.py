"""The Llama family, and Mistral, which is a Llama whose tokens may see a window of positions."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import Block, GroupedAttention, HeadNorm, Mlp, ModelConfig
from model.config.reading import attention, biases, common, gated_mlp, layer_count, norms, rotary
from model.decoder import Decoder
from model.layers.attention import Attention, AttentionTensors
from model.layers.embedding import Embedding
from model.layers.head import Head
from model.layers.mlp import GatedMlp, MlpTensors
from model.layers.norm import RmsNorm


def llama(fields: Fields) -> ModelConfig:
    """Two norms a layer, before attention and before a gated MLP; biases where the config asks for them."""
    return dense(fields, attention(fields, **biases(fields)))


def mistral(fields: Fields) -> ModelConfig:
    """Attention within a window, where the config gives one."""
    window = fields.count("sliding_window") if "sliding_window" in fields else None
    return dense(fields, attention(fields, window=window))


def dense(fields: Fields, mixer: GroupedAttention) -> ModelConfig:
    """Equal blocks of attention and a gated MLP, with a norm before each."""
    block = Block(mixer, gated_mlp(fields), norms(fields))
    return ModelConfig(
        **common(fields), **rotary(fields, mixer.head_dim), blocks=(block,) * layer_count(fields)
    )


def compose(config: ModelConfig) -> Decoder:
    """The layers with the tensor names of Hugging Face's Llama, and its head norms' names in Qwen3."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    table = "model.embed_tokens.weight"
    eps = config.blocks[0].norms.eps
    return Decoder(
        Embedding("embedding", table, vocabulary, hidden),
        tuple(_block(config, number, block) for number, block in enumerate(config.blocks)),
        Head(
            "head",
            table if config.tie_word_embeddings else "lm_head.weight",
            vocabulary,
            hidden,
            RmsNorm("head.norm", "model.norm.weight", hidden, eps),
        ),
        unread=("lm_head.weight",) if config.tie_word_embeddings else (),
    )


def _block(config: ModelConfig, number: int, block: Block) -> tuple[Attention, GatedMlp]:
    hidden, eps = config.hidden_size, block.norms.eps
    name, tensor = f"layers.{number}", f"model.layers.{number}"
    mixer, mlp = block.mixer, block.mlp
    assert isinstance(mixer, GroupedAttention) and isinstance(mlp, Mlp) and config.positions is not None

    def norm(own: str, theirs: str, size: int = hidden) -> RmsNorm:
        return RmsNorm(f"{name}.{own}", f"{tensor}.{theirs}.weight", size, eps)

    head_norms = None
    if mixer.head_norm is HeadNorm.head:
        head_norms = (
            norm("attention.q_norm", "self_attn.q_norm", mixer.head_dim),
            norm("attention.k_norm", "self_attn.k_norm", mixer.head_dim),
        )
    return (
        Attention(
            f"{name}.attention",
            hidden,
            mixer,
            config.positions,
            norm("attention.norm", "input_layernorm"),
            AttentionTensors(*(f"{tensor}.self_attn.{each}_proj.weight" for each in "qkvo")),
            head_norms,
        ),
        GatedMlp(
            f"{name}.mlp",
            hidden,
            mlp.width,
            norm("mlp.norm", "post_attention_layernorm"),
            MlpTensors(*(f"{tensor}.mlp.{each}_proj.weight" for each in ("gate", "up", "down"))),
        ),
    )
