"""mlp with weights in MXFP8 and MXFP4 and rows in MXFP8: values, definition, ranks, two cores and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from nki_kernels.projection.mx_operands import round_to_mx_reference
from nkw.errors import NkwError
from tests.kernels.accuracy import in_order, last_place, named, normal
from tests.kernels.case import BF16, DTYPES, F32, KernelCase, describe, vary

CHIP = "trn3"
MXFP8, MXFP4 = "mxfp8", "mxfp4"
FORMATS = [MXFP8, MXFP4]
WEIGHTS = ("w_gate", "w_up", "w_down")


def draw_weight(seed: int, rows: int, columns: int, format: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return elements and scales as kernels take them, and the numbers float32, of a random weight [rows, columns].

    All finite codes occur. Numbers are about as large as the root of 1 / rows.
    """
    rng = np.random.default_rng(seed)
    scales = rng.integers(-2, 3, (rows // 32, columns)) - int(np.log2(rows) / 2)
    if format == MXFP8:
        # Magnitudes from 2^-9 to 15 of each sign, and now and then a larger one.
        codes = rng.integers(0, 0x58, (rows, columns)) | rng.integers(0, 2, (rows, columns)) << 7
        codes = np.where(rng.random((rows, columns)) < 0.01, rng.integers(0, 0x7F, (rows, columns)), codes)
        numbers = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
        scales -= 2
    else:
        codes = rng.integers(0, 16, (rows, columns))
        numbers = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F32)
        scales -= 1
    numbers = numbers * np.exp2(np.repeat(scales, 32, axis=0)).astype(F32)
    return *store(codes, scales + 127, format), numbers


def store(codes: np.ndarray, scales: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Return packed elements in tile order, and scales, of codes [rows, columns] and biased exponents.

    Written from the layout's description, element by element: neither kernel nor reference share it.
    """
    rows, columns = codes.shape
    padded = -(-rows // 128) * 128
    bits, dtype = (8, np.uint32) if format == MXFP8 else (4, np.uint16)
    packed = np.zeros((padded // 4, columns), dtype)
    for row in range(rows):
        packed[row // 4] |= (codes[row].astype(np.int64) << bits * (row % 4)).astype(dtype)
    padded_scales = np.zeros((padded // 32, columns), np.uint8)
    padded_scales[: rows // 32] = scales
    return arrange_tiles(packed), padded_scales


def arrange_tiles(packed: np.ndarray) -> np.ndarray:
    """Return an array [packed row, column] in tile order."""
    full, ordered = len(packed) // 128, []
    for first in range(0, packed.shape[1], 512):
        panel = packed[:, first : first + 512]
        ordered += [panel[tile * 128 + p] for p in range(128) for tile in range(full)]
        ordered += [panel[row] for row in range(full * 128, len(panel))]
    return np.concatenate(ordered).reshape(packed.shape)


def mx_block(
    tokens: int = 3,
    hidden: int = 160,
    inner: int = 96,
    dtype: Any = BF16,
    format: str = MXFP8,
    w_gate: bool = True,
    biases: bool = False,
    norm_weight: bool = True,
    norm_bias: bool = False,
    row_gate: bool = False,
    activation: str = "silu",
    residual: bool = False,
) -> tuple[Any, ...]:
    """Return the arguments of a block with weights in an MX format; by default x is not added, which would hide it."""
    sizes = dict(w_gate=(hidden, inner), w_up=(hidden, inner), w_down=(inner, hidden))
    stored: dict[str, np.ndarray] = {}
    for seed, (name, size) in enumerate(sizes.items()):
        if name != "w_gate" or w_gate:
            stored[name], stored[f"{name}_scales"], _ = draw_weight(seed, *size, format)

    def row(seed: int, columns: int, present: bool) -> np.ndarray | None:
        return normal(seed, 1, columns, dtype=dtype) if present else None

    return in_order(
        kernels.mlp,
        **stored,
        x=normal(11, tokens, hidden, dtype=dtype),
        norm_weight=row(12, hidden, norm_weight),
        norm_bias=row(13, hidden, norm_bias),
        eps=1e-5,
        activation=activation,
        b_gate=row(16, inner, biases and w_gate),
        b_up=row(17, inner, biases),
        b_down=row(18, hidden, biases and not row_gate),
        row_gate=normal(19, hidden, 1, dtype=dtype) if row_gate else None,
        residual=residual,
        quantises_rows=True,
    )


def widen_block(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `mx_block` with float32 weights, and rows that are not rounded to MXFP8."""
    wide = arguments | dict(quantises_rows=False)
    depths = dict(
        w_gate=arguments["x"].shape[1], w_up=arguments["x"].shape[1], w_down=arguments["w_up"].shape[1]
    )
    for seed, name in enumerate(WEIGHTS):
        if arguments[name] is not None:
            format = MXFP8 if arguments[name].dtype == np.uint32 else MXFP4
            wide[name] = draw_weight(seed, depths[name], arguments[name].shape[1], format)[2]
            wide[f"{name}_scales"] = None
    return wide


def within_half_of_rounding(outputs: Sequence[np.ndarray], reference: Any, arguments: Sequence[Any]) -> None:
    """Assert that outputs are nearer to the reference than half of what its rounding of rows changes, and a last place.

    Sums in another order move a row's element across a boundary between two codes at times, as in
    `test_quantised_rows`. A rounded intermediate also changes by a last place of bfloat16.
    """
    (output,) = outputs
    by_name = dict(zip(named(kernels.mlp, arguments), arguments))
    truth = reference(*arguments).astype(np.float64)
    unrounded = reference(**widen_block(by_name)).astype(np.float64)
    bound = np.abs(truth - unrounded).max() / 2 + last_place(output.dtype, float(np.abs(truth).max()))
    assert np.abs(output.astype(np.float64) - truth).max() <= bound
    # Elements that sums in another order move are few.
    spread = np.abs(truth).max() * 2.0**-7
    assert (np.abs(output.astype(np.float64) - truth) <= spread).mean() > 0.99


CASE = KernelCase(
    kernels.mlp,
    mx_block,
    every_chip=[{}],
    tolerance=within_half_of_rounding,
    seeds=0,
)

VALUES = [
    *vary(tokens=[1, 2, 127, 128, 129], format=[*FORMATS]),
    *vary(hidden=[32, 128, 480, 512, 544], inner=64, format=MXFP8),
    *vary(hidden=[1024, 2560], inner=[32, 480], tokens=17, format=[*FORMATS]),
    *vary(inner=[32, 128, 480, 512, 544, 672], format=MXFP4),
    *vary(tokens=[2, 130], biases=True, w_gate=[True, False], activation="gelu", residual=True),
    *vary(tokens=[3, 128], hidden=512, norm_weight=[True, False], dtype=[*DTYPES], residual=True),
    *vary(tokens=[5, 130], norm_bias=True, dtype=[*DTYPES]),
    *vary(tokens=[5, 130], hidden=[512, 160], row_gate=True),
    *vary(tokens=5, hidden=[512, 160], norm_offset=1.0, activation=["gelu_tanh", "relu"]),
    dict(tokens=521, hidden=160, inner=160, format=MXFP4),
    dict(tokens=641, hidden=544, inner=544, residual=True),
]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(row, marks=[pytest.mark.deep] if index % 3 else [], id=describe(row))
        for index, row in enumerate(VALUES)
    ],
)
def test_values(settings: dict[str, Any]) -> None:
    CASE.check(settings, CHIP)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 128, 64), (5, 512, 544), (3, 160, 96)])
def test_numpy_reference_and_kernel_follow_a_definition_that_is_written_from_the_formats(
    tokens: int, hidden: int, inner: int, format: str
) -> None:
    """Rows of integers from -15 to 15, and relu: neither norm nor activation rounds, and sums are nearly exact."""
    arguments = named(
        kernels.mlp,
        mx_block(
            tokens=tokens, hidden=hidden, inner=inner, format=format, norm_weight=False, activation="relu"
        ),
    )
    arguments["x"] = np.random.default_rng(1).integers(-15, 16, (tokens, hidden)).astype(F32)
    wide = widen_block(arguments)
    gate, up = arguments["x"] @ wide["w_gate"], arguments["x"] @ wide["w_up"]
    values = (np.maximum(gate, 0) * up).astype(BF16).astype(F32).reshape(tokens, -1, 32)
    largest = np.abs(values).max(axis=2, keepdims=True)
    steps = 2.0 ** (np.floor(np.log2(np.where(largest > 0, largest, 1))) - 7)
    rounded = ((values / steps).astype(ml_dtypes.float8_e4m3fn).astype(F32) * steps).reshape(tokens, -1)
    expected = rounded @ wide["w_down"].astype(np.float64)
    # One code of 4 bits in a few hundred may lie on the other side of a boundary.
    bound = 2.0**-4 * (np.abs(rounded).max() * np.abs(wide["w_down"]).max()) + 1e-5 * np.abs(expected).max()
    reference = kernels.mlp_reference(**arguments)
    outputs = simulate.World(CHIP).launch(kernels.mlp, [((), arguments)]).outputs
    for output in (reference, np.asarray(outputs[0])):
        assert np.abs(output - expected).max() <= bound
        assert (np.abs(output - expected) <= 1e-5 * np.abs(expected).max()).mean() > 0.9


def test_rows_round_to_the_numbers_of_the_instruction() -> None:
    """Zeros, a power of two, a number just below one, subnormal ones, and the limits of bfloat16."""
    rows = np.zeros((6, 64), F32)
    rows[1], rows[1, 5] = 0.7, 256
    rows[2], rows[2, 40] = -3, 255.9
    rows[3], rows[3, 1] = 1e-3, 300
    rows[4] = 2.0**-126
    rows[5] = 3e38
    rounded = round_to_mx_reference(rows)
    assert not rounded[0].any()
    # 0.7 is 0.35 of the scale 2, and 179.2 of the scale 2^-8.
    assert rounded[1, 5] == 256 and (np.delete(rounded[1], 5) == 0.6875).all()
    assert rounded[2, 40] == 256 and (np.delete(rounded[2], 40) == -3).all()
    # 150 of the scale 2 becomes 144, and 1e-3 is below half of its least number, 2^-8.
    assert rounded[3, 1] == 288 and not rounded[3, [0, *range(2, 32)]].any()
    # The least scale is 2^-127, and 225 of the scale 2^120 becomes 224.
    assert (rounded[4] == 2.0**-126).all() and (rounded[5] == 224 * 2.0**120).all()


def split_over_ranks(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of `mlp` on each of two ranks, which have half of the intermediate's columns each.

    Tile order is that of a rank's part, so parts are stored anew from the codes.
    """
    hidden, inner = arguments["x"].shape[1], arguments["w_up"].shape[1]
    half, shards = inner // 2, [dict(arguments), dict(arguments)]
    for name in WEIGHTS:
        format = MXFP8 if arguments[name].dtype == np.uint32 else MXFP4
        rows = hidden if name != "w_down" else inner
        codes, scales = read_codes(arguments[name], arguments[f"{name}_scales"], rows, format)
        for rank, shard in enumerate(shards):
            span = slice(rank * half, (rank + 1) * half)
            shard_codes, shard_scales = codes[:, span], scales[:, span]
            if name == "w_down":
                shard_codes, shard_scales = codes[span], scales[span.start // 32 : span.stop // 32]
            shard[name], shard[f"{name}_scales"] = store(shard_codes, shard_scales, format)
    return shards


def read_codes(
    elements: np.ndarray, scales: np.ndarray, rows: int, format: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [rows, columns] and biased exponents of what `store` returns."""
    bits = 8 if format == MXFP8 else 4
    packed, columns = elements.shape
    order = arrange_tiles(np.arange(packed * columns).reshape(packed, columns))
    natural = np.empty_like(elements).reshape(-1)
    natural[order.reshape(-1)] = elements.reshape(-1)
    natural = natural.reshape(packed, columns)
    codes = np.stack([natural >> (bits * q) & (2**bits - 1) for q in range(4)], axis=1)
    return codes.reshape(-1, columns)[:rows].astype(np.int64), scales[: rows // 32]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("tokens", "cores"), [(4, 1), (4, 2), *(pytest.param(300, c, marks=pytest.mark.slow) for c in (1, 2))]
)
def test_two_ranks_give_the_sum_of_what_each_gives_alone(
    tokens: int, cores: int, cut: bool, format: str
) -> None:
    arguments = named(
        kernels.mlp, mx_block(tokens=tokens, hidden=160, inner=192, format=format, residual=True)
    )
    shards = split_over_ranks(arguments)
    world = simulate.World(CHIP)
    alone = [
        np.asarray(world.launch(kernels.mlp, [((), shard | dict(residual=False))]).outputs[0]).astype(
            np.float64
        )
        for shard in shards
    ]
    settings = dict(replica_group=ReplicaGroup([[0, 1]]), sequence_ranks=2 if cut else 1)
    rows = np.split(arguments["x"], 2) if cut else 2 * [arguments["x"]]
    world = simulate.World(CHIP, 2, cores)
    launches = [((), shard | settings | dict(x=x.copy())) for shard, x in zip(shards, rows)]
    outputs = [np.asarray(output) for output in world.launch(kernels.mlp, launches).outputs]
    expected = arguments["x"].astype(np.float64) + sum(alone)
    # Partial sums, their sum and y are rounded to bfloat16: three halves of a last place of the largest number.
    bound = 3 / 2 * 2.0**-7 * np.abs([*alone, expected]).max()
    for output in [np.concatenate(outputs)] if cut else outputs:
        assert np.abs(output.astype(np.float64) - expected).max() <= bound


@pytest.mark.parametrize(
    "settings",
    [
        *vary(tokens=[1, 128], hidden=[512, 544], inner=[512, 544, 1120]),
        dict(tokens=3, hidden=1056, inner=1536, format=MXFP4, biases=True, residual=True),
        dict(tokens=5, hidden=1024, inner=1024, row_gate=True, norm_bias=True),
        *vary(tokens=[129, 300], hidden=544, inner=160, residual=True),
    ],
    ids=describe,
)
def test_two_cores_give_the_values_of_one(settings: dict[str, Any]) -> None:
    """Cores divide rows, or units and columns of y where there are two of both; units are exchanged."""
    arguments = CASE.arguments(settings)
    single, divided = (CASE.run(arguments, CHIP, cores)[0].astype(np.float64) for cores in (1, 2))
    # Numpy adds the terms of a product of fewer rows in another order.
    assert np.abs(single - divided).max() <= 2.0**-7 * np.abs(single).max()


REFUSALS = [
    ("mlp takes a hidden size of at most 8192 in this MX format, not 8224", dict(hidden=8224, inner=32)),
    ("are multiplied by rows in MXFP8 alone; pass quantises_rows", dict(quantises_rows=False)),
    ("zero points are those of weights of 4 bits", dict(w_up_zeros=np.zeros((1, 96), np.uint8))),
    ("block scales are those of weights of 8 bits", dict(w_up_block_scales=np.ones((2, 1), F32))),
    ("w_up_scales of an MX format is uint8 [8, 96]", dict(w_up_scales=lambda scales: scales.astype(F32))),
    ("w_up_scales of an MX format is uint8 [8, 96]", dict(w_up_scales=lambda scales: scales[:-1])),
    (
        "w_down_scales of an MX format is uint8 [4, 160] for 96 rows of w_down, not None",
        dict(w_down_scales=None),
    ),
    ("w_gate_scales is given without w_gate", dict(w_gate=lambda _: None)),
    ("w_down in an MX format is uint32 (MXFP8) or uint16", dict(w_down=lambda elements: elements[:-1])),
    ("w_gate in an MX format is uint32 (MXFP8) or uint16", dict(w_gate=lambda elements: elements.view(F32))),
    ("w_gate in an MX format is uint32", dict(w_gate=lambda elements: elements[:, :-32].copy())),
    ("row_gate and b_down are both given", dict(row_gate=np.zeros((160, 1), BF16), biases=True)),
    ("norm_weight has to be [1, 160]", dict(norm_weight=np.zeros((1, 128), BF16))),
]


@pytest.mark.parametrize(("message", "settings"), REFUSALS)
def test_refuses_with_one_sentence(message: str, settings: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, NkwError)) as refused:
        CASE.dry(settings, CHIP)
    assert message in str(refused.value)


@pytest.mark.parametrize("settings", [{}, dict(hidden=8192, inner=32), dict(w_gate=False), dict(biases=True)])
def test_accepts_what_is_nearly_refused(settings: dict[str, Any]) -> None:
    CASE.dry(settings, CHIP)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_other_chips_refuse_weights_that_they_do_not_multiply(target: str) -> None:
    with pytest.raises((AssertionError, NkwError), match="which only trn3 multiplies; widen the weights"):
        CASE.dry({}, target)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hidden", [31, 33, 48])
def test_refuses_rows_that_share_a_scale_in_part(hidden: int, format: str) -> None:
    arguments = CASE.arguments(dict(hidden=64, inner=64, format=format, norm_weight=False))
    arguments["x"] = arguments["x"][:, :hidden].copy()
    with pytest.raises((AssertionError, NkwError), match=f"w_gate has {hidden} rows, not a multiple of 32"):
        simulate.World(CHIP).launch(kernels.mlp, [((), arguments)])


@pytest.mark.parametrize(
    "settings",
    [
        *vary(tokens=[1, 128, 300], hidden=8192, inner=896, dtype=[*DTYPES]),
        dict(tokens=130, hidden=8192, inner=16384, dtype=F32, biases=True, norm_bias=True),
        dict(tokens=130, hidden=16384, inner=16384, format=MXFP4),
        dict(tokens=600, hidden=8192, inner=16384, row_gate=True),
    ],
    ids=describe,
)
def test_large_sizes_fit(settings: dict[str, Any]) -> None:
    CASE.dry(settings, CHIP)
