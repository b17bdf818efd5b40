"""Verification: a replay is compared with an eager launch, within a bound for reordered float32 sums.

A rewritten program takes the float32 sums of matmuls in another order. A sum of n products in any order is within
gamma = n * 2**-24 / (1 - n * 2**-24) of the true sum, times the sum of the magnitudes of its terms (Higham, Accuracy
and Stability of Numerical Algorithms, section 3.1). Two orders differ by at most twice that.

The effect of such differences on the outputs is measured: the recorded program runs again with every product moved by
the whole difference, up or down at random. A replay may differ from the eager launch by the largest difference of
these runs, and by one last place of the output's dtype for its own rounding. Infinities, NaN and integers have to be
equal, unless those runs change them too: near the largest float32, a product is infinite in one run and NaN in another.
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
"""From this magnitude on the order may decide whether a sum overflows, also a sum of up to 256 products in PSUM."""


class ReplayMismatch(NkwError):
    """The values of a replay differ from those of an eager launch."""


@dataclass(frozen=True)
class Outcome:
    """The outputs of a launch and its array arguments afterwards, rank by rank."""

    outputs: Sequence[Any]
    arrays: Sequence[Sequence[np.ndarray]]

    def named(self) -> list[tuple[str, np.ndarray]]:
        """Every array with its name in error messages."""
        found: list[tuple[str, np.ndarray]] = []
        for rank, (output, arrays) in enumerate(zip(self.outputs, self.arrays)):
            of_rank = f" of rank {rank}" if len(self.outputs) > 1 else ""
            found += [(f"output {name}{of_rank}", array) for name, array in _leaves(output)]
            found += [(f"array argument {number}{of_rank}", array) for number, array in enumerate(arrays)]
        return found


def compare_exactly(kernel: str, replayed: Outcome, eager: Outcome) -> None:
    """Raise ReplayMismatch unless all bytes are equal."""
    for (name, got), (_, wanted) in zip(replayed.named(), eager.named()):
        if got.tobytes() != wanted.tobytes():
            different = np.ascontiguousarray(got).reshape(-1).view(np.uint8).reshape(got.size, -1)
            other = np.ascontiguousarray(wanted).reshape(-1).view(np.uint8).reshape(wanted.size, -1)
            count = int((different != other).any(axis=1).sum())
            raise ReplayMismatch(
                "NKW-REPLAY-MISMATCH",
                f"{kernel}: {name} of an exact replay differs from the eager launch in {count} of {got.size} elements",
            )


def compare_within_bound(
    kernel: str,
    replayed: Outcome,
    eager: Outcome,
    disturbed: Callable[[int], Outcome],
    single_process: bool = True,
) -> None:
    """Raise ReplayMismatch where a replay differs from the eager launch by more than reordered sums explain.

    `disturbed` runs the recorded program with the disturbance of a seed. Without `single_process` it always runs,
    because the ranks of other processes wait for it in their rendezvous.
    """
    names = [name for name, _ in eager.named()]
    got, wanted = ([array for _, array in each.named()] for each in (replayed, eager))
    if single_process and all(a.tobytes() == b.tobytes() for a, b in zip(got, wanted)):
        return
    moved = [[array for _, array in disturbed(seed).named()] for seed in range(_RUNS)]
    for place, name in enumerate(names):
        _compare(kernel, name, got[place], wanted[place], [run[place] for run in moved])


def _compare(kernel: str, name: str, got: np.ndarray, wanted: np.ndarray, moved: list[np.ndarray]) -> None:
    if got.dtype.kind in "iub":
        stable = all(np.array_equal(wanted, each) for each in moved)
        if stable and not np.array_equal(got, wanted):
            count = int(np.count_nonzero(got != wanted))
            raise ReplayMismatch(
                "NKW-REPLAY-MISMATCH",
                f"{kernel}: {name} differs from the eager launch in {count} of {got.size} elements",
            )
        return
    wide = [each.astype(np.float64) for each in (got, wanted, *moved)]
    finite = np.isfinite(wide[1]) & np.all([np.isfinite(each) for each in wide[2:]], axis=0)
    with np.errstate(invalid="ignore"):
        bound = max(
            (float(np.abs(each - wide[1])[finite].max(initial=0.0)) for each in wide[2:]), default=0.0
        )
    bound += last_place(wanted.dtype, float(np.abs(wide[1])[finite].max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        errors = np.where(finite, np.abs(wide[0] - wide[1]), 0.0)
    errors[finite & ~np.isfinite(wide[0])] = np.inf
    stays = ~np.isfinite(wide[1]) & np.all([_same(each, wide[1]) for each in wide[2:]], axis=0)
    errors[stays & ~_same(wide[0], wide[1])] = np.inf
    beyond = int(np.count_nonzero(errors > bound))
    if beyond:
        worst = np.unravel_index(int(np.argmax(errors)), errors.shape)
        raise ReplayMismatch(
            "NKW-REPLAY-MISMATCH",
            f"{kernel}: {name} differs from the eager launch in {beyond} of {got.size} elements by more than "
            f"the {bound:.3g} that reordered sums explain; at {tuple(int(i) for i in worst)} the replay has "
            f"{wide[0][worst]:.9g}, the eager launch {wide[1][worst]:.9g}",
        )


def _same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """A mask of the elements that are equal in two arrays; NaN equals NaN."""
    same: np.ndarray = (one == other) | (np.isnan(one) & np.isnan(other))
    return same


def disturbance(seed: int) -> Callable[[Plan, list[Any], np.ndarray], np.ndarray]:
    """A function that changes a matmul's product by the largest difference of two summation orders, up or down."""
    generator = np.random.default_rng(seed)

    def disturb(plan: Plan, operands: list[Any], product: np.ndarray) -> np.ndarray:
        terms = operands[0].size // max(1, product.shape[0])
        gamma = terms * _UNIT / (1 - terms * _UNIT)
        # An infinite or NaN term decides the sum in any order, unless the other terms overflow.
        finite = [np.where(np.isfinite(each), np.abs(each), np.float32(0)) for each in operands]
        magnitude = plan.compute(*finite)[0]
        signs = generator.choice(np.array([-2, 2], np.float32), product.shape)
        moved: np.ndarray = (product + signs * np.float32(gamma) * magnitude).astype(np.float32, copy=False)
        overflows = ~(magnitude < _NEAR_OVERFLOW)
        if overflows.any():
            moved[overflows] = (np.inf, np.nan)[seed % 2]
        return moved

    return disturb


def last_place(dtype: np.dtype[Any], magnitude: float) -> float:
    """The distance between neighbouring numbers of a float dtype at a magnitude."""
    details = ml_dtypes.finfo(dtype)
    if magnitude == 0.0:
        return float(details.smallest_subnormal)
    return float(2.0 ** np.floor(np.log2(magnitude)) * float(details.eps))


def copied(arrays: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """Copies of the arrays of every rank; the copies of arrays that share memory share memory as well."""
    given = {id(array): array for rank in arrays for array in rank}
    made: dict[int, np.ndarray] = {}
    block: list[np.ndarray] = []
    end = 0
    for array in sorted(given.values(), key=_address):
        if block and _address(array) >= end:
            made.update(_copy_of_block(block, end))
            block = []
        block.append(array)
        end = max(end, _address(array) + array.nbytes)
    if block:
        made.update(_copy_of_block(block, end))
    return [[made[id(array)] for array in rank] for rank in arrays]


def _address(array: np.ndarray) -> int:
    """Where the bytes of a contiguous array begin."""
    return int(array.__array_interface__["data"][0])


def _copy_of_block(block: Sequence[np.ndarray], end: int) -> Iterator[tuple[int, np.ndarray]]:
    """Copies of contiguous arrays that overlap between the first one's address and `end`."""
    start = _address(block[0])
    held = np.empty(end - start, np.uint8)
    for array in block:
        copy = np.ndarray(array.shape, array.dtype, held, _address(array) - start)
        copy[...] = array
        yield id(array), copy


def in_place_of(
    arrays: Sequence[Sequence[np.ndarray]], copies: Sequence[Sequence[np.ndarray]], value: Any
) -> Any:
    """Arguments with copies in place of their arrays."""
    copy_of = {id(array): copy for rank, held in zip(arrays, copies) for array, copy in zip(rank, held)}
    return map_leaves(lambda part: copy_of[id(part)] if isinstance(part, np.ndarray) else part, value)


def _leaves(value: Any, name: str = "") -> list[tuple[str, np.ndarray]]:
    if isinstance(value, np.ndarray):
        return [(name or "0", value)]
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in _leaves(part, f"{name}[{key!r}]")]
    if isinstance(value, (tuple, list)):
        return [
            leaf for i, part in enumerate(value) for leaf in _leaves(part, f"{name}.{i}" if name else str(i))
        ]
    return []
