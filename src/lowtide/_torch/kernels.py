"""Traces of the kernels that eager runs, where torch has other ones for tracing."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..process_wide import Change
from .names import private


class eager_kernels(Change):  # noqa: N801  # reads as a noun where it is used
    """Trace resizing ops and recurrent layers as the kernels that eager runs (`py_kernels`, in 2.11-2.13).

    For these torch keeps Python decompositions that only tracing uses: a dozen ops in place of one kernel,
    slower without a fusing compiler, rounded differently, and with other masks of dropout between layers.
    """

    def make(self) -> None:
        """Take these decompositions away."""
        for op in replaced_in_traces():
            self.undone_by(functools.partial(_give_kernels, op, dict(op.py_kernels)))
            for key in (private("DispatchKey").Autograd, private("DispatchKey").CompositeImplicitAutograd):
                op.py_kernels.pop(key, None)
            op._dispatch_cache.clear()


def _give_kernels(op: Any, kernels: dict[Any, Any]) -> None:
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@functools.cache
def replaced_in_traces() -> list[Any]:
    packets = [
        getattr(torch.ops.aten, name)
        for name in dir(torch.ops.aten)
        if "upsample" in name or name in _RECURRENT
    ]
    found = [packet for packet in packets if hasattr(packet, "overloads")]
    return [getattr(packet, overload) for packet in found for overload in packet.overloads()]
