"""A family that no published model has: other fields, other tensor names, and a norm on every head."""

from __future__ import annotations

from dataclasses import replace

from model.config import Fields, ModelConfig
from model.config.blocks import Block, Mlp, Norms
from model.config.mixers import GroupedAttention, HeadNorm, Positions
from model.config.rope import RopeParameters
from model.families.tokens import build_token_network
from model.layers.attention import Attention
from model.layers.attention_heads import AttentionProjections
from model.layers.embedding import Embedding
from model.layers.head import Head
from model.layers.mlp import FeedForward
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.network import Network

EPS = 1e-5


def toy(fields: Fields) -> ModelConfig:
    """Read a config whose fields have one letter."""
    heads, limit = fields.count("q"), fields.count("n")
    dim = fields.count("d")
    positions = Positions(RopeParameters(10000.0), limit, dim)
    mixer = GroupedAttention(heads, fields.count("g"), dim, head_norm=HeadNorm.head, positions=positions)
    return ModelConfig(
        vocab_size=fields.count("v"),
        hidden_size=fields.count("h"),
        blocks=(Block(mixer, Mlp(fields.count("f")), Norms(EPS)),) * fields.count("l"),
        max_position_embeddings=limit,
        tie_word_embeddings=True,
        dtype="float32",
    )


def sparse(fields: Fields) -> ModelConfig:
    """Return the same config with blocks of which no layer computes the MLP."""
    config = toy(fields)
    return replace(
        config, blocks=tuple(replace(block, mlp=replace(block.mlp, sparse=True)) for block in config.blocks)
    )


def compose(config: ModelConfig) -> Network:
    """Build the decoder from tensors with short names; the head is the table of the embedding."""
    hidden, vocabulary = config.hidden_size, config.vocab_size

    def norm(name: str, size: int = hidden) -> Norm:
        return Norm(name, f"{name}.weight", size, EPS)

    def block(number: int, config_block: Block) -> tuple[Attention, FeedForward]:
        prefix, mixer, width = f"b{number}", config_block.mixer, config_block.mlp.width
        return (
            Attention(
                f"{prefix}.attention",
                hidden,
                mixer,
                norm(f"{prefix}.n1"),
                AttentionProjections(
                    (
                        Projection(f"{prefix}.q", mixer.query_width, hidden),
                        Projection(f"{prefix}.k", mixer.kv_width, hidden),
                        Projection(f"{prefix}.v", mixer.kv_width, hidden),
                    ),
                    Projection(f"{prefix}.o", hidden, mixer.query_width),
                ),
                (norm(f"{prefix}.qn", mixer.head_dim), norm(f"{prefix}.kn", mixer.head_dim)),
            ),
            FeedForward(
                f"{prefix}.mlp",
                hidden,
                norm(f"{prefix}.n2"),
                Projection(f"{prefix}.gate", width, hidden),
                Projection(f"{prefix}.up", width, hidden),
                Projection(f"{prefix}.down", hidden, width),
            ),
        )

    return build_token_network(
        Embedding("embedding", "table", vocabulary, hidden),
        tuple(block(number, config_block) for number, config_block in enumerate(config.blocks)),
        Head("head", "table", vocabulary, hidden, norm("n")),
    )
