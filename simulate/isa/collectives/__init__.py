"""Collectives: instructions that the ranks of a replica group carry out together, one file per movement."""

from simulate.isa.collectives import (  # noqa: F401  (imported for the entries they make in the book)
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
    ring,
    variable,
)
from simulate.isa.collectives.group import ReplicaGroup

__all__ = ["ReplicaGroup"]
