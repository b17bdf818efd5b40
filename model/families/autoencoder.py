"""AutoencoderKL of diffusers: an encoder of images to latents and a decoder of latents to images.

    decoder  latents -> post_quant_conv -> convolution -> middle blocks -> blocks that double the image -> images
    encoder  images -> convolution -> blocks that halve the image -> middle blocks -> quant_conv -> mean, log variance

Both are residual blocks of convolutions. A network is one of the halves for one size of latents; larger images are made
of overlapping tiles (`model.runners.tiling`). Attention of the middle block with 512 channels takes latents of up to
4,096 pixels in bfloat16 and 2,048 in float32 (`attention_prefill`). So FLUX's decoder makes 1024 x 1024 pixels in tiles
of up to 512 x 512 in bfloat16, and of up to 352 x 352 in float32.

Predicted on one core of trn2 in bfloat16, in program order: the decoder of FLUX takes 29.8 ms for 512 x 512 pixels, of
which the bounds of its launches are 27.7 ms (93 %), and the encoder 16.1 ms (90 %). With launches of `group_norm` the
decoder takes 37.0 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from model.config.autoencoder import AutoencoderConfig, Half
from model.config.component import refuse_unread
from model.config.fields import Fields
from model.layers.image.attention import PixelAttention
from model.layers.image.convolution import ConvolutionLayer, ImageSize
from model.layers.image.output import ImageOutput
from model.layers.image.residual import ResidualBlock
from model.layers.image.upsampling import Upsampling
from model.network import Input, Network

_Layer = ConvolutionLayer | ResidualBlock | PixelAttention | Upsampling | ImageOutput

_MOST_BLOCKS = 8
_MOST_LAYERS = 64
_MOST_CHANNELS = 65536
"""Largest number of blocks, of residual blocks in a block, and of channels; published models have 4, 2 and 512."""


def read_autoencoder(fields: Fields) -> AutoencoderConfig:
    """Return the config of the decoder of an AutoencoderKL, for latents of `sample_size`.

    Raises:
        ModelError: `block_out_channels` is missing, or a field has the wrong type or contradicts another one.
    """
    channels = _read_channels(fields)
    for name, known in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        types = fields.get(name, [known])
        if not isinstance(types, list) or len(types) != len(channels):
            raise fields.error(
                name, f"{types!r:.60} is not a list of {len(channels)}, as block_out_channels has"
            )
        for block_type in types:
            if block_type != known:
                fields.unsupported(name, f"{block_type!r:.60} is not computed; {known} is")
    activation = fields.get("act_fn", "silu")
    if activation not in ("silu", "swish"):
        fields.unsupported("act_fn", f"{activation!r:.60} is not computed; silu is")
    for name in ("latents_mean", "latents_std"):
        if name in fields:
            fields.unsupported(name, "scaling of latents by channel is not computed; null is known")
    groups = fields.count("norm_num_groups", default=32)
    for count in channels:
        if count % groups:
            raise fields.error("norm_num_groups", f"{groups} groups do not divide a block's {count} channels")
    scale = 2 ** (len(channels) - 1)
    sample_size = fields.count("sample_size", default=32)
    side = sample_size // scale
    if side < 1:
        raise fields.error(
            "sample_size", f"{sample_size} is less than a pixel of a latent, which has {scale}"
        )
    config = AutoencoderConfig(
        rows=side * side,
        in_channels=fields.count("in_channels", default=3, most=_MOST_CHANNELS),
        out_channels=fields.count("out_channels", default=3, most=_MOST_CHANNELS),
        latent_channels=fields.count("latent_channels", default=4, most=_MOST_CHANNELS),
        block_out_channels=channels,
        layers_per_block=fields.count("layers_per_block", default=1, most=_MOST_LAYERS),
        norm_num_groups=groups,
        sample_size=sample_size,
        scaling_factor=fields.number("scaling_factor", default=0.18215),
        shift_factor=fields.number("shift_factor", default=0.0, positive=False),
        force_upcast=fields.flag("force_upcast", default=True),
        use_quant_conv=fields.flag("use_quant_conv", default=True),
        use_post_quant_conv=fields.flag("use_post_quant_conv", default=True),
        mid_block_add_attention=fields.flag("mid_block_add_attention", default=True),
        latent_rows=side,
        latent_columns=side,
    )
    refuse_unread(fields)
    return config


def _read_channels(fields: Fields) -> tuple[int, ...]:
    """Return `block_out_channels`, the channels of each block."""
    channels = fields.get("block_out_channels", None)
    if channels is None:
        raise fields.error("block_out_channels", "missing")
    if (
        not isinstance(channels, list)
        or not 1 <= len(channels) <= _MOST_BLOCKS
        or not all(type(count) is int and 0 < count <= _MOST_CHANNELS for count in channels)
    ):
        raise fields.error(
            "block_out_channels",
            f"{channels!r:.60} is not a list of 1 to {_MOST_BLOCKS} whole numbers from 1 to {_MOST_CHANNELS}",
        )
    return tuple(channels)


def compose(config: AutoencoderConfig) -> Network:
    """Return the network of the half that the config names.

    The decoder reads `latents` [images, latent channels, rows, columns] and writes images. The encoder reads `images`
    and writes [images, 2 * latent channels, rows, columns]: the means, and behind them the log variances.
    """
    if config.half is Half.decoder:
        layers, source, unread = [*_list_decoder(config)], "latents", ("encoder.", "quant_conv.")
    else:
        layers, source, unread = [*_list_encoder(config)], "images", ("decoder.", "post_quant_conv.")
    measured = [replace(layer, measured=after.reads_moments) for layer, after in pairwise(layers)]
    return Network(
        tuple((layer,) for layer in (*measured, layers[-1])),
        {source: Input(source, dtype=None)},
        ("x",),
        unread_prefixes=unread,
    )


def _list_decoder(config: AutoencoderConfig) -> Iterator[_Layer]:
    """Yield the layers of the decoder in order."""
    channels, groups = config.block_out_channels[::-1], config.norm_num_groups
    size = ImageSize(config.latent_channels, config.latent_rows, config.latent_columns)
    source = "latents"
    if config.use_post_quant_conv:
        yield ConvolutionLayer("post_quant", size, "post_quant_conv", size.channels, window=1, source=source)
        source = "x"
    yield ConvolutionLayer("input", size, "decoder.conv_in", channels[0], source=source)
    size = size.with_channels(channels[0])
    yield from _list_middle(config, "decoder", size)
    for block, outputs in enumerate(channels):
        tensor = f"decoder.up_blocks.{block}"
        for number in range(config.layers_per_block + 1):
            yield ResidualBlock(f"up.{block}.{number}", size, f"{tensor}.resnets.{number}", outputs, groups)
            size = size.with_channels(outputs)
        if block + 1 < len(channels):
            yield Upsampling(f"up.{block}.upsampling", size, f"{tensor}.upsamplers.0.conv")
            size = ImageSize(outputs, 2 * size.rows, 2 * size.columns)
    tensors = "decoder.conv_norm_out", "decoder.conv_out"
    yield ImageOutput("output", size, tensors, config.out_channels, groups)


def _list_encoder(config: AutoencoderConfig) -> Iterator[_Layer]:
    """Yield the layers of the encoder in order."""
    channels, groups, scale = config.block_out_channels, config.norm_num_groups, config.spatial_scale
    size = ImageSize(config.in_channels, config.latent_rows * scale, config.latent_columns * scale)
    yield ConvolutionLayer("input", size, "encoder.conv_in", channels[0], source="images")
    size = size.with_channels(channels[0])
    for block, outputs in enumerate(channels):
        tensor = f"encoder.down_blocks.{block}"
        for number in range(config.layers_per_block):
            yield ResidualBlock(f"down.{block}.{number}", size, f"{tensor}.resnets.{number}", outputs, groups)
            size = size.with_channels(outputs)
        if block + 1 < len(channels):
            downsampling = f"{tensor}.downsamplers.0.conv"
            yield ConvolutionLayer(f"down.{block}.downsampling", size, downsampling, outputs, stride=2)
            size = ImageSize(outputs, size.rows // 2, size.columns // 2)
    yield from _list_middle(config, "encoder", size)
    moments = 2 * config.latent_channels
    yield ImageOutput("output", size, ("encoder.conv_norm_out", "encoder.conv_out"), moments, groups)
    if config.use_quant_conv:
        yield ConvolutionLayer("quant", size.with_channels(moments), "quant_conv", moments, window=1)


def _list_middle(config: AutoencoderConfig, half: str, size: ImageSize) -> Iterator[_Layer]:
    """Yield the middle layers of a half, whose tensors' names begin with `half`: two residual blocks.

    With `mid_block_add_attention` there is a layer of attention between them.
    """
    for number in range(2):
        if number == 1 and config.mid_block_add_attention:
            tensor = f"{half}.mid_block.attentions.0"
            yield PixelAttention("middle.attention", size, tensor, config.norm_num_groups)
        tensor = f"{half}.mid_block.resnets.{number}"
        yield ResidualBlock(f"middle.{number}", size, tensor, size.channels, config.norm_num_groups)
