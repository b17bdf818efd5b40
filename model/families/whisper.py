"""Whisper: an encoder that runs once per window of speech, and a decoder that attends to the encoder's states."""

from __future__ import annotations

from dataclasses import replace

from model.config.blocks import Block, Mlp, ModelConfig, Norms, SpeechEncoder
from model.config.fields import Fields
from model.config.mixers import GroupedAttention
from model.config.reading import MOST_HEADS, read_activation, read_dtype, read_layer_count
from model.families import dense
from model.layers.attention import Attention
from model.layers.attention_heads import AttentionProjections
from model.layers.cross_attention import CrossAttention, EncodedHeads
from model.layers.mlp import FeedForward
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.speech import SpeechInput
from model.network import Input, Network, Section

_EPS = 1e-5
"""Epsilon of every LayerNorm: the default of torch, which no field of config.json changes."""

_DECODER = dense.Names(
    table="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    last_norm="model.decoder.layer_norm",
    head="proj_out",
    layer="model.decoder.layers",
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
    output="self_attn.out_proj",
    up="fc1",
    down="fc2",
)
_ENCODER = "model.encoder"


def read_whisper(fields: Fields) -> ModelConfig:
    """Return the config of a Whisper: equal encoder blocks, and equal decoder blocks that also attend to the encoder.

    Raises:
        ModelError: A field is missing or has the wrong type, or heads do not divide the hidden size.
    """
    width, heads = fields.count("d_model"), fields.count("decoder_attention_heads", most=MOST_HEADS)
    if width % heads:
        raise fields.error("d_model", f"{width} is not a multiple of decoder_attention_heads, {heads}")
    if width // heads % 2:
        fields.unsupported("d_model", f"heads of {width // heads}; the kernels of attention take even sizes")
    encoder_heads = fields.count("encoder_attention_heads", most=MOST_HEADS, default=heads)
    if encoder_heads != heads:
        fields.unsupported(
            "encoder_attention_heads",
            f"{encoder_heads}; ranks divide as many as decoder_attention_heads, {heads}",
        )
    if fields.flag("scale_embedding", default=False):
        fields.unsupported("scale_embedding", "true; no layer computes that")
    sources, targets = fields.count("max_source_positions"), fields.count("max_target_positions")
    mixer = GroupedAttention(
        heads,
        heads,
        width // heads,
        query_bias=True,
        value_bias=True,
        output_bias=True,
        cross_positions=sources,
    )
    mlp = Mlp(
        fields.count("decoder_ffn_dim"),
        read_activation(fields, "activation_function", "gelu"),
        bias=True,
        gated=False,
    )
    norms = Norms(_EPS, bias=True)
    layers, inner = read_layer_count(fields, "encoder_layers"), fields.count("encoder_ffn_dim")
    encoder_mixer = replace(mixer, cross_positions=0, causal=False)
    return ModelConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=width,
        blocks=(Block(mixer, mlp, norms),) * read_layer_count(fields, "decoder_layers"),
        max_position_embeddings=targets,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        learned_positions=targets,
        dtype=read_dtype(fields),
        encoder=SpeechEncoder(
            "encoder",
            positions=sources,
            mel_bins=fields.count("num_mel_bins"),
            blocks=(Block(encoder_mixer, replace(mlp, width=inner), norms),) * layers,
        ),
    )


def compose(config: ModelConfig) -> Network:
    """Return the network of the decoder, with that of the encoder in `before`."""
    decoder = dense.compose(config, _DECODER)
    assert isinstance(config.encoder, SpeechEncoder)
    crosses = tuple(_build_cross_attention(config, number) for number in range(len(config.blocks)))
    blocks = ((attention, cross, mlp) for (attention, mlp), cross in zip(decoder.blocks, crosses))
    return replace(
        decoder,
        sections=(decoder.sections[0], *blocks, decoder.sections[-1]),
        before={"encoder": _build_encoder(config.hidden_size, config.encoder, crosses)},
        bare_prefix="model.",
    )


def _build_cross_attention(config: ModelConfig, number: int) -> CrossAttention:
    """Return the attention of decoder block `number` to the encoder."""
    mixer, tensor = config.blocks[number].mixer, f"{_DECODER.layer}.{number}.encoder_attn"
    assert isinstance(mixer, GroupedAttention)
    projections = _build_projections(config.hidden_size, tensor)
    norm = _build_norm(f"layers.{number}.cross.norm", f"{tensor}_layer_norm", config.hidden_size)
    return CrossAttention(f"layers.{number}.cross", config.hidden_size, mixer, projections, norm)


def _build_encoder(hidden: int, encoder: SpeechEncoder, crosses: tuple[CrossAttention, ...]) -> Network:
    names = (f"{_ENCODER}.conv1", f"{_ENCODER}.conv2")
    table = f"{_ENCODER}.embed_positions.weight"
    first = SpeechInput("encoder.input", encoder.mel_bins, hidden, encoder.positions, names, table)
    last = _build_norm("encoder.norm", f"{_ENCODER}.layer_norm", hidden)
    blocks = (_build_encoder_block(hidden, block, number) for number, block in enumerate(encoder.blocks))
    sections = ((first,), *blocks, (EncodedHeads(last, crosses),))
    return Network(sections, {"features": Input("features", dtype=None)}, (), window=encoder.positions)


def _build_encoder_block(hidden: int, block: Block, number: int) -> Section:
    """Return the layers of encoder block `number`: attention of every position to all positions, and the MLP."""
    name, tensor = f"encoder.{number}", f"{_ENCODER}.layers.{number}"
    assert isinstance(block.mixer, GroupedAttention) and isinstance(block.mlp, Mlp)
    attention = Attention(
        f"{name}.attention",
        hidden,
        block.mixer,
        _build_norm(f"{name}.attention.norm", f"{tensor}.self_attn_layer_norm", hidden),
        _build_projections(hidden, f"{tensor}.self_attn"),
    )
    mlp = FeedForward(
        f"{name}.mlp",
        hidden,
        _build_norm(f"{name}.mlp.norm", f"{tensor}.final_layer_norm", hidden),
        None,
        _build_linear(f"{tensor}.fc1", block.mlp.width, hidden),
        _build_linear(f"{tensor}.fc2", hidden, block.mlp.width),
        block.mlp.activation,
    )
    return attention, mlp


def _build_projections(hidden: int, tensor: str) -> AttentionProjections:
    """Return the projections of the attention whose tensors' names begin with `tensor`; that of keys has no bias."""
    return AttentionProjections(
        (
            _build_linear(f"{tensor}.q_proj", hidden, hidden),
            Projection(f"{tensor}.k_proj.weight", hidden, hidden),
            _build_linear(f"{tensor}.v_proj", hidden, hidden),
        ),
        _build_linear(f"{tensor}.out_proj", hidden, hidden),
    )


def _build_linear(tensor: str, outputs: int, inputs: int) -> Projection:
    return Projection(f"{tensor}.weight", outputs, inputs, f"{tensor}.bias")


def _build_norm(name: str, tensor: str, hidden: int) -> Norm:
    return Norm(name, f"{tensor}.weight", hidden, _EPS, f"{tensor}.bias")
