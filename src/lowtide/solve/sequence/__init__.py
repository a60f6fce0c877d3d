"""Binomial checkpointing (Gruslys et al. 2016): equal steps, any memory, recomputation at many levels."""

from .actions import Backward, Forward, Load, Pop, Push, actions, replay, schedule
from .method import sequence, sequence_orders
from .table import forward_count

__all__ = [
    "Backward",
    "Forward",
    "Load",
    "Pop",
    "Push",
    "actions",
    "forward_count",
    "replay",
    "schedule",
    "sequence",
    "sequence_orders",
]
