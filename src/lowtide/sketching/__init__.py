"""Linear layers that keep a sketch of their input."""

from .noise import LayerNoise, Noise, noise
from .sketch import sketch, unsketch

__all__ = ["LayerNoise", "Noise", "noise", "sketch", "unsketch"]
