"""Which experts have the best scores of each token, and their weights: the end of `router`.

Tokens lie on the partitions, experts side by side, so a search over experts is one along the free dim.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.top_k import MISSING, multiple_of_eight, take_largest

LEAST_SEARCHED = 8
"""Elements that the Vector engine searches at least; fewer experts are padded."""

TINY = 1.0e-20
"""Added to the sum of sigmoid scores before they are divided by it, as DeepSeek-V3 does."""


def searched(rows, columns):
    """Room for as many scores of each row, followed by MISSING where there are fewer than a search takes."""
    result = nl.ndarray((rows, max(columns, LEAST_SEARCHED)), dtype=nl.float32, buffer=nl.sbuf)
    if columns < LEAST_SEARCHED:
        nisa.memset(dst=result[:, columns:LEAST_SEARCHED], value=MISSING)
    return result


def largest(scores, count):
    """The `count` largest of each row of scores and their places, rounded up to a multiple of eight: the lowest first.

    The scores are kept. A place that is none, which NaN gives, becomes the last one.
    """
    rows = scores.shape[0]
    found = multiple_of_eight(count)
    values = nl.ndarray((rows, found), dtype=nl.float32, buffer=nl.sbuf)
    places = nl.ndarray((rows, found), dtype=nl.uint32, buffer=nl.sbuf)
    take_largest(values, places, scores, nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf))
    return values, places


def valid_places(places, count, experts):
    """The first `count` places as numbers of experts."""
    result = nl.ndarray((places.shape[0], count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=places[:, 0:count], op0=nl.minimum, operand0=float(experts - 1))
    return result


def softmax_choice(logits, experts, top_k, renormalise, grouping, scale):
    """Weights [rows, K] and numbers of the experts with the largest logits, within the best groups."""
    rows = logits.shape[0]
    groups, top_groups = grouping
    choice = within_groups(logits, groups, top_groups, 1) if top_groups < groups else logits
    values, found = largest(choice, top_k)
    lowered = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=lowered, data=values[:, 0:1], op0=nl.multiply, operand0=-1.0)
    places = valid_places(found, top_k, experts)
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    weights = nl.ndarray((rows, top_k), dtype=nl.float32, buffer=nl.sbuf)
    exponentials(weights, values[:, 0:top_k], lowered, total)
    if not renormalise:
        every = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf)
        exponentials(every, logits[:, 0:experts], lowered, total)
    return divided(weights, total, scale), places


def exponentials(result, values, lowered, total):
    """exp(value - largest) of each row, and their sum."""
    nisa.activation(
        dst=result,
        op=nl.exp,
        data=values,
        bias=lowered,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def divided(weights, total, scale):
    """Each row of weights divided by its total, times a number."""
    inverse = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    nisa.tensor_scalar(
        dst=weights, data=weights, op0=nl.multiply, operand0=inverse, op1=nl.multiply, operand1=scale
    )
    return weights


def sigmoid_choice(logits, experts, choice_bias, top_k, renormalise, grouping, scale):
    """Weights [rows, K] and numbers of the experts with the largest sigmoid scores, within the best groups."""
    rows = logits.shape[0]
    groups, top_groups = grouping
    scores = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=scores, op=nl.sigmoid, data=logits[:, 0:experts])
    choice = searched(rows, experts)
    if choice_bias is None:
        nisa.tensor_copy(dst=choice[:, 0:experts], src=scores)
    else:
        nisa.tensor_tensor(dst=choice[:, 0:experts], data1=scores, data2=choice_bias[0:rows, :], op=nl.add)
    if top_groups < groups:
        choice = within_groups(choice, groups, top_groups, 2)
    places = valid_places(largest(choice, top_k)[1], top_k, experts)
    at = nl.ndarray((rows, top_k), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=at, src=places)
    weights = nl.ndarray((rows, top_k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=weights, data=scores, indices=at)
    if not renormalise:
        nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=scale)
        return weights, places
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=weights, axis=1)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=TINY)
    return divided(weights, total, scale), places


def within_groups(choice, groups, top_groups, counted):
    """The scores of the experts of the best groups, and MISSING for all others: [rows, E].

    A group counts as the sum of its largest `counted` scores, one or two.
    """
    rows, experts = choice.shape
    size = experts // groups
    best = nl.ndarray((rows, groups, LEAST_SEARCHED), dtype=nl.float32, buffer=nl.sbuf)
    for group in range(groups):
        nisa.max8(dst=best[:, group, :], src=choice[:, group * size : (group + 1) * size])
    sums = searched(rows, groups)
    if counted == 1:
        nisa.tensor_copy(dst=sums[:, 0:groups], src=best[:, :, 0])
    else:
        nisa.tensor_tensor(dst=sums[:, 0:groups], data1=best[:, :, 0], data2=best[:, :, 1], op=nl.add)
    places = nl.ndarray((rows, top_groups), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=places, src=largest(sums, top_groups)[1][:, 0:top_groups])
    numbers = nl.ndarray((rows, groups), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=[[1, groups]])
    taken = nl.ndarray((rows, groups), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=taken, value=0.0)
    for i in range(top_groups):
        nisa.scalar_tensor_tensor(
            dst=taken, data=numbers, op0=nl.equal, operand0=places[:, i : i + 1], op1=nl.add, operand1=taken
        )
    mask = nl.ndarray((rows, groups), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mask, src=taken)
    result = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=result, value=MISSING)
    nisa.tensor_copy_predicated(
        dst=result.reshape_dim(1, (groups, size)),
        src=choice.reshape_dim(1, (groups, size)),
        predicate=mask.expand_dim(2).broadcast(2, size),
    )
    return result
