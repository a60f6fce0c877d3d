"""Small models for end-to-end tests: deep for their size, with activations that outweigh the parameters."""

from . import attention, convolutional, dense, experts, huggingface, odd, outputs, randomness, recurrent
from .case import ZOO, Case, scalar, tensors

__all__ = [
    "ZOO",
    "Case",
    "attention",
    "convolutional",
    "dense",
    "experts",
    "huggingface",
    "odd",
    "outputs",
    "randomness",
    "recurrent",
    "scalar",
    "tensors",
]
