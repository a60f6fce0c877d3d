"""The optimum of small graphs by a mixed-integer programme; needs the extra `lowtide[exact]`."""

from .method import Exact, exact, smallest_peak, solve_exact

__all__ = ["Exact", "exact", "smallest_peak", "solve_exact"]
