"""torch.compile's `activation_memory_budget`, as schedules of a Lowtide graph that the simulator can judge.

The partitioner is torch's own: `min_cut_rematerialization_partition` as in torch 2.13, with its defaults
(runtimes by "flops", knapsack by "dp"). It is given a copy of the joint graph that Lowtide lifts and splits
it into a forward and a backward; forward nodes that stand in the backward are recomputed there. Every node
carries the name that it has in Lowtide's graph, so the halves are two lists of ops. Views are no ops.

What the budget means to torch: 1.0 saves what its min cut does, which may run ops again that Inductor would
fuse into their readers; 0.0 saves nothing but the inputs of the step; what lies between is a share of the
bytes *saved*, between those two. It is no peak, and torch looks at none: with little saved, much of the
forward is recomputed and held at once.

How the comparison is set up:

- The graph is as eager runs it, not decomposed for Inductor: a LayerNorm is one op, and an op that is
  recomputed has its full price, where Inductor may fuse it away.
- Values are dropped after their last use, also where torch would hold a saved output of an op that it runs
  again for another of its outputs.
- Equal ops are not merged (`cse=False`), since each has its place in the graph; `merged` counts them.
- A plan for an absent GPU is traced on the CPU: its attention gets the class and the flops that the GPU's
  attention has, as torch would take it for a cheap op otherwise.
- Random ops are recomputed as they are: how torch restores their state (or does not) makes no difference
  here.
- Where torch would run an op again that may run only once, its value waits in memory; `pinned` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import config, partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch.utils import flop_counter

import lowtide
from lowtide.capture.trace import Trace
from lowtide.errors import LowtideError
from lowtide.pipeline.way_down import plan_step
from lowtide.plans.graph import Graph
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.schedule import Schedule
from lowtide.plans.simulator import simulate
from lowtide.stages import Planned, Priced

__all__ = ["BUDGETS", "Partitions", "torch_budget_schedules"]

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
SETTINGS: dict[str, Any] = {
    "activation_memory_budget_runtime_estimator": "flops",
    "activation_memory_budget_solver": "dp",
    "cse": False,
}
NAME = "lowtide_name"

aten = torch.ops.aten


class Partitions(dict[float, Schedule]):
    """Schedules by torch's budget; empty, with the `reason` in words, where torch could not make them.

    `unmapped` counts the nodes of torch's halves that stand for no node of the joint graph, `merged` the ops
    that torch would have merged with an equal one, `pinned` the ops that would have run twice.
    """

    reason: str = ""
    unmapped: int = 0
    merged: int = 0
    pinned: int = 0


def torch_budget_schedules(
    model: Callable[..., Any],
    batch: Sequence[Any],
    device: str | None = "H200",
    budgets: Sequence[float] = BUDGETS,
    *,
    kwargs: dict[str, Any] | None = None,
) -> tuple[Graph, Partitions]:
    """The graph of `lowtide.plan(model, *batch, device=device)` and torch's schedules for it.

    All is made under fake tensors, for a model on any device, the meta device included.
    """
    wrong = [budget for budget in budgets if not 0 <= budget <= 1]
    if wrong:
        raise LowtideError(f"torch's budget is a share from 0 to 1, not {wrong[0]}")
    found: list[Partitions] = []

    def plan_and_watch(priced: Priced) -> Planned:
        """Shows the joint graph to torch's partitioner once it is planned, while the capture lasts."""
        planned = plan_step(priced)
        found.append(_partitions(planned.plan.graph, priced.captured.trace, budgets))
        return planned

    with patch("lowtide.pipeline.way_down.plan_step", plan_and_watch):
        plan = lowtide.plan(model, *batch, device=device, kwargs=kwargs)
    return plan.graph, found[0]


def _partitions(graph: Graph, trace: Trace, budgets: Sequence[float]) -> Partitions:
    found = Partitions()
    try:
        found.merged = _merged(graph, trace)
        for budget in budgets:
            with _settings(budget):
                halves = partitioners.min_cut_rematerialization_partition(
                    _copy(trace),
                    None,
                    num_fwd_outputs=len(trace.outputs),
                    static_lifetime_input_indices=_static(trace),
                )
            found[budget] = _schedule(graph, halves, found)
    except Exception as error:  # torch's partitioner may fail in any way; the table says how
        found.clear()
        found.reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def _copy(trace: Trace) -> fx.GraphModule:
    """The joint graph with all its results, each node marked with its name."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in trace.graph.nodes:
        if node.op != "output":
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta[NAME] = node.name
    results = fx.map_arg([*trace.outputs, *trace.gradients], new.__getitem__)
    graph.output(results)
    return fx.GraphModule(trace.module, graph)


def _static(trace: Trace) -> list[int]:
    """The primals that are there anyway, so that torch counts them as free to save."""
    roles = [role for node, role in zip(trace.primals, trace.roles, strict=True) if "primals" in node.name]
    return [index for index, role in enumerate(roles) if role in ("parameter", "buffer")]


def _merged(graph: Graph, trace: Trace) -> int:
    """How many ops torch would merge with an equal one."""
    left = {node.meta.get(NAME) for node in fx_graph_cse(_copy(trace).graph).nodes}
    return sum(op.name not in left for op in graph.ops)


@contextmanager
def _settings(budget: float) -> Iterator[None]:
    """Torch's settings for one budget, with the CPU's attention known for what it is on a GPU."""
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    flops = flop_counter.flop_registry[aten._scaled_dot_product_flash_attention]
    ops = partitioners.get_default_op_list()
    ops = replace(ops, compute_intensive_ops=ops.compute_intensive_ops | {attention})
    with ExitStack() as stack:
        stack.enter_context(config.patch(activation_memory_budget=budget, **SETTINGS))
        stack.enter_context(patch.object(partitioners, "get_default_op_list", lambda: ops))
        stack.enter_context(patch.object(partitioners, "functionalize_rng_ops", _as_they_are))
        stack.enter_context(patch.dict(flop_counter.flop_registry, {attention: flops}))
        yield


def _as_they_are(_: Any, forward: fx.GraphModule, backward: fx.GraphModule, *__: Any) -> Any:
    """The halves without torch's handling of random state, which replaces nodes by others."""
    return forward, backward


def _schedule(graph: Graph, halves: Sequence[fx.GraphModule], found: Partitions) -> Schedule:
    """The schedule of torch's forward and backward, accepted by the simulator."""
    forward, backward = (_runs(graph, half, found) for half in halves)
    early = {name for name in forward if graph.op[name].kind == "pinned"}
    found.pinned = max(found.pinned, len(early.intersection(backward)))
    backward = [name for name in backward if name not in early]
    missing = set().union(*first_order(graph)).difference(forward, backward)
    assert not missing, f"torch's halves lack {len(missing)} ops, {min(missing)} among them"
    schedule = with_drops(graph, forward, backward)
    simulate(graph, schedule)
    return schedule


def _runs(graph: Graph, half: fx.GraphModule, found: Partitions) -> list[str]:
    calls = [node for node in half.graph.nodes if node.op == "call_function"]
    found.unmapped += sum(NAME not in node.meta for node in calls)
    return [node.meta[NAME] for node in calls if node.meta.get(NAME) in graph.op]
