"""Hong et al. 2025: the checkpoints of a chain with the least peak."""

from .laws import Measured
from .method import Checkpoints, chain, chain_orders, checkpoints, peak_of

__all__ = ["Checkpoints", "Measured", "chain", "chain_orders", "checkpoints", "peak_of"]
