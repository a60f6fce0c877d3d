"""Linear layers that keep a sketch of their input (Bershatsky et al. 2022).

In: a model, or a captured step with marks of its sketched layers.
Out: the model with those layers; the step with as few sketches as its budget needs.
Imports: capture/, console/, measuring/, plans/, solve/.
"""

from .noise_found import LayerNoise, Noise, noise
from .sketched_model import sketch, unsketch

__all__ = ["LayerNoise", "Noise", "noise", "sketch", "unsketch"]
