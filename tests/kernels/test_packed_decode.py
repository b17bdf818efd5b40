"""attention_block_decode and decoder_layer_decode with weights of 4 bits: hidden states in SBUF, and through HBM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import find_faults, in_order, named, run
from tests.kernels.case import BF16, F32, KernelCase, KernelTests, refuse, slow, vary
from tests.kernels.divided import OverHeads, OverPositions
from tests.kernels.test_attention_block_decode import formed
from tests.kernels.test_decoder_layer_decode import MATRICES, arguments, two_launches
from tests.kernels.test_feed_forward import FP8, quantise
from tests.kernels.test_nibbles import pack

MLP_MATRICES = ("w_gate", "w_up", "w_down")


def pack_all(
    inputs: dict[str, Any], names: tuple[str, ...], zeros: bool, group: int | None = None
) -> dict[str, Any]:
    """Return the arguments with some weights packed; without `zeros` all zero points are 8.

    group: rows of a weight of the MLP that share a scale, None for all.
    """
    packed = dict(inputs)
    for name in names:
        rows = group if name in MLP_MATRICES else None
        packed[name], packed[f"{name}_scales"], zero_rows = pack(inputs[name].astype(F32), rows)
        packed[f"{name}_zeros"] = zero_rows if zeros else None
    return packed


def packed_attention(zeros: bool = True, **settings: Any) -> tuple[Any, ...]:
    inputs = named(kernels.attention_block_decode, formed(**dict(dtype=BF16, hidden=256) | settings))
    return in_order(kernels.attention_block_decode, **pack_all(inputs, ("w_qkv", "w_o"), zeros))


class TestPackedAttentionBlockDecode(KernelTests):
    """Heads that share the partitions, single heads, heads of 128; others and odd hidden sizes go through HBM."""

    case = KernelCase(
        kernels.attention_block_decode,
        packed_attention,
        values=[
            *vary(depth=64, half=32, heads=8, hidden=[256, 1024, 4096], zeros=[True, False]),
            *vary(depth=128, half=64, heads=[1, 2, 3], kv=1, hidden=512, sequences=[1, 17]),
            dict(depth=32, half=16, heads=8, kv=2, hidden=256),
            *vary(depth=[16, 64, 80], half=8, heads=1, kv=1, hidden=256, norms=False),
            # Through HBM: 6 heads of 64, of which 3 belong to a key head, heads of two tiles, and odd hidden sizes.
            dict(depth=64, half=32, heads=6),
            dict(depth=192, half=40, heads=2, kv=1),
            *vary(hidden=[127, 128, 129, 768], depth=64, half=32, heads=4, kv=1),
            dict(sequences=70, positions=8, depth=64, half=32, kv=1),
            dict(new=3, block=16, depth=64, half=32, kv=1),
            dict(depth=64, half=32, kv=1, nibble_dtype=lambda _: "bfloat16"),
        ],
        every_chip=[*vary(depth=64, half=32, kv=1, hidden=[256, 264])],
        refusals=[
            refuse("w_qkv has to be (128, 128) for x (3, 256), not (127, 128)", w_qkv=lambda w: w[1:]),
            refuse("w_o has to be (32, 256) for x (3, 256), not (31, 256)", w_o=lambda w: w[1:]),
            refuse("zero points are uint8 [1, 128], one for each column", w_qkv_zeros=lambda z: z[:, 1:]),
            refuse("weights of 4 bits have scales", w_o_scales=lambda _: None),
        ],
        ranks=[
            OverPositions(
                2,
                settings=dict(heads=8, depth=128, half=64, norms=False, sequences=2, hidden=256),
                summed=True,
            ),
            *(
                OverHeads(
                    2,
                    dict(k_cache=1, v_cache=1, w_o=0),
                    dict(depth=128, half=64, hidden=256, norms=False, zeros=zeros),
                )
                for zeros in (True, False)
            ),
        ],
    )


def packed_layer(
    sequences: int = 3,
    hidden: int = 256,
    inner: int = 172,
    names: tuple[str, ...] = MATRICES,
    zeros: bool = True,
    biases: bool = False,
    group: int | None = None,
    **settings: Any,
) -> list[Any]:
    """Draw arguments whose matrices have 4 bits, or those in `names`; the others have 8 bits. group: as `pack_all`."""
    inputs = arguments(sequences, hidden, inner, **dict(dtype=BF16, heads=8, kv=2) | settings)
    inputs = pack_all(inputs, names, zeros, group)
    for name in MATRICES:
        if name not in names:
            inputs[name], inputs[f"{name}_scales"] = quantise(inputs[name].astype(F32), FP8)
    if not biases:
        inputs |= dict(b_gate=None, b_up=None, b_down=None)
    return [*inputs.values()]


class TestPackedDecoderLayerDecode(KernelTests):
    """Gate and up in groups of columns and without, the last product in groups and in chunks, and through HBM."""

    case = KernelCase(
        kernels.decoder_layer_decode,
        packed_layer,
        values=[
            *vary(sequences=[1, 3, 33, 65], inner=[127, 192, 256], positions=8, zeros=[True, False]),
            *vary(hidden=[512, 1024], inner=512, positions=8, biases=[True, False]),
            *vary(hidden=[127, 129, 768], positions=8),
            dict(nibble_dtype=lambda _: "bfloat16"),
            *vary(names=[("w_qkv", "w_o"), MLP_MATRICES, ("w_o",), MATRICES[:-1], ("w_down",)], inner=256),
            *vary(names=[MATRICES, MLP_MATRICES], group=[64, 128], inner=256, positions=8),
            *slow(dict(sequences=1, hidden=8192, inner=448, heads=4, kv=1)),
        ],
        every_chip=vary(positions=172, inner=[172, 512]),
        refusals=[
            refuse("w_down is [96, 256], not (95, 256)", w_down=lambda w: w[1:]),
            refuse(
                "one of gate and up is packed nibbles",
                w_up=np.zeros((256, 172), np.int8),
                w_up_zeros=lambda _: None,
            ),
            refuse("w_o_scales is float32 [1, 256], one for each", w_o_scales=lambda s: s[:, 1:]),
            refuse("w_qkv_scales is float32 [1,", w_qkv_scales=lambda s: np.repeat(s, 2, axis=0)),
        ],
        ranks=[
            OverHeads(
                2,
                dict(k_cache=1, v_cache=1, w_o=0, w_gate=1, w_up=1, w_down=0, w_gate_scales=1, w_up_scales=1),
                dict(sequences=sequences, inner=512, heads=16, kv=4, zeros=False),
            )
            for sequences in (2, 40)
        ],
        fits=slow(*vary(sequences=[64, 128], hidden=4096, inner=2048, heads=8, kv=1, positions=4096)),
    )


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (("w_qkv", "w_o"), None),
        (MLP_MATRICES, None),
        (MLP_MATRICES, 64),
        (MATRICES, 64),
        (("w_qkv", "w_o", "w_gate", "w_up"), None),
    ],
)
def test_layers_with_4_bits_in_part_or_in_groups_take_the_two_launches(
    names: tuple[str, ...], group: int | None
) -> None:
    """The bytes are those of the two kernels one after another."""
    inner = 172 if group is None else 192
    inputs = named(kernels.decoder_layer_decode, packed_layer(inner=inner, names=names, group=group))
    block, mlp = two_launches(inputs)
    layer = run(kernels.decoder_layer_decode, tuple(inputs.values()))
    attended = run(kernels.attention_block_decode, in_order(kernels.attention_block_decode, **block))
    y = run(kernels.mlp, in_order(kernels.mlp, **mlp | {"x": attended[0]}))
    for joint_array, array in zip(layer, (y, *attended[1:])):
        assert joint_array.tobytes() == array.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_no_finding_in_packed_decode_kernels(target: str) -> None:
    def launches() -> None:
        for sequences, inner in ((3, 512), (40, 172), (70, 172)):
            run(kernels.decoder_layer_decode, packed_layer(sequences, 256, inner, positions=16), target)
        run(kernels.attention_block_decode, packed_attention(depth=64, half=32, kv=1, block=16), target)

    assert find_faults(launches) == []
