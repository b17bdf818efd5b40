"""Selection of the experts with the best scores of each token, and their weights: the end of `router`.

Tokens lie on the partitions, experts side by side, so a search over experts is one along the free dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.top_k import MISSING, round_up_to_eight, take_largest
from nki_kernels.tiles import filled

LEAST_SEARCHED = 8
"""Elements that the Vector engine searches at least; fewer experts are padded."""

TINY = 1.0e-20
"""Added to the sum of sigmoid scores before they are divided by it, as DeepSeek-V3 does."""


@dataclass
class Selection(nl.NKIObject):
    """How `top_k` of `experts` experts are selected, within the `top_groups` best of `groups` groups.

    A group is a range of consecutive experts.

    scoring: "softmax" or "sigmoid". renormalise: whether weights are divided by their sum. scale: factor of weights.
    """

    experts: int
    top_k: int
    scoring: str
    renormalise: bool
    groups: int
    top_groups: int
    scale: float


@dataclass
class SelectedExperts(nl.NKIObject):
    """Experts of a tile of tokens in SBUF: weights [row, K] float32 and ids [row, K] int32, best first."""

    weights: nl.NkiTensor
    ids: nl.NkiTensor


@dataclass
class Largest(nl.NKIObject):
    """Largest elements of each row in descending order: values [row, n] float32 and their indices [row, n] uint32."""

    values: nl.NkiTensor
    indices: nl.NkiTensor


def allocate_scores(rows, columns):
    """Allocate a tile [rows, n] float32 @ SBUF for `columns` scores of each row, n being at least LEAST_SEARCHED.

    Columns behind the scores are set to MISSING; the scores are not written.
    """
    result = nl.ndarray((rows, max(columns, LEAST_SEARCHED)), dtype=nl.float32, buffer=nl.sbuf)
    if columns < LEAST_SEARCHED:
        nisa.memset(dst=result[:, columns:LEAST_SEARCHED], value=MISSING)
    return result


def find_largest(scores, count):
    """Return the `Largest` elements of each row of scores, `count` rounded up to a multiple of 8.

    The scores stay unchanged. Equal scores come with the lowest index first. Where NaN leaves no index, the index
    becomes the last one.
    """
    rows = scores.shape[0]
    rounded = round_up_to_eight(count)
    values = nl.ndarray((rows, rounded), dtype=nl.float32, buffer=nl.sbuf)
    indices = nl.ndarray((rows, rounded), dtype=nl.uint32, buffer=nl.sbuf)
    take_largest(values, indices, scores, nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf))
    return Largest(values, indices)


def convert_to_ids(indices, selection):
    """Return the first `top_k` of indices [row, n] uint32 as ids of experts: [row, K] int32, none above E - 1."""
    result = nl.ndarray((indices.shape[0], selection.top_k), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result,
        data=indices[:, 0 : selection.top_k],
        op0=nl.minimum,
        operand0=float(selection.experts - 1),
    )
    return result


def select_by_softmax(logits, selection):
    """Return the `SelectedExperts` with the largest logits [row, E] float32 @ SBUF, weighted by their softmax.

    E is padded as `allocate_scores` does. Without renormalisation the softmax is over all experts, else over the
    selected.
    """
    rows = logits.shape[0]
    experts, top_k = selection.experts, selection.top_k
    choice = keep_best_groups(logits, selection, 1) if selection.top_groups < selection.groups else logits
    largest = find_largest(choice, top_k)
    # The largest logit is the first one found; exp of what others are less cannot overflow.
    negated = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=negated, data=largest.values[:, 0:1], op0=nl.multiply, operand0=-1.0)
    ids = convert_to_ids(largest.indices, selection)
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    weights = nl.ndarray((rows, top_k), dtype=nl.float32, buffer=nl.sbuf)
    sum_exponentials(weights, largest.values[:, 0:top_k], negated, total)
    if not selection.renormalise:
        # Weights that are not renormalised are shares of all experts, of groups that were not taken as well.
        terms = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf)
        sum_exponentials(terms, logits[:, 0:experts], negated, total)
    divide(weights, total, selection.scale)
    return SelectedExperts(weights, ids)


def sum_exponentials(result, values, negated, total):
    """Write exp(value - largest) of values [row, n] to `result`, and the sum of each row to `total` [row, 1].

    negated: minus the largest value of each row, [row, 1].
    """
    nisa.activation(
        dst=result,
        op=nl.exp,
        data=values,
        bias=negated,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def divide(weights, total, scale):
    """Divide each row of weights [row, K] by its total [row, 1], and multiply it by the number `scale`, in place."""
    inverse = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    nisa.tensor_scalar(
        dst=weights, data=weights, op0=nl.multiply, operand0=inverse, op1=nl.multiply, operand1=scale
    )


def select_by_sigmoid(logits, choice_bias, selection):
    """Return the `SelectedExperts` with the largest sigmoid scores of logits [row, E] float32 @ SBUF.

    choice_bias: [row, E] float32, added to the scores for the selection only, or None. E is padded as `allocate_scores`
    does.
    """
    rows = logits.shape[0]
    experts, top_k = selection.experts, selection.top_k
    scores = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=scores, op=nl.sigmoid, data=logits[:, 0:experts])
    choice = allocate_scores(rows, experts)
    if choice_bias is None:
        nisa.tensor_copy(dst=choice[:, 0:experts], src=scores)
    else:
        nisa.tensor_tensor(dst=choice[:, 0:experts], data1=scores, data2=choice_bias[0:rows, :], op=nl.add)
    if selection.top_groups < selection.groups:
        choice = keep_best_groups(choice, selection, 2)
    ids = convert_to_ids(find_largest(choice, top_k).indices, selection)
    indices = nl.ndarray((rows, top_k), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=indices, src=ids)
    weights = nl.ndarray((rows, top_k), dtype=nl.float32, buffer=nl.sbuf)
    # The bias counts for the choice alone, so weights are gathered from the scores without it.
    nisa.nc_n_gather(dst=weights, data=scores, indices=indices)
    if not selection.renormalise:
        nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=selection.scale)
        return SelectedExperts(weights, ids)
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=weights, axis=1)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=TINY)
    divide(weights, total, selection.scale)
    return SelectedExperts(weights, ids)


def keep_best_groups(choice, selection, scores_per_group):
    """Return a copy of the scores [row, E] with MISSING for the experts outside each row's `top_groups` best groups.

    A group counts as the sum of its largest `scores_per_group` scores, one or two.
    """
    rows, experts = choice.shape
    groups, top_groups = selection.groups, selection.top_groups
    size = experts // groups
    best = nl.ndarray((rows, groups, LEAST_SEARCHED), dtype=nl.float32, buffer=nl.sbuf)
    for group in range(groups):
        nisa.max8(dst=best[:, group, :], src=choice[:, group * size : (group + 1) * size])
    sums = allocate_scores(rows, groups)
    if scores_per_group == 1:
        nisa.tensor_copy(dst=sums[:, 0:groups], src=best[:, :, 0])
    else:
        nisa.tensor_tensor(dst=sums[:, 0:groups], data1=best[:, :, 0], data2=best[:, :, 1], op=nl.add)
    indices = nl.ndarray((rows, top_groups), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=indices, src=find_largest(sums, top_groups).indices[:, 0:top_groups])
    numbers = nl.ndarray((rows, groups), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=[[1, groups]])
    taken = filled((rows, groups), 0.0)
    for i in range(top_groups):
        nisa.scalar_tensor_tensor(
            dst=taken, data=numbers, op0=nl.equal, operand0=indices[:, i : i + 1], op1=nl.add, operand1=taken
        )
    # A predicate is a tile of unsigned integers.
    mask = nl.ndarray((rows, groups), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mask, src=taken)
    result = filled((rows, experts), MISSING)
    nisa.tensor_copy_predicated(
        dst=result.reshape_dim(1, (groups, size)),
        src=choice.reshape_dim(1, (groups, size)),
        predicate=mask.expand_dim(2).broadcast(2, size),
    )
    return result
