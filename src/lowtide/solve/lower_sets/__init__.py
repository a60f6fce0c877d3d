"""Kusumoto et al. 2019: recomputation on any graph by dynamic programming over lower sets."""

from .family import (
    ForwardDag,
    TooManyLowerSets,
    all_lower_sets,
    ancestor_closures,
    boundary,
    sequence_bytes,
    sequence_overhead,
)
from .method import lower_set_orders, lower_sets
from .search import Found, best_sequence, smallest_budget

__all__ = [
    "ForwardDag",
    "Found",
    "TooManyLowerSets",
    "all_lower_sets",
    "ancestor_closures",
    "best_sequence",
    "boundary",
    "lower_set_orders",
    "lower_sets",
    "sequence_bytes",
    "sequence_overhead",
    "smallest_budget",
]
