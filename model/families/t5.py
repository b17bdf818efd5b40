"""T5's encoder: attention with biases by relative position and without a scale, RMSNorm, and no biases of products."""

from __future__ import annotations

from model.config.blocks import Block, Mlp, Norms
from model.config.component import refuse_unread
from model.config.fields import Fields
from model.config.mixers import GroupedAttention
from model.config.reading import MOST_HEAD_DIM, MOST_HEADS, read_activation, read_dtype, read_layer_count
from model.config.text_encoders import T5Config
from model.layers.attention_heads import AttentionProjections
from model.layers.layer import Layer
from model.layers.mlp import FeedForward
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.relative_attention import TEXT_LENGTHS, RelativeAttention, RelativePositions
from model.layers.text_encoder import FinalNorm, TextEmbedding
from model.network import Input, Network

_TABLE = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_FORMS = ("relu", "gated-gelu", "gated-silu")
_GELU = "gelu_new"
"""Activation of gated-gelu; the configs name the form of T5 1.1 so."""
_IGNORED = (
    "classifier_dropout decoder_start_token_id dropout_rate eos_token_id gradient_checkpointing initializer_factor "
    "is_encoder_decoder num_decoder_layers output_past pad_token_id scale_decoder_outputs task_specific_params "
    "tie_word_embeddings use_cache"
).split()
"""Fields for training, for decoders, and for tokenizers."""


def read_t5(fields: Fields) -> T5Config:
    """Return the config of a T5 encoder, for texts padded to n_positions, by default 512 tokens.

    Raises:
        ModelError: A field is missing, has the wrong type, or contradicts another field.
    """
    heads = fields.count("num_heads", most=MOST_HEADS)
    head_dim = fields.count("d_kv", default=64, most=MOST_HEAD_DIM)
    if head_dim % 2:
        fields.unsupported("d_kv", f"{head_dim}; the kernels of attention take even sizes")
    if fields.flag("is_decoder"):
        fields.unsupported("is_decoder", "true; only encoders are computed")
    buckets = fields.count("relative_attention_num_buckets", default=32, most=2**16)
    distance = fields.count("relative_attention_max_distance", default=128)
    if buckets < 4 or buckets % 2:
        raise fields.error("relative_attention_num_buckets", f"{buckets} is not an even number from 4")
    if distance <= buckets // 4:
        raise fields.error(
            "relative_attention_max_distance",
            f"{distance} is not above a quarter of relative_attention_num_buckets, {buckets}",
        )
    config = T5Config(
        rows=fields.count("n_positions", default=512),
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("d_model"),
        block=Block(
            GroupedAttention(heads, heads, head_dim, scale=1.0, causal=False),
            _read_mlp(fields),
            Norms(fields.number("layer_norm_epsilon", default=1e-6)),
        ),
        layers=read_layer_count(fields, "num_layers"),
        buckets=buckets,
        most_distance=distance,
        dtype=read_dtype(fields),
    )
    refuse_unread(fields, *_IGNORED)
    return config


def _read_mlp(fields: Fields) -> Mlp:
    """Return the MLP that feed_forward_proj names; fields that transformers derives from it have to agree.

    Raises:
        ModelError: A field has the wrong type or contradicts feed_forward_proj.
    """
    form = fields.get("feed_forward_proj", _FORMS[0])
    if form not in _FORMS:
        raise fields.error("feed_forward_proj", f"{form!r:.60}; computed are {', '.join(_FORMS)}")
    gated = form.startswith("gated-")
    named = _GELU if form == "gated-gelu" else form.removeprefix("gated-")
    for field, expected in (("is_gated_act", gated), ("dense_act_fn", named)):
        if fields.get(field, expected) != expected:
            raise fields.error(
                field, f"{fields.get(field, None)!r:.60} contradicts feed_forward_proj, {form}"
            )
    return Mlp(fields.count("d_ff"), read_activation(fields, "dense_act_fn", named), gated=gated)


def compose(config: T5Config) -> Network:
    """Return the network from `ids` [batch, rows] and `text_lengths` [batch, 1] to the last hidden states.

    No token attends to padding. A pipeline that does not mask padding passes `rows` as all lengths.
    """
    hidden, eps = config.hidden_size, config.block.norms.eps
    return Network(
        (
            (TextEmbedding("embedding", "shared.weight", config.vocab_size, hidden),),
            *(_build_block(config, number) for number in range(config.layers)),
            (FinalNorm(Norm("norm", "encoder.final_layer_norm.weight", hidden, eps)),),
        ),
        {
            "ids": Input("ids", most=config.vocab_size - 1),
            TEXT_LENGTHS: Input(TEXT_LENGTHS, most=config.rows),
        },
        ("x",),
        unread=("encoder.embed_tokens.weight", "lm_head.weight"),
        unread_prefixes=("decoder.",),
    )


def _build_block(config: T5Config, number: int) -> tuple[Layer, Layer]:
    """Return attention and MLP of block `number`."""
    name, tensor = f"layers.{number}", f"encoder.block.{number}.layer"
    hidden, mixer, mlp, eps = (
        config.hidden_size,
        config.block.mixer,
        config.block.mlp,
        config.block.norms.eps,
    )
    assert isinstance(mixer, GroupedAttention) and isinstance(mlp, Mlp)
    inner, heads = mixer.query_width, f"{tensor}.0.SelfAttention"
    attention = RelativeAttention(
        f"{name}.attention",
        hidden,
        mixer,
        Norm(f"{name}.attention.norm", f"{tensor}.0.layer_norm.weight", hidden, eps),
        AttentionProjections(
            tuple(Projection(f"{heads}.{letter}.weight", inner, hidden) for letter in "qkv"),
            Projection(f"{heads}.o.weight", hidden, inner),
        ),
        table=_TABLE,
        relative=RelativePositions(config.buckets, config.most_distance, config.rows),
    )
    dense = f"{tensor}.1.DenseReluDense"
    *gates, up = (
        Projection(f"{dense}.{matrix}.weight", mlp.width, hidden)
        for matrix in (("wi_0", "wi_1") if mlp.gated else ("wi",))
    )
    feed_forward = FeedForward(
        f"{name}.mlp",
        hidden,
        Norm(f"{name}.mlp.norm", f"{tensor}.1.layer_norm.weight", hidden, eps),
        next(iter(gates), None),
        up,
        Projection(f"{dense}.wo.weight", hidden, mlp.width),
        mlp.activation,
    )
    return attention, feed_forward
