"""Blocks of denoisers whose images and texts attend to each other (MM-DiT), by the tensors of diffusers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.config.denoisers import DenoiserConfig
from model.families.denoisers import (
    CHUNKS,
    EMBEDDING,
    EPS,
    build_feed_forward,
    build_linear,
    build_output,
    build_projections,
    describe_heads,
)
from model.layers.attention_heads import AttentionProjections
from model.layers.denoiser.attention import ImageAttention
from model.layers.denoiser.conditions import ConditionRows
from model.layers.denoiser.joint_attention import JointAttention, TextFeedForward
from model.layers.denoiser.modulation import ModulatedNorm
from model.layers.denoiser.rotation import AxialRotation, ShiftedHeadNorm, order_pairs
from model.layers.layer import Layer
from model.layers.norm import Norm
from model.network import Section

_SECOND_CHUNKS = ("second_shift", "second_scale", "second_gate")
_LAST_CHUNKS = ("attention_scale", "attention_shift")
_PROJECTIONS = {
    "image": (("to_q", "to_k", "to_v"), "to_out.0"),
    "text": (("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out"),
}
"""Names of the projections of queries, keys and values, and of the output, by stream."""


@dataclass(frozen=True)
class JointBlocks:
    """Layers of one denoiser.

    has_head_norms  whether queries and keys are normalised head by head
    rotation        rotation of the image's queries and keys; None without
    """

    config: DenoiserConfig
    has_head_norms: bool
    rotation: AxialRotation | None = None

    def build_modulation(self, name: str, tensor: str, chunks: tuple[str, ...]) -> ConditionRows:
        """Return the layer that writes modulation rows from the embedding, named `chunks`."""
        hidden = self.config.hidden_size
        linear = build_linear(f"{tensor}.linear", len(chunks) * hidden, hidden)
        return ConditionRows(name, EMBEDDING, linear, chunks, is_divided=True)

    def build_norm(self, shift: str, scale: str, gate: str = "") -> ModulatedNorm:
        """Return the norm that is modulated by rows of these names."""
        return ModulatedNorm(self.config.hidden_size, EPS, shift, scale, gate)

    def build_attention(
        self,
        name: str,
        norm: ModulatedNorm,
        projections: AttentionProjections,
        head_norms: tuple[str, str],
        stream: str = "image",
    ) -> ImageAttention:
        """Return the projections of a stream around attention.

        Args:
            name: Name of the layer.
            norm: Norm and gate of the stream.
            projections: Projections of the stream.
            head_norms: Tensors of the norms of query and key heads, if there are any.
            stream: "image" or "text"; all rows of a text have position 0, so they do not turn.
        """
        config = self.config
        order = order_pairs(config.head_dim) if self.rotation is not None else ()
        norms: tuple[Norm, ...] = tuple(
            ShiftedHeadNorm(f"{name}.{letter}_norm", tensor, config.head_dim, EPS, order=order)
            for letter, tensor in zip("qk", head_norms)
        )
        return ImageAttention(
            name,
            config.hidden_size,
            describe_heads(config.heads, config.head_dim),
            None,
            projections,
            norms if self.has_head_norms else (),
            modulation=norm,
            rotation=self.rotation if stream == "image" else None,
            order=order,
        )

    def build_double(
        self, name: str, tensor: str, has_second: bool = False, drops_text: bool = False
    ) -> Section:
        """Return the layers of a block with weights for each stream.

        Args:
            name: Name of the block.
            tensor: Beginning of the names of its tensors.
            has_second: Whether the image attends to itself as well, from the same rows.
            drops_text: Whether the text's rows end here, because no block follows that reads them.
        """
        hidden = self.config.hidden_size
        modulations: list[Layer] = []
        streams: list[ImageAttention] = []
        blocks: list[Layer] = []
        for stream, suffix, prefix in (("image", "", ""), ("text", "_context", "added_")):
            is_last = drops_text and stream == "text"
            names: tuple[str, ...] = _LAST_CHUNKS if is_last else CHUNKS
            if has_second and stream == "image":
                names += _SECOND_CHUNKS
            rows = {chunk: f"{name}.{stream}.{chunk}" for chunk in names}
            modulations.append(
                self.build_modulation(
                    f"{name}.{stream}.modulation", f"{tensor}.norm1{suffix}", tuple(rows.values())
                )
            )
            norm = self.build_norm(
                rows["attention_shift"], rows["attention_scale"], rows.get("attention_gate", "")
            )
            inputs, output = _PROJECTIONS[stream]
            projections = build_projections(f"{tensor}.attn", hidden, inputs=inputs, output=output)
            head_norms = (f"{tensor}.attn.norm_{prefix}q.weight", f"{tensor}.attn.norm_{prefix}k.weight")
            attention = f"{name}.{stream}.attention"
            streams.append(self.build_attention(attention, norm, projections, head_norms, stream))
            if is_last:
                continue
            mlp_norm = self.build_norm(rows["mlp_shift"], rows["mlp_scale"], rows["mlp_gate"])
            block = build_feed_forward(f"{name}.{stream}.mlp", f"{tensor}.ff{suffix}", hidden, mlp_norm)
            text_rows = self.config.text_rows
            blocks.append(block if stream == "image" else TextFeedForward(block, text_rows))
        image, text = streams
        joint = JointAttention(f"{name}.attention", image, text, self.config.text_rows)
        if has_second:
            joint = replace(joint, second=self._build_second(name, tensor))
        return (*modulations, joint, *blocks)

    def _build_second(self, name: str, tensor: str) -> ImageAttention:
        """Return the projections with which the image attends to itself in a block."""
        shift, scale, gate = (f"{name}.image.{chunk}" for chunk in _SECOND_CHUNKS)
        return self.build_attention(
            f"{name}.second_attention",
            self.build_norm(shift, scale, gate),
            build_projections(f"{tensor}.attn2", self.config.hidden_size),
            (f"{tensor}.attn2.norm_q.weight", f"{tensor}.attn2.norm_k.weight"),
        )

    def build_last(self, channel_first: bool = False) -> Section:
        """Return the modulation of the last norm, and the layer that makes images of rows.

        Args:
            channel_first: Whether outputs of the last matrix begin with the channel of a patch.
        """
        norm = self.build_norm("last_shift", "last_scale")
        return (
            self.build_modulation("last.modulation", "norm_out", ("last_scale", "last_shift")),
            build_output(self.config, "proj_out", norm, channel_first),
        )
