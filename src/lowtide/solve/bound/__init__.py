"""A proven lower bound on the seconds of every schedule under a budget."""

from .method import lower_bound

__all__ = ["lower_bound"]
