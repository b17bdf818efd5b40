"""Configs of denoisers, the components that predict noise or flow in a latent image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from model.config.component import ComponentConfig
from model.config.fields import Fields
from model.config.reading import MOST_HEAD_DIM, MOST_HEADS, read_layer_count
from model.errors import ModelError

D = TypeVar("D", bound="DenoiserConfig")


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig(ComponentConfig):
    """Config of a transformer over the patches of latent images of one size.

    latent_rows, latent_columns  size of a latent image
    channels         channels of a latent image
    outputs          channels of the checkpoint's result; twice `channels` if half of them are variances, which no step
                     needs and no kernel computes
    patch_size       rows and columns of a patch
    heads, head_dim  heads of attention; their product is the hidden size
    text_rows        rows of the encoded text
    text_size        elements of a row of the encoded text
    ulysses_ranks    ranks that divide the rows of an image, for each tensor-parallel rank
    """

    latent_rows: int
    latent_columns: int
    channels: int
    outputs: int
    patch_size: int
    heads: int
    head_dim: int
    text_rows: int
    text_size: int
    ulysses_ranks: int = 1

    @property
    def hidden_size(self) -> int:
        """Elements of a hidden state."""
        return self.heads * self.head_dim

    @property
    def patches(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.latent_rows // self.patch_size, self.latent_columns // self.patch_size

    def with_size(self: D, rows: int, columns: int, text_rows: int) -> D:
        """Return the denoiser for latent images of another size and texts of another length."""
        patches = (rows // self.patch_size) * (columns // self.patch_size)
        return replace(self, rows=patches, latent_rows=rows, latent_columns=columns, text_rows=text_rows)

    def refusal(self, ranks: int) -> str | None:
        """Return why `ranks` tensor-parallel ranks cannot share the denoiser, and how many can; None if they can.

        With Ulysses ranks, all ranks together divide the heads, and Ulysses ranks the rows of patches.
        """
        ulysses, rows = self.ulysses_ranks, self.patches[0]
        if ulysses > 1 and rows % ulysses:
            return (
                f"{ulysses} Ulysses ranks do not divide {rows} rows of patches of an image; give a divisor of {rows}, "
                "or another size"
            )
        if ulysses > 1 and self.heads % (ranks * ulysses):
            tensor_factor = f" times {ranks} tensor-parallel ranks" if ranks > 1 else ""
            return (
                f"{ulysses} Ulysses ranks{tensor_factor} do not divide {self.heads} heads; give numbers whose product "
                f"divides {self.heads}"
            )
        if ranks <= self.heads:
            return None
        return f"{ranks} ranks and {self.heads} heads; give at most {self.heads} ranks"


@dataclass(frozen=True, kw_only=True)
class PixArtConfig(DenoiserConfig):
    """Config of a PixArt denoiser: blocks of self-attention, attention to the text, and a feed-forward block.

    layers         blocks
    bias           whether the projections of queries, keys and values have biases
    eps            epsilon of the norms of the blocks
    sample_size    rows and columns of the latent images for which the positions are defined
    interpolation  factor by which positions of patches are divided
    projects_text  whether two linear layers take the text from `text_size` to the hidden size
    has_image_size  whether height, width and aspect ratio of the image in pixels are inputs
    """

    layers: int
    bias: bool
    eps: float
    sample_size: int
    interpolation: float
    projects_text: bool
    has_image_size: bool


@dataclass(frozen=True, kw_only=True)
class DiTConfig(DenoiserConfig):
    """Config of a DiT denoiser: blocks of self-attention and a feed-forward block, conditioned on a class of images.

    layers       blocks
    bias         whether the projections of queries, keys and values have biases
    eps          epsilon of the norms before feed-forward blocks
    sample_size  rows and columns of the latent images for which the positions are defined
    classes      classes of images; one more label stands for no class
    """

    layers: int
    bias: bool
    eps: float
    sample_size: int
    classes: int


@dataclass(frozen=True, kw_only=True)
class FluxConfig(DenoiserConfig):
    """Config of a FLUX denoiser: blocks with weights for each of two streams, then blocks with the same weights.

    double_layers  blocks with weights for image and text
    single_layers  blocks with the same weights for both
    pooled_size    elements of a pooled text
    has_guidance   whether the guidance is an input
    rotation       elements of a head that do not turn, that turn by the row of a patch, and by its column
    """

    double_layers: int
    single_layers: int
    pooled_size: int
    has_guidance: bool
    rotation: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class SD3Config(DenoiserConfig):
    """Config of an SD3 denoiser: blocks with weights for each of two streams; the last one has no text after it.

    layers          blocks
    second_layers   numbers of the blocks in which the image attends to itself too
    pooled_size     elements of a pooled text
    has_head_norms  whether queries and keys are normalised head by head
    sample_size     rows and columns of the latent images in config.json
    most_patches    rows and columns of patches for which the checkpoint has positions
    """

    layers: int
    second_layers: tuple[int, ...]
    pooled_size: int
    has_head_norms: bool
    sample_size: int
    most_patches: int

    def with_size(self: D, rows: int, columns: int, text_rows: int) -> D:
        """Return the denoiser for latent images of another size and texts of another length.

        Raises:
            ModelError: The checkpoint has no positions for so many patches.
        """
        resized = super().with_size(rows, columns, text_rows)
        assert isinstance(resized, SD3Config)
        if max(resized.patches) > resized.most_patches:
            raise ModelError(
                f"latents of {rows} x {columns} have {' x '.join(map(str, resized.patches))} patches; positions are "
                f"stored for at most {resized.most_patches} x {resized.most_patches}",
                "NKW-MODEL-OPTION",
            )
        return cast(D, resized)


def check_divisible(fields: Fields, name: str, size: int, patch_size: int) -> None:
    """Raise ModelError if a latent image of `size` rows in the field `name` does not consist of whole patches."""
    if size % patch_size:
        raise fields.error(name, f"{size} is not a multiple of patch_size, {patch_size}")


def read_square_images(fields: Fields, sample: int, outputs: int | None) -> dict[str, Any]:
    """Return the fields that DiT and PixArt have in common, as arguments of their configs; texts have no rows.

    Args:
        fields: The fields of config.json.
        sample: Default of `sample_size`.
        outputs: Default of `out_channels`; None for `in_channels`.

    Raises:
        ModelError: A field is missing or has the wrong type, or patches do not divide the image.
    """
    sample, patch = fields.count("sample_size", default=sample), fields.count("patch_size", default=2)
    check_divisible(fields, "sample_size", sample, patch)
    channels = fields.count("in_channels", default=4)
    outputs = fields.count("out_channels", default=channels if outputs is None else outputs)
    if outputs not in (channels, 2 * channels):
        raise fields.error("out_channels", f"{outputs} is neither in_channels, {channels}, nor twice as many")
    heads = fields.count("num_attention_heads", default=16, most=MOST_HEADS)
    head_dim = fields.count("attention_head_dim", default=72, most=MOST_HEAD_DIM)
    if heads * head_dim % 4:
        fields.unsupported(
            "attention_head_dim", f"{heads * head_dim} elements of a hidden state are no multiple of 4"
        )
    check_only(fields, "activation_fn", "gelu-approximate", "activations")
    if fields.flag("norm_elementwise_affine", default=False):
        fields.unsupported("norm_elementwise_affine", "true; norms are computed without weights")
    return {
        "rows": (sample // patch) ** 2,
        "latent_rows": sample,
        "latent_columns": sample,
        "channels": channels,
        "outputs": outputs,
        "patch_size": patch,
        "heads": heads,
        "head_dim": head_dim,
        "layers": read_layer_count(fields, "num_layers"),
        "bias": fields.flag("attention_bias", default=True),
        "sample_size": sample,
    }


def check_only(fields: Fields, name: str, only: object, meaning: str) -> None:
    """Add a refusal if the field `name` is neither absent nor `only`.

    Args:
        fields: The fields of config.json.
        name: Name of the field.
        only: The only supported entry.
        meaning: What the field decides, in the plural, for the message.
    """
    entry = fields.get(name, only)
    if entry != only:
        fields.unsupported(name, f"{entry!r:.60}; the only {meaning} computed are {only}")
