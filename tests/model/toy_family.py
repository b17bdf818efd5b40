"""A family that no published model has: other fields, other tensor names, and a norm on every head."""

from __future__ import annotations

from model.config import Fields, ModelConfig
from model.config.parts import Block, GroupedAttention, HeadNorm, Mlp, Norms, Positions
from model.decoder import Decoder
from model.layers.attention import Attention, AttentionTensors
from model.layers.embedding import Embedding
from model.layers.head import Head
from model.layers.mlp import GatedMlp, MlpTensors
from model.layers.norm import RmsNorm
from model.rope import RopeParameters

EPS = 1e-5


def toy(fields: Fields) -> ModelConfig:
    """Fields of one letter."""
    heads, limit = fields.count("q"), fields.count("n")
    mixer = GroupedAttention(heads, fields.count("g"), fields.count("d"), head_norm=HeadNorm.head)
    return ModelConfig(
        vocab_size=fields.count("v"),
        hidden_size=fields.count("h"),
        blocks=(Block(mixer, Mlp(fields.count("f")), Norms(EPS)),) * fields.count("l"),
        max_position_embeddings=limit,
        tie_word_embeddings=True,
        positions=Positions(RopeParameters(10000.0), limit),
        dtype="float32",
    )


def compose(config: ModelConfig) -> Decoder:
    """Tensors with short names; the head is the table of the embedding."""
    hidden, vocabulary = config.hidden_size, config.vocab_size

    def norm(name: str, size: int = hidden) -> RmsNorm:
        return RmsNorm(name, f"{name}.weight", size, EPS)

    def block(number: int, part: Block) -> tuple[Attention, GatedMlp]:
        at, mixer = f"b{number}", part.mixer
        return (
            Attention(
                f"{at}.attention",
                hidden,
                mixer,
                config.positions,
                norm(f"{at}.n1"),
                AttentionTensors(*(f"{at}.{letter}" for letter in "qkvo")),
                (norm(f"{at}.qn", mixer.head_dim), norm(f"{at}.kn", mixer.head_dim)),
            ),
            GatedMlp(
                f"{at}.mlp",
                hidden,
                part.mlp.width,
                norm(f"{at}.n2"),
                MlpTensors(*(f"{at}.{each}" for each in ("gate", "up", "down"))),
            ),
        )

    return Decoder(
        Embedding("embedding", "table", vocabulary, hidden),
        tuple(block(number, part) for number, part in enumerate(config.blocks)),
        Head("head", "table", vocabulary, hidden, norm("n")),
    )
