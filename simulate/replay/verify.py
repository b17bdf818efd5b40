"""Verification: comparison of a replay with an eager launch, within a bound for reordered float32 sums.

A rewritten program takes the float32 sums of matmuls in another order. The error of a sum of n products in any order is
at most gamma = n * 2**-24 / (1 - n * 2**-24), times the sum of the magnitudes of its terms (Higham, Accuracy and
Stability of Numerical Algorithms, section 3.1). Two orders differ by at most twice that.

The effect of such differences on the outputs is measured: the recorded program runs again with every product shifted by
the whole difference, up or down at random. A replay may differ from the eager launch by the largest difference of these
runs plus one unit in the last place of the output's dtype. Infinities, NaN and integers have to be equal, unless those
runs change them too: near the largest float32, a product is infinite in one run and NaN in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from nkw.errors import NkwError
from simulate.isa.plan import Plan
from simulate.run.arguments import map_leaves

_UNIT = 2.0**-24  # half the distance from 1 to the next float32
_RUNS = 2
_NEAR_OVERFLOW = np.float32(2.0**120)
"""Magnitude from which the order may decide whether a sum of up to 256 products overflows."""


class ReplayMismatch(NkwError):
    """Error for a replay whose values differ from those of an eager launch."""


@dataclass(frozen=True)
class Outcome:
    """What a launch left: the outputs of each rank, and the array arguments of each rank after the launch."""

    outputs: Sequence[Any]
    arrays: Sequence[Sequence[np.ndarray]]

    def list_named_arrays(self) -> list[tuple[str, np.ndarray]]:
        """Return (name in error messages, array) for every array in the outputs and arguments of all ranks."""
        named_arrays: list[tuple[str, np.ndarray]] = []
        for rank, (output, arrays) in enumerate(zip(self.outputs, self.arrays)):
            rank_suffix = f" of rank {rank}" if len(self.outputs) > 1 else ""
            named_arrays += [(f"output {name}{rank_suffix}", array) for name, array in _name_leaves(output)]
            named_arrays += [
                (f"array argument {index}{rank_suffix}", array) for index, array in enumerate(arrays)
            ]
        return named_arrays


def compare_exactly(kernel: str, replayed: Outcome, eager: Outcome) -> None:
    """Raise ReplayMismatch unless all outputs and array arguments of two launches have equal bytes."""
    for (name, replayed_array), (_, eager_array) in zip(
        replayed.list_named_arrays(), eager.list_named_arrays()
    ):
        if replayed_array.tobytes() != eager_array.tobytes():
            replayed_bytes = (
                np.ascontiguousarray(replayed_array)
                .reshape(-1)
                .view(np.uint8)
                .reshape(replayed_array.size, -1)
            )
            eager_bytes = (
                np.ascontiguousarray(eager_array).reshape(-1).view(np.uint8).reshape(eager_array.size, -1)
            )
            count = int((replayed_bytes != eager_bytes).any(axis=1).sum())
            raise ReplayMismatch(
                "NKW-REPLAY-MISMATCH",
                f"{kernel}: {name} of an exact replay differs from the eager launch in {count} of "
                f"{replayed_array.size} elements; their bytes must be equal; report the kernel, "
                "which shows a fault of the simulator",
            )


def compare_within_bound(
    kernel: str,
    replayed: Outcome,
    eager: Outcome,
    run_perturbed: Callable[[int], Outcome],
    single_process: bool = True,
) -> None:
    """Raise ReplayMismatch if a replay differs from an eager launch by more than reordered sums explain.

    Args:
        kernel: The name of the kernel, for messages.
        replayed: The outputs and arguments of the replay.
        eager: The outputs and arguments of the eager launch.
        run_perturbed: A function that runs the recorded program with the perturbation of a seed.
        single_process: Whether this process has all ranks. Otherwise the perturbed runs always take place, because
            ranks of other processes wait for them in their rendezvous.
    """
    names = [name for name, _ in eager.list_named_arrays()]
    replayed_arrays, eager_arrays = (
        [array for _, array in outcome.list_named_arrays()] for outcome in (replayed, eager)
    )
    if single_process and all(
        replayed_array.tobytes() == eager_array.tobytes()
        for replayed_array, eager_array in zip(replayed_arrays, eager_arrays)
    ):
        return
    perturbed_arrays = [
        [array for _, array in run_perturbed(seed).list_named_arrays()] for seed in range(_RUNS)
    ]
    for index, name in enumerate(names):
        _compare(
            kernel,
            name,
            replayed_arrays[index],
            eager_arrays[index],
            [perturbed[index] for perturbed in perturbed_arrays],
        )


def _compare(
    kernel: str, name: str, replayed: np.ndarray, eager: np.ndarray, perturbed_arrays: list[np.ndarray]
) -> None:
    """Raise ReplayMismatch if one array of a replay differs from the eager launch's beyond the bound.

    Args:
        kernel: The name of the kernel, for messages.
        name: The name of the array, for messages.
        replayed: The array of the replay.
        eager: The array of the eager launch.
        perturbed_arrays: The arrays of the perturbed runs, whose largest difference from `eager` plus one unit in the
            last place is the bound for floats. Integers must be equal, unless a perturbed run changes them.
    """
    if replayed.dtype.kind in "iub":
        stable = all(np.array_equal(eager, perturbed) for perturbed in perturbed_arrays)
        if stable and not np.array_equal(replayed, eager):
            count = int(np.count_nonzero(replayed != eager))
            raise ReplayMismatch(
                "NKW-REPLAY-MISMATCH",
                f"{kernel}: {name} differs from the eager launch in {count} of {replayed.size} elements; "
                "integers must be equal; set NKW_EXACT_REPLAY=1 and report the kernel",
            )
        return
    wide = [array.astype(np.float64) for array in (replayed, eager, *perturbed_arrays)]
    finite = np.isfinite(wide[1]) & np.all([np.isfinite(perturbed) for perturbed in wide[2:]], axis=0)
    with np.errstate(invalid="ignore"):
        bound = max(
            (float(np.abs(perturbed - wide[1])[finite].max(initial=0.0)) for perturbed in wide[2:]),
            default=0.0,
        )
    bound += compute_ulp(eager.dtype, float(np.abs(wide[1])[finite].max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        errors = np.where(finite, np.abs(wide[0] - wide[1]), 0.0)
    errors[finite & ~np.isfinite(wide[0])] = np.inf
    must_match = ~np.isfinite(wide[1]) & np.all(
        [_is_equal(perturbed, wide[1]) for perturbed in wide[2:]], axis=0
    )
    errors[must_match & ~_is_equal(wide[0], wide[1])] = np.inf
    beyond = int(np.count_nonzero(errors > bound))
    if beyond:
        worst = np.unravel_index(int(np.argmax(errors)), errors.shape)
        raise ReplayMismatch(
            "NKW-REPLAY-MISMATCH",
            f"{kernel}: {name} differs from the eager launch in {beyond} of {replayed.size} elements by more than "
            f"the {bound:.3g} that reordered sums explain; at {tuple(int(i) for i in worst)} the replay has "
            f"{wide[0][worst]:.9g}, the eager launch {wide[1][worst]:.9g}; "
            "set NKW_EXACT_REPLAY=1 and report the kernel",
        )


def _is_equal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the mask of elements that are equal in two arrays; NaN equals NaN."""
    equal: np.ndarray = (first == second) | (np.isnan(first) & np.isnan(second))
    return equal


def perturb_within_rounding(seed: int) -> Callable[[Plan, list[Any], np.ndarray], np.ndarray]:
    """Return a function that shifts each element of a matmul's product by the worst-case rounding difference.

    That is the largest difference between two float32 summation orders, with a random sign that depends on `seed`.
    The function takes a matmul's plan, operands and product, and returns the shifted product; elements that may
    overflow become infinite or NaN.
    """
    generator = np.random.default_rng(seed)

    def perturb(plan: Plan, operands: list[Any], product: np.ndarray) -> np.ndarray:
        terms = operands[0].size // max(1, product.shape[0])
        gamma = terms * _UNIT / (1 - terms * _UNIT)
        # An infinite or NaN term decides the sum in any order, unless the other terms overflow.
        finite = [np.where(np.isfinite(operand), np.abs(operand), np.float32(0)) for operand in operands]
        magnitude = plan.compute(*finite)[0]
        signs = generator.choice(np.array([-2, 2], np.float32), product.shape)
        perturbed_product: np.ndarray = (product + signs * np.float32(gamma) * magnitude).astype(
            np.float32, copy=False
        )
        overflows = ~(magnitude < _NEAR_OVERFLOW)
        if overflows.any():
            perturbed_product[overflows] = (np.inf, np.nan)[seed % 2]
        return perturbed_product

    return perturb


def compute_ulp(dtype: np.dtype[Any], magnitude: float) -> float:
    """Return the distance between neighbouring numbers of a float dtype at a magnitude."""
    details = ml_dtypes.finfo(dtype)
    if magnitude == 0.0:
        return float(details.smallest_subnormal)
    return float(2.0 ** np.floor(np.log2(magnitude)) * float(details.eps))


def copy_arrays(arrays: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """Return copies of the arrays of every rank; arrays that share memory have copies that share memory as well."""
    arrays_by_id = {id(array): array for rank in arrays for array in rank}
    copies_by_id: dict[int, np.ndarray] = {}
    block: list[np.ndarray] = []
    end = 0
    for array in sorted(arrays_by_id.values(), key=_get_address):
        if block and _get_address(array) >= end:
            copies_by_id.update(_copy_block(block, end))
            block = []
        block.append(array)
        end = max(end, _get_address(array) + array.nbytes)
    if block:
        copies_by_id.update(_copy_block(block, end))
    return [[copies_by_id[id(array)] for array in rank] for rank in arrays]


def _get_address(array: np.ndarray) -> int:
    """Return the address of the first byte of a contiguous array."""
    return int(array.__array_interface__["data"][0])


def _copy_block(block: Sequence[np.ndarray], end: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the id and the copy of each array of a block of overlapping contiguous arrays.

    The block extends from the address of the first array to `end`. The copies overlap in the same way.
    """
    start = _get_address(block[0])
    copied_bytes = np.empty(end - start, np.uint8)
    for array in block:
        copy = np.ndarray(array.shape, array.dtype, copied_bytes, _get_address(array) - start)
        copy[...] = array
        yield id(array), copy


def replace_arrays(
    arrays: Sequence[Sequence[np.ndarray]], copies: Sequence[Sequence[np.ndarray]], value: Any
) -> Any:
    """Return arguments in which each array of `arrays` is replaced by the one in the same place of `copies`."""
    copies_by_id = {
        id(array): copy for rank, rank_copies in zip(arrays, copies) for array, copy in zip(rank, rank_copies)
    }
    return map_leaves(lambda leaf: copies_by_id[id(leaf)] if isinstance(leaf, np.ndarray) else leaf, value)


def _name_leaves(value: Any, name: str = "") -> list[tuple[str, np.ndarray]]:
    """Return (path, array) for every array in nested tuples, lists and dicts; `name` is the path of `value`."""
    if isinstance(value, np.ndarray):
        return [(name or "0", value)]
    if isinstance(value, dict):
        return [leaf for key, element in value.items() for leaf in _name_leaves(element, f"{name}[{key!r}]")]
    if isinstance(value, (tuple, list)):
        return [
            leaf
            for i, element in enumerate(value)
            for leaf in _name_leaves(element, f"{name}.{i}" if name else str(i))
        ]
    return []
