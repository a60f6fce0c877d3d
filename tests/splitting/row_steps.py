"""Steps in plain functions, traced with their gradients, to be split and run as they are."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.capture.trace import Trace

MARK = "lowtide_traced_in_backward"


def trace_of(function, *args):
    """The trace of a loss and of its gradients for all inputs of real numbers; results are these."""
    seen = {}

    def step(*tensors):
        reals = [t.requires_grad_() for t in tensors if t.dtype.is_floating_point]
        found = function(*tensors)
        outputs = found if isinstance(found, tuple) else (found,)
        seen["outputs"] = len(outputs)
        return (*outputs, *torch.autograd.grad(outputs[0], reals))

    module = make_fx(step, tracing_mode="fake")(*(arg.detach().clone() for arg in args))
    module.graph.eliminate_dead_code()
    (end,) = module.graph.find_nodes(op="output")
    outputs, gradients = list(end.args[0][: seen["outputs"]]), list(end.args[0][seen["outputs"] :])
    feeding = {outputs[0]}
    for node in reversed(module.graph.nodes):
        if node in feeding:
            feeding.update(node.all_input_nodes)
    before = True
    for node in module.graph.nodes:  # autograd begins where nothing is for the loss any more
        before = before and (node in feeding or node in outputs or node.op == "placeholder")
        if not before and node.op == "call_function" and node not in feeding:
            node.meta[MARK] = True
    primals = module.graph.find_nodes(op="placeholder")
    roles = ["parameter" for _ in primals]
    return Trace(module, primals, [], outputs, gradients, roles, [], torch.device("cpu"))


def results(trace, *args):
    """What the graph of a trace comes to."""
    graph = fx.Graph()
    there = {}
    graph.graph_copy(trace.graph, there)
    found = [there.get(n, n) if isinstance(n, fx.Node) else n for n in (*trace.outputs, *trace.gradients)]
    graph.output(tuple(found))
    return fx.GraphModule(trace.module, graph)(*args)
