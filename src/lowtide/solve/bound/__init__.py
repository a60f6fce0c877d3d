"""A proven lower bound on the seconds of every schedule under a budget."""

from ...plans import ports
from .tightest import lower_bound

__all__ = ["lower_bound"]

ports.fill("lower_bound", lower_bound)
