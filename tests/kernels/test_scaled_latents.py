"""Caches of latent attention in fewer bits, with a scale of the latent and one of the key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import nki_kernels as kernels
from tests.kernels.accuracy import as_tuple, compare_all, copied
from tests.kernels.case import BF16, F32, KernelCase, KernelTests, refuse
from tests.kernels.test_latent_attention import batch, prompts
from tests.kernels.test_scaled_caches import E5M2, FP8

LARGEST = {np.int8: 127.0, FP8: 240.0, E5M2: 57344.0, BF16: 3e38}
WIDE = (4, 136, 8, 16, 20)
SCALES = {np.int8: (0.02, 0.03), FP8: (0.01, 0.015), E5M2: (1.0, 1.0), BF16: (1.0, 1.0)}
"""Scales of the latent and of the key; with those of int8 and FP8, some elements are clipped."""


def scaled(dtype: Any) -> dict[str, Any]:
    """Return settings of a cache of a dtype, with scales."""

    def store(rows: np.ndarray) -> np.ndarray:
        numbers = np.clip(rows.astype(F32) / SCALES[dtype][0], -LARGEST[dtype], LARGEST[dtype])
        return (np.rint(numbers) if dtype is np.int8 else numbers).astype(dtype)

    return dict(cache=store, row_scale=np.array([SCALES[dtype]], F32))


def within(outputs: Sequence[np.ndarray], reference: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Assert outputs as near as numpy's, and a cache with the bytes of the reference's.

    In float64 the cache keeps its dtype, as a rounded row is an input of attention.
    """
    index = next(i for i, array in enumerate(inputs) if isinstance(array, np.ndarray) and array.ndim == 3)
    dtype = inputs[index].dtype

    def compute(*operands: Any) -> tuple[np.ndarray, ...]:
        stored = [array.astype(dtype) if i == index else array for i, array in enumerate(operands)]
        return as_tuple(reference(*stored))[:-1]

    compare_all(outputs[:-1], compute, inputs)
    assert outputs[-1].tobytes() == as_tuple(reference(*copied(inputs)))[-1].tobytes()


FORMATS = [scaled(np.int8), scaled(FP8)]
OTHERS = [scaled(E5M2), scaled(BF16)]


class TestDecode(KernelTests):
    case = KernelCase(
        kernels.latent_attention_decode,
        batch,
        values=[
            *(
                dict(firsts=(0, 130, 171), sizes=WIDE, positions=172) | setting
                for setting in FORMATS + OTHERS
            ),
            *(dict(firsts=(0, 130), sizes=WIDE, positions=172, new=2, dtype=BF16) | case for case in FORMATS),
            *(
                dict(firsts=(200, 17), sizes=WIDE, positions=256, block=16, dtype=BF16) | setting
                for setting in FORMATS
            ),
            *(dict(firsts=(20, 7), sizes=(2, 129, 4, 6, 10)) | setting for setting in FORMATS),
        ],
        refusals=[
            refuse("all three need one dtype, or the cache row_scale", FORMATS[0], row_scale=lambda _: None),
            refuse(
                "row_scale is [1, 2], of latent and key, not (1, 1)",
                FORMATS[1],
                row_scale=np.ones((1, 1), F32),
            ),
            refuse("scales go with caches of int8", row_scale=np.ones((1, 2), F32)),
        ],
        tolerance=within,
    )


class TestPrompts(KernelTests):
    case = KernelCase(
        kernels.latent_keys_values,
        prompts,
        values=[
            *(
                dict(firsts=(0, 0), sizes=WIDE, positions=172, new=129) | setting
                for setting in FORMATS + OTHERS
            ),
            *(dict(sizes=WIDE, positions=172, new=127, dtype=BF16) | setting for setting in FORMATS),
            *(
                dict(firsts=(140, 20), sizes=WIDE, positions=256, new=70, block=16, prefix=144) | setting
                for setting in FORMATS
            ),
        ],
        refusals=[refuse("give kv both, or the cache row_scale", FORMATS[0], row_scale=lambda _: None)],
        tolerance=within,
        replays=False,
    )
