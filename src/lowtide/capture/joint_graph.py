"""Through AOTAutograd: it traces a step's forward and backward as one joint graph and asks what to run.

What stands at its partitioner's place splits the joint graph in two; what stands at its compilers' places
makes a function of each half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from torch import fx

from .._torch import (
    JointTrace,
    code_on_demand,
    eager_kernels,
    keeping_draws,
    private,
    telling_of_a_capture,
    without_graph_texts,
)
from ..process_wide import attributes, lock_of_torch
from ..torch_state.autocast_state import State, as_torch_reads_it

__all__ = ["Halves", "aot_settings", "capturing", "through_aot"]

capturing = lock_of_torch(private("compile_lock"))
"""Held while a step is captured: one capture at a time in the process.

It is the lock of torch's front end, which holds it while it calls a backend: two locks would be taken in one
order by a first call, and in the other by torch.compile.
"""

Boxed = Callable[[list[Any]], Any]


class Halves(Protocol):
    """What AOTAutograd asks for: a pair of graphs, and the function of each."""

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **facts: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward of a joint graph."""

    def forward(self, module: fx.GraphModule, inputs: Any) -> Boxed:
        """The function of the forward."""

    def backward(self, module: fx.GraphModule, inputs: Any) -> Boxed:
        """The function of the backward."""

    def inference(self, module: fx.GraphModule, inputs: Any) -> Boxed:
        """The function of a graph that no gradient passes."""


def through_aot(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    halves: Halves,
    autocast: State,
    trace: JointTrace | None = None,
) -> Callable[..., Any]:
    """The function of a step, as AOTAutograd puts it together from its halves.

    A `trace` of the same module for inputs like these is taken as it is, and filled where it is empty.
    """
    settings = {"donated_buffer": False, **aot_settings(autocast)}
    patched = attributes(private("functorch_config"), **settings)
    with (
        capturing,
        telling_of_a_capture(),
        patched,
        eager_kernels(),
        keeping_draws(),
        without_graph_texts(),
        code_on_demand(),
        nullcontext() if trace is None else trace.in_use(),
    ):
        return private("aot_module_simplified")(  # type: ignore[no-any-return]
            module,
            list(inputs),
            fw_compiler=halves.forward,
            bw_compiler=halves.backward,
            inference_compiler=halves.inference,
            partition_fn=halves.partition,
            keep_inference_input_mutations=True,
        )


def aot_settings(autocast: State) -> dict[str, Any]:
    """What AOTAutograd is told of a step whose backward comes in a state of autocast."""
    return {"backward_pass_autocast": as_torch_reads_it(autocast)}
