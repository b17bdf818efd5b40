"""bn_aggr: mean and variance of each partition from the statistics of its parts."""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.memory import NkiTensor


@instruction
def bn_aggr(hardware: Hardware, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Plan:
    """Combine (count, mean, count * variance) triples per partition into mean and population variance, on Vector.

    data: [P, 3 n] @ SBUF or PSUM, what n / 2 bn_stats wrote. dst: [P, 2] @ SBUF or PSUM: mean, variance.
    Float32.

    The formula is not printed; with C = sum c it is mean = sum(c m) / C, variance = (sum v + sum c (m -
    mean)^2) / C, the only one that gives the variance of the parts joined. Triples of count 0 add nothing; if
    all are, NaN.

    Raises RuleViolation. Cost: 13 cycles per triple.
    """
    rules.check_unpacked(hardware, dst=dst, data=data)
    rules.same_partitions("dst", dst, "data", data)
    whole_triples(data)
    mean_and_variance(dst)
    return Plan(
        engine=Engine.vector,
        reads=(data,),
        writes=(dst,),
        domain=Domain.float32,
        compute=_compute,
        cost=costs.vector(hardware, data.free_size, "vector_bn_aggr_cycles_per_element"),
        name=name,
        propagate=propagation.within_partitions,
    )


def _compute(values: np.ndarray) -> tuple[np.ndarray]:
    triples = values.reshape(values.shape[0], -1, 3)
    counts, means, spreads = triples[..., 0], triples[..., 1], triples[..., 2]
    total = np.add.reduce(counts, axis=1, dtype=np.float32, keepdims=True)
    mean = np.add.reduce(counts * means, axis=1, dtype=np.float32, keepdims=True) / total
    away = means - mean
    variance = np.add.reduce(spreads + counts * away * away, axis=1, dtype=np.float32, keepdims=True) / total
    return (np.concatenate((mean, variance), axis=1),)


@rule("NKW-BN-AGGR-TRIPLES", hint="let every bn_stats write its six columns of data")
def whole_triples(data: NkiTensor) -> None:
    """bn_aggr takes whole triples, so a multiple of three elements per partition.

    Raises RuleViolation if data has another number of elements per partition.
    """
    if data.free_size % 3:
        raise RuleViolation(whole_triples, f"data has {data.free_size} elements per partition")


@rule("NKW-BN-AGGR-OUTPUT", limit="2", hint="allocate dst as (P, 2): mean, variance")
def mean_and_variance(dst: NkiTensor) -> None:
    """bn_aggr writes two elements per partition.

    Raises RuleViolation if dst has another number of elements per partition.
    """
    if dst.free_size != 2:
        raise RuleViolation(mean_and_variance, f"dst has {dst.free_size} elements per partition")
