"""timestep_embedding: against diffusers, times up to thousands of radians, sizes around tiles and banks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import TARGETS, normal, run
from tests.kernels.case import BF16, DTYPES, F32, KernelCase, KernelTests, limit, refuse, slow, together, vary
from tests.kernels.diffusers_oracles import EMBEDDINGS, TIMES, read_recordings, record_embedding


def times(
    images: int = 2,
    count: int = 8,
    depth: int = 20,
    hidden: int = 12,
    largest: float = 1000.0,
    dtype: type = F32,
    parameters: type | None = None,
    added: bool = True,
) -> list[Any]:
    t = np.abs(normal(1, images, 1))
    weights = parameters or dtype
    return [
        (t * np.float32(largest) / max(1, t.max())).astype(F32),
        normal(2, count, depth, dtype=dtype, scale=count**-0.5),
        normal(3, 1, depth, dtype=weights),
        normal(4, depth, hidden, dtype=weights, scale=depth**-0.5),
        normal(5, 1, hidden, dtype=weights),
        normal(6, images, hidden, dtype=dtype) if added else None,
    ]


class TestTimestepEmbedding(KernelTests):
    case = KernelCase(
        kernels.timestep_embedding,
        times,
        every_chip=[
            *vary(dtype=[*DTYPES], parameters=[*DTYPES], added=[True, False]),
            *vary(images=[1, 3, 127, 128], dtype=[*DTYPES]),
            # sinusoids around the constant frequencies, and around a tile
            *vary(count=[2, 30, 32, 34, 62, 64, 66, 126, 128, 130, 256, 300]),
            *vary(depth=[1, 127, 128, 129, 511, 512, 513, 650], dtype=[*DTYPES]),
            *slow(*vary(hidden=[1, 511, 512, 513, 2047, 2048, 2049])),
            *vary(flip_sin_to_cos=[True, False], downscale_freq_shift=[0.0, 0.5, 1.0], count=32),
            *together("scale largest", (1000.0, 1.0), (0.25, 1000.0), (1.0, 60000.0), (-1.0, 1000.0)),
            dict(max_period=100.0),
        ],
        refusals=[
            refuse("w_1 [F, K]", w_1=normal(2, 8)),
            refuse("w_2 [K, H]", w_2=normal(4, 20)),
            refuse("t [N, 1]", t=normal(1, 2)),
            refuse("t is [N, 1] float32, not (2, 2)", t=normal(1, 2, 2)),
            refuse("t is [N, 1] float32, not (2, 1) bfloat16", t=normal(1, 2, 1, dtype=BF16)),
            refuse("an even number of sinusoids up to 2048, not 7", count=7),
            refuse(
                "downscale_freq_shift is below 4, half of the sinusoids, not 4.0",
                dict(downscale_freq_shift=3.75),
                downscale_freq_shift=4.0,
            ),
            refuse("b_1 is [1, 20], not (1, 19)", b_1=normal(3, 1, 19)),
            refuse("w_2 has 19 rows for 20 columns of w_1", w_2=normal(4, 19, 12)),
            refuse("b_2 is [1, 12], not (12, 1)", b_2=normal(5, 12, 1)),
            refuse("added is [2, 12], not (1, 12)", added=normal(6, 1, 12)),
            refuse("added is bfloat16, y is float32", added=normal(6, 2, 12, dtype=BF16)),
        ],
        limits=[
            limit("images", 128, "at most 128 images, not 129"),
            limit("count", 2048, "an even number of sinusoids up to 2048, not 2050", step=2, dry=True),
            limit("depth", 16384, "contracts at most 16384, not 16385", dry=True),
            limit("hidden", 8192, "a hidden size of at most 8192, not 8193", dry=True),
        ],
        fits=[dict(images=128, count=2048, depth=16384, hidden=8192)],
        two_cores=[dict(hidden=300), dict(hidden=1100, dtype=BF16)],
        two_sums=[dict(hidden=2)],
    )


def bound_distance(arguments: list[Any], rounding: float) -> np.ndarray:
    """Return a bound [N, H] on the distance of two results, each with roundings of its own.

    Sinusoids differ by the errors of both, and by a rounding in each. Sums of n terms have at most n roundings of 2^-24
    in each result. diffusers rounds each product, its SiLU and the sum with `added`; the slope of SiLU is below 1.1.

    rounding: relative error of a rounding to the weights' dtype, 0 for float32.
    """
    w_1, b_1, w_2, b_2, added = (np.abs(np.asarray(array, F32)) for array in arguments[1:6])
    angles = np.array(TIMES)[:, None]
    unit = 2.0**-24
    sinusoids = angles * (4 + 8) * unit + 2.0**-20 + 2.0**-22 + 2 * rounding
    largest_sums = w_1.sum(0, keepdims=True) + b_1
    sums = sinusoids * w_1.sum(0, keepdims=True) + largest_sums * (2 * len(w_1) * unit + 2 * rounding)
    embeddings = 1.1 * sums + largest_sums * (2 * rounding + 4 * unit)
    largest = largest_sums @ w_2 + b_2 + added
    return np.asarray(embeddings @ w_2 + largest * (2 * len(w_2) * unit + 4 * rounding))


def check_embedding(name: str, recorded: np.ndarray, target: str) -> None:
    """Compare the kernel and its reference with what diffusers makes of a case's arguments."""
    case = EMBEDDINGS[name]
    arguments = case.draw()
    is_narrow = case.dtype == "bfloat16"
    arguments[1:6] = [array.astype(BF16 if is_narrow else F32) for array in arguments[1:6]]
    bound = bound_distance(arguments, 2.0**-9 if is_narrow else 0.0)
    for output in (
        run(kernels.timestep_embedding, arguments, target),
        kernels.timestep_embedding_reference(*arguments),
    ):
        assert (np.abs(output.astype(F32) - recorded) <= bound).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_are_those_of_diffusers(name: str, target: str) -> None:
    check_embedding(name, read_recordings()[name], target)


@pytest.mark.parametrize("target", TARGETS)
def test_sinusoids_keep_to_their_error_at_large_angles(target: str) -> None:
    """A product with ones and small weights leaves the sinusoids, as SiLU is linear around 0 up to x^2 / 4."""
    count, slope = 64, 2.0**-10
    t = np.array([[0.0], [0.1], [3.14159], [100.0], [999.0], [1000.0], [65536.0]], F32)
    identity = np.eye(count, dtype=F32)
    zeros = np.zeros((1, count), F32)
    arguments = (t, identity * F32(slope), zeros, identity * F32(2 / slope), zeros)
    sinusoids = run(kernels.timestep_embedding, arguments, target)
    angles = t.astype(np.float64) * 10000.0 ** (-np.arange(count // 2) / (count // 2))
    exact = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    bound = 2.0**-22 * np.tile(angles, 2) + 2.0**-20 + slope / 2
    assert (np.abs(sinusoids - exact) <= bound).all()


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_are_those_of_installed_diffusers(name: str) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    check_embedding(name, record_embedding(EMBEDDINGS[name]), "trn2")
