"""decoder_layer_decode: one launch does what two do, with the weights of the second under way while the first runs."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from simulate.hardware import hardware
from simulate.replay import ReplayCache
from simulate.timing import Reading, schedule
from tests.kernels.accuracy import (
    TARGETS,
    as_tuple,
    compare_all,
    copied,
    find_faults,
    in_order,
    normal,
    run,
)
from tests.kernels.case import BF16, DTYPES, F32, KernelCase, KernelTests, refuse, slow, together, vary
from tests.kernels.divided import OverHeads
from tests.kernels.test_attention_block_decode import quantised
from tests.kernels.test_feed_forward import FP8, INT8, quantise

DEPTH = 32
NAMES = [*inspect.signature(kernels.decoder_layer_decode).parameters]


def arguments(
    sequences: int,
    hidden: int,
    inner: int,
    heads: int = 4,
    kv: int = 2,
    positions: int = 129,
    dtype: Any = F32,
    seed: int = 0,
) -> dict[str, Any]:
    """Draw all arguments by name: heads of 32, biases in the MLP, which is gated by gelu; one seed for each batch."""
    q_size, kv_size = heads * DEPTH, kv * DEPTH
    last = np.random.default_rng(seed).integers(0, positions, (sequences, 1)).astype(np.int32)
    angles = np.arange(positions)[:, None] * 100.0 ** (-np.arange(DEPTH // 2) / (DEPTH // 2))

    def weight(number: int, rows: int, columns: int) -> np.ndarray:
        return normal(number, rows, columns, dtype=dtype, scale=rows**-0.5)

    inputs = {
        "x": normal(seed + 1, sequences, hidden, dtype=dtype),
        "norm_weight": normal(2, 1, hidden, dtype=dtype),
        "w_qkv": weight(3, hidden, q_size + 2 * kv_size),
        "eps": 1e-5,
        "q_size": q_size,
        "kv_size": kv_size,
        "k_cache": normal(seed + 4, sequences, kv, DEPTH, positions, dtype=dtype),
        "v_cache": normal(seed + 5, sequences, kv, positions, DEPTH, dtype=dtype),
        "positions": last,
        "scale": DEPTH**-0.5,
        "w_o": weight(6, q_size, hidden),
        "mlp_norm_weight": normal(7, 1, hidden, dtype=dtype),
        "w_gate": weight(8, hidden, inner),
        "w_up": weight(9, hidden, inner),
        "w_down": weight(10, inner, hidden),
        "num_kv_heads": kv,
        "cos": np.cos(angles).astype(F32),
        "sin": np.sin(angles).astype(F32),
        "q_norm": normal(11, 1, DEPTH, dtype=dtype),
        "k_norm": normal(12, 1, DEPTH, dtype=dtype),
        "activation": "gelu_tanh",
        "b_gate": normal(13, 1, inner, dtype=dtype),
        "b_up": normal(14, 1, inner, dtype=dtype),
        "b_down": normal(15, 1, hidden, dtype=dtype),
        "nibble_dtype": "float8_e4m3",
    }
    return {name: inputs.get(name) for name in NAMES}


def two_launches(layer_arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of attention_block_decode and of mlp, whose x is that of the layer."""
    block, mlp = (
        {
            name: layer_arguments[name]
            for name in inspect.signature(kernel).parameters
            if name in layer_arguments
        }
        for kernel in (kernels.attention_block_decode, kernels.mlp)
    )
    return block, mlp | {"norm_weight": layer_arguments["mlp_norm_weight"]}


def layer(sequences: int = 3, hidden: int = 256, inner: int = 172, **settings: Any) -> list[Any]:
    return [*arguments(sequences, hidden, inner, **settings).values()]


class TestDecoderLayerDecode(KernelTests):
    case = KernelCase(
        kernels.decoder_layer_decode,
        layer,
        every_chip=vary(positions=172, dtype=[*DTYPES]),
        values=slow(
            *together(
                "sequences hidden inner positions dtype",
                (1, 127, 129, 8, F32),
                (5, 129, 128, 128, F32),
                (127, 128, 127, 16, BF16),
                (1, 8192, 520, 130, F32),
                heads=2,
                kv=1,
            )
        ),
        ranks=[
            OverHeads(
                2,
                dict(k_cache=1, v_cache=1, w_o=0, w_gate=1, w_up=1, b_gate=1, b_up=1, w_down=0),
                dict(sequences=5, hidden=136, inner=258, dtype=dtype),
            )
            for dtype in DTYPES
        ],
        refusals=[refuse("w_down is [172, 256], not", w_down=normal(1, 172, 257))],
        fits=slow(
            *vary(sequences=128, hidden=8192, inner=2048, heads=8, kv=1, positions=4096, dtype=[*DTYPES])
        ),
    )


MATRICES = ("w_qkv", "w_o", "w_gate", "w_up", "w_down")


def quantised_layer(
    sequences: int = 3,
    hidden: int = 256,
    inner: int = 172,
    elements: Any = FP8,
    biases: bool = False,
    dtype: Any = BF16,
    **settings: Any,
) -> list[Any]:
    """Draw arguments with weights of 8 bits and their scales; `elements` is the weights' dtype."""
    inputs = arguments(sequences, hidden, inner, dtype=dtype, **settings)
    for name in MATRICES:
        inputs[name], inputs[f"{name}_scales"] = quantise(inputs[name].astype(F32), elements)
    if not biases:
        inputs |= dict(b_gate=None, b_up=None, b_down=None)
    return [*inputs.values()]


class TestQuantisedDecoderLayerDecode(KernelTests):
    """Weights of 8 bits with a scale for each column.

    Up to 32 and up to 64 rows take groups of columns of the PE array in the last product; more rows, biases, several
    ranks and other widths take none.
    """

    case = KernelCase(
        kernels.decoder_layer_decode,
        quantised_layer,
        every_chip=[dict(positions=172, elements=elements) for elements in (FP8, INT8)],
        values=[
            dict(biases=True),
            dict(sequences=1, hidden=127, inner=130, elements=INT8),
            dict(sequences=5, hidden=129, inner=128, biases=True),
            dict(dtype=F32, hidden=128),
            *vary(sequences=[33, 65], hidden=136, positions=8, inner=[127, 192]),
            *slow(dict(sequences=1, hidden=8192, inner=520, heads=2, kv=1)),
        ],
        refusals=[
            refuse("w_up_scales is float32 [1, 172], one for each", w_up_scales=normal(1, 1, 171)),
            refuse("w_down_scales is float32 [1, 256], one for each", w_down_scales=normal(1, 1, 172)),
            refuse("w_o_scales is float32 [1, 256], one for each", w_o_scales=normal(1, 1, 172)),
        ],
        ranks=[
            OverHeads(
                2,
                dict(k_cache=1, v_cache=1, w_o=0, w_gate=1, w_up=1, w_down=0, w_gate_scales=1, w_up_scales=1),
                dict(sequences=sequences, hidden=hidden, inner=inner, elements=elements),
            )
            # With 2060 elements the first weights of gate and up are loaded before the sum over ranks.
            for sequences, hidden, inner in ((2, 2060, 1040), (5, 136, 258))
            for elements in (FP8, INT8)
        ],
        fits=slow(*vary(sequences=[64, 128], hidden=4096, inner=2048, heads=8, kv=1, positions=4096)),
    )


@pytest.mark.parametrize(
    ("sequences", "hidden", "inner", "positions"), [(129, 64, 300, 12), (33, 8192, 64, 4)]
)
def test_rows_that_sbuf_does_not_hold_take_the_two_launches(
    sequences: int, hidden: int, inner: int, positions: int
) -> None:
    """The bytes are those of the two kernels one after another."""
    inputs = arguments(sequences, hidden, inner, 2, 1, positions, F32)
    block, mlp = two_launches(inputs)
    layer = run(kernels.decoder_layer_decode, tuple(inputs.values()), "trn2")
    between, *caches = run(
        kernels.attention_block_decode, in_order(kernels.attention_block_decode, **block), "trn2"
    )
    y = run(kernels.mlp, in_order(kernels.mlp, **mlp | {"x": between}), "trn2")
    for one, other in zip(layer, (y, *caches)):
        assert one.tobytes() == other.tobytes()


def test_two_batches_of_one_bucket_replay_one_program() -> None:
    """Positions, caches and rows differ; the second launch runs the program that the first one recorded."""
    replays = ReplayCache()
    for seed, mode in ((0, "eager"), (70, "replay")):
        inputs = tuple(arguments(4, 128, 128, seed=seed).values())
        launch = simulate.World("trn1", replays=replays).launch(
            kernels.decoder_layer_decode, [(copied(inputs), {})], mode=simulate.Mode.replay
        )
        assert launch.mode.value == mode
        compare_all(as_tuple(launch.outputs[0]), kernels.decoder_layer_decode_reference, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_weights_of_the_mlp_arrive_while_attention_runs(target: str) -> None:
    """In program order a launch takes less than its two parts one after another, where DMAs have a second queue.

    Without hardware descriptors (gen2) loads of the MLP queue behind stores of attention, and nothing is gained.
    """
    inputs = arguments(4, 2048, 1024, 16, 4, 1024, BF16)
    block, mlp = two_launches(inputs)
    times = []
    for kernel, keywords in (
        (kernels.attention_block_decode, block),
        (kernels.mlp, mlp),
        (kernels.decoder_layer_decode, inputs),
    ):
        done = simulate.World(target).launch(kernel, [((), keywords)], mode=simulate.Mode.dry)
        times.append(schedule(done.streams, done.hardware, Reading.program).length_ns)
    gain = 0.9 if hardware(target).hardware_dge else 1.01
    assert times[2] < gain * (times[0] + times[1])


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_no_finding_with_weights_of_8_bits(target: str) -> None:
    """In groups of columns of the PE array, in chunks, and with heads of two tiles."""

    def launches() -> None:
        for sequences, hidden in ((3, 256), (40, 136), (70, 136)):
            run(kernels.decoder_layer_decode, quantised_layer(sequences, hidden, positions=16), target)
        run(kernels.attention_block_decode, quantised(depth=192, half=40, block=16), target)

    assert find_faults(launches) == []


def test_two_cores_are_refused_and_one_is_not() -> None:
    inputs = tuple(arguments(1, 64, 64).values())
    simulate.launch(
        kernels.decoder_layer_decode, [(inputs, {})], simulate.hardware("trn2"), 1, mode=simulate.Mode.dry
    )
    with pytest.raises(
        AssertionError, match="takes one physical core; on two, launch attention_block_decode"
    ):
        simulate.launch(
            kernels.decoder_layer_decode, [(inputs, {})], simulate.hardware("trn2"), 2, mode=simulate.Mode.dry
        )
