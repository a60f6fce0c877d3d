"""What is known of a device's kernels before a step runs: learnt in an earlier step, measured, or by rule.

A step may be planned where nothing may run: there a rule speaks for the kernels that are known to return
other strides than tracing foretells. Where prices are measured, each op has run once. And what an executor
saw in the first run of a step holds for the rest of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import fx

from .fx_nodes import read_by, tensors_of
from .kernel_outputs import Outputs, outputs_of
from .op_signature import signature
from .rewrites.stride_rules import by_rule

__all__ = ["KnownKernels", "learn"]

_LEARNT: dict[str, Outputs] = {}


class MeasuredKernels(Protocol):
    """Kernels of a device that may be run, on made-up inputs, for what they return."""

    def __call__(self, node: fx.Node) -> Outputs | None:
        """How the outputs of an op lie in memory; None for one that would not run alone."""

    def learn(self, facts: dict[str, Outputs]) -> None:
        """Take up what was seen of ops, by signature."""

    def save(self) -> None:
        """Remember what is new."""


def learn(facts: dict[str, Outputs], kernels: Callable[[], MeasuredKernels] | None) -> bool:
    """Keep what ops returned, by their signatures: for this process, and beside what was measured.

    Whether any of it was not known before.
    """
    new = any(_LEARNT.get(key) != outputs for key, outputs in facts.items())
    _LEARNT.update(facts)
    if kernels is not None:
        measured = kernels()
        measured.learn(facts)
        measured.save()
    return new


class KnownKernels:
    """Tells how the outputs of an op lie in memory, where that is known; runs ops where it may."""

    def __init__(self, kernels: Callable[[], MeasuredKernels] | None = None) -> None:
        self.kernels = None if kernels is None else kernels()

    def __call__(self, node: fx.Node) -> Outputs | None:
        """The outputs of an op that reads fake tensors; None where nothing is known."""
        if _has_unknown_sizes(node):
            return None
        learnt = _LEARNT.get(signature(node)) if _LEARNT else None
        if learnt is not None or _is_view(node):
            return learnt
        measured = self.kernels(node) if self.kernels is not None else None
        return by_rule(node) if measured is None else measured

    def save(self) -> None:
        """Remember what was measured."""
        if self.kernels is not None:
            self.kernels.save()


def _is_view(node: fx.Node) -> bool:
    """Whether a node makes no storage: there is no kernel that could return another."""
    outputs = outputs_of(node.meta["val"], read_by(node))
    return all(output is None or output.shares is not None for output in outputs)


def _has_unknown_sizes(node: fx.Node) -> bool:
    sizes = (size for tensor in (*tensors_of(node), *read_by(node)) for size in tensor.shape)
    return any(isinstance(size, torch.SymInt) for size in sizes)
