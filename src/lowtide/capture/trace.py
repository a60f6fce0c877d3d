"""A trace: the joint forward-and-backward graph of a step as torch captured it, made ready to be lifted.

AOTAutograd hands over a functional `torch.fx` graph whose placeholders are primals (parameters, buffers,
inputs) and tangents (gradients of the outputs), and whose results are the forward's outputs followed by one
gradient per primal. These rewrites make it fit to be planned and to run as eager does, and as fast:

- `join_waits`: a collective and the wait for it are one op;
- `cast_once`, `cast_inside`: what autocast does in eager and not in a trace;
- `in_order_of_memory`: random numbers are drawn along the strides that eager draws along;
- `fuse_batch_norm`: the functional BatchNorm becomes the fused one of eager, statistics updated in place;
- `keep_workspaces`: oneDNN's LSTM layers run as in eager, where the backward reads what they leave for it;
- `keep_mutated_inputs`: what the backward reads of an input that the forward overwrites is cloned first;
- `drop_idle_views`: views that change nothing, which autograd leaves behind, are skipped;
- `conjugate_numbers`: the conjugate of a complex Python number is a number, not a tensor of its own;
- `materialise_zeros`: zeros without memory, of forward-mode derivatives, are made where an op needs them;
- `drop_copies`: a write into a part of a tensor reads its source directly, without a copy in between;
- `stack_selected`: the gradient of an unpacked tensor is stacked, as in eager, not summed from padded parts;
- `prune_tangents`: gradients that are known not to come are taken out, as eager autograd would;
- `settle`: fake tensors get the strides that kernels really return, where these are known;
- dead nodes are removed, except those that draw random numbers.

For a step that is going to be compiled others stand in the place of those that are eager's: `pad_once`,
`join_sums` for the gradients of what several concatenations read, and `copy_channels_last_once` where the
compiler is going to hold images with their channels last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..torch_state.autocast_state import State
from .awaited import NOBODY
from .deferred_output import Deferral
from .fx_nodes import depends_on, hooked_in_backward, mark_backward, mutations, tensors_of
from .known_kernels import KnownKernels
from .module_hooks import let_hooks_be_called
from .rewrites import accumulate, batchnorm, dropout, handing, stepping
from .rewrites.autocast import cast_inside, cast_once
from .rewrites.channels_last_inputs import copy_channels_last_once
from .rewrites.collectives import join_waits, share_waited
from .rewrites.common import (
    conjugate_numbers,
    drop_copies,
    drop_idle_views,
    keep_mutated_inputs,
    look_through_views,
    materialise_zeros,
    prune_tangents,
    remove_dead,
    separate_tangents,
    stack_selected,
)
from .rewrites.gradient_layout import lay_out
from .rewrites.own_generators import name_generators
from .rewrites.padding import pad_once
from .rewrites.random_draws import in_order_of_memory, is_drawn_in_backward
from .rewrites.real_strides import settle
from .rewrites.recurrent import keep_workspaces, refuse_libraries
from .rewrites.slice_sums import join_sums
from .step_inputs import StepInputs
from .stepped import used_up

__all__ = ["Manner", "Trace", "device_of", "make_trace"]


@dataclass
class Trace:
    """The joint graph of one step.

    `roles` gives for each primal what it is (`parameter`, `buffer`, `input`); `expected` are the tangents
    that the plan counts on. `accumulating` are the primals that have a gradient already, `awaited` the places
    of those whose new gradient is handed over as soon as it is complete, `updated` of those that an optimizer
    updates inside of the backward. `deferred` are results that are computed when somebody reads them.
    """

    module: fx.GraphModule
    primals: list[fx.Node]
    tangents: list[fx.Node]
    outputs: list[Any]
    gradients: list[Any]
    roles: list[str]
    expected: list[fx.Node]
    device: torch.device
    mutated: set[fx.Node] = field(default_factory=set)
    accumulating: list[fx.Node] = field(default_factory=list)
    awaited: frozenset[int] = frozenset()
    deferred: list[Deferral] = field(default_factory=list)
    updated: tuple[int, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """The fx graph itself."""
        return self.module.graph

    def backward_nodes(self) -> set[fx.Node]:
        """Nodes that depend on a tangent, or on what the backward alone does: draw, or call hooks."""
        late = (node for node in self.graph.nodes if is_drawn_in_backward(node) or hooked_in_backward(node))
        return depends_on(self.graph, [*self.tangents, *late])


@dataclass(frozen=True)
class Manner:
    """How a step will run, as far as its trace depends on that.

    A step that is going to be `compiled` keeps its ops as the compiler's decompositions left them;
    `channels_last` says that it will hold images so. `differentiate` is the option of that name,
    `backward_autocast` the state that the backward was traced in. `kernels` tells what kernels really return.
    `absent` are the places of outputs whose gradients were seen not to come.
    """

    differentiate: str = "auto"
    absent: frozenset[int] = frozenset()
    backward_autocast: State = ()
    compiled: bool = False
    channels_last: bool = False
    kernels: KnownKernels | None = None


def make_trace(joint: fx.GraphModule, inputs: StepInputs, manner: Manner, *, forward_outputs: int) -> Trace:
    """The trace of AOTAutograd's joint graph, rewritten in place."""
    mark_backward(joint.graph)
    for node in joint.graph.nodes:  # what a function keeps on its `ctx` would not be freed when dropped
        node.meta.pop("saved_tensor_with_no_vc_check", None)
    placeholders = joint.graph.find_nodes(op="placeholder")
    tangents = [node for node in placeholders if "tangents" in node.name]
    primals = [node for node in placeholders if "tangents" not in node.name]
    places, inputs = inputs.places(primals), inputs.by_primal(primals)
    tokens = places.count(None) if places else len(primals)
    if tokens or manner.compiled:  # effects come with results of their own; compiled code has no pauses
        inputs = replace(inputs, awaited=NOBODY, stepped=frozenset())
    separate_tangents([node for node in tangents if tensors_of(node)])
    expected = _expected(tangents, manner.differentiate)
    expected = [node for node in expected if tangents.index(node) not in manner.absent]
    device = device_of(joint.graph)
    weights = _Weights(primals[tokens:], inputs, forward_outputs)
    name_generators(joint, compiled=manner.compiled)
    _rewrite(joint.graph, primals, tangents, weights, manner)
    prune_tangents(joint.graph, [node for node in tangents if node not in expected], tangents)
    remove_dead(joint.graph, compiled=manner.compiled)
    if manner.channels_last:
        copy_channels_last_once(joint.graph, primals)
    if manner.kernels is not None:
        settle(joint.graph, manner.kernels)
        manner.kernels.save()
        remove_dead(joint.graph, compiled=manner.compiled)
    outputs, gradients = weights.split(joint.graph)
    gradients = gradients if manner.compiled else weights.as_kept(joint.graph, gradients)
    return Trace(
        module=joint,
        primals=primals,
        tangents=tangents,
        outputs=outputs,
        gradients=gradients,
        roles=[*("input" for _ in primals[:tokens]), *inputs.roles],
        expected=expected,
        device=device,
        mutated={node.args[0] for node in mutations(joint.graph)},  # type: ignore[misc]
        accumulating=[]
        if manner.compiled
        else [primals[tokens:][place] for place in sorted(inputs.accumulating)],
        awaited=inputs.awaited.places,
        updated=tuple(place for place, node in enumerate(gradients) if stepping.is_update(node)),
    )


@dataclass(frozen=True)
class _Weights:
    """The primals that are inputs of the step, what is known of them, and where their gradients are."""

    primals: list[fx.Node]
    inputs: StepInputs
    forward_outputs: int

    def split(self, graph: fx.Graph) -> tuple[list[Any], list[Any]]:
        """The outputs of the forward, and one gradient per primal."""
        results = _results(graph)
        return results[: self.forward_outputs], results[self.forward_outputs :]

    def cast_once(self, graph: fx.Graph) -> None:
        cast_once(graph, self.primals, self.split(graph)[1], self.inputs.cast_once)

    def as_kept(self, graph: fx.Graph, gradients: list[Any]) -> list[Any]:
        """The gradients as autograd keeps them in `.grad`: added to what is there, and laid out so."""
        waiting = self.inputs.awaited
        added = _accumulated(graph, self.primals, gradients, self.inputs.accumulating - waiting.places)
        adding = (
            self.inputs.accumulating & waiting.gone & _alone(added)
        )  # by autograd, whatever their strides
        laid_out = lay_out(graph, self.primals, added, self.inputs.leaves - adding)
        handed = handing.insert(graph, laid_out, sorted(waiting.gone & _alone(laid_out)))
        going = self.inputs.stepped & _alone(laid_out) - waiting.places - self.inputs.accumulating
        return stepping.insert(graph, handed, used_up(graph, laid_out, going))


def _rewrite(
    graph: fx.Graph, primals: list[fx.Node], tangents: list[fx.Node], weights: _Weights, manner: Manner
) -> None:
    """The rewrites that need nothing but the graph, in their order."""
    refuse_libraries(graph)
    let_hooks_be_called(graph, compiled=manner.compiled)
    share_waited(graph)
    if manner.compiled:
        pad_once(graph)
        look_through_views(graph)
        join_sums(graph)
    else:
        join_waits(graph)
        weights.cast_once(graph)
        cast_inside(graph, tangents, manner.backward_autocast)
        in_order_of_memory(graph)
        batchnorm.fuse(graph)
        dropout.as_in_eager(graph)
        keep_workspaces(graph)
    keep_mutated_inputs(graph, primals, tangents)
    drop_idle_views(graph)
    if not manner.compiled:
        conjugate_numbers(graph)
        materialise_zeros(graph)
        drop_copies(graph)
        stack_selected(graph)


def _expected(tangents: list[fx.Node], differentiate: str) -> list[fx.Node]:
    """With "auto", a step with a scalar output is trained on its scalars alone: that is a loss."""
    opaque = [node for node in tangents if not tensors_of(node)]  # what a gradient is made of beside tensors
    scalars = [node for node in tangents if node not in opaque and node.meta["val"].numel() == 1]
    return [*scalars, *opaque] if scalars and differentiate == "auto" else tangents


def device_of(graph: fx.Graph) -> torch.device:
    """The device that a step is planned on: the one of its inputs, an accelerator if there is one."""
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    accelerators = sorted((device for device in devices if device.type != "cpu"), key=str)
    return accelerators[0] if accelerators else torch.device("cpu")


def _accumulated(
    graph: fx.Graph, primals: list[fx.Node], gradients: list[Any], accumulating: frozenset[int]
) -> list[Any]:
    """The gradients, those of the given primals replaced by what is left after adding them."""
    # What is added in place for one primal would be lost for another, so autograd adds those.
    alone = sorted(accumulating & _alone(gradients))
    added = accumulate.insert(graph, [(primals[index], gradients[index]) for index in alone])
    return [added.get(gradient, gradient) for gradient in gradients]


def _alone(gradients: list[Any]) -> set[int]:
    """The places whose gradient is no other's: one node may be the gradient of two primals."""
    uses = Counter(gradient for gradient in gradients if isinstance(gradient, fx.Node))
    return {place for place, gradient in enumerate(gradients) if uses[gradient] == 1}


def _results(graph: fx.Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    return _flat(output.args[0])


def _flat(results: Any) -> list[Any]:
    if isinstance(results, list | tuple):
        return [item for part in results for item in _flat(part)]
    return [results]
