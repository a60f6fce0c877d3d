"""From a schedule to a pair of graphs: what the copies of a node are called."""

from collections import Counter

import torch

from lowtide.capture import known_kernels
from lowtide.capture.kernel_outputs import Output
from lowtide.lowering.lower import lower
from lowtide.plans.keep_all import keep_all
from traces import lifted


def test_copies_of_a_node_are_named_after_it():
    """Not by the next number: torch before 2.13 would look for it from 1 on, for each of thousands."""
    w = torch.rand(16, 16, requires_grad=True)

    def step(x):
        for _ in range(3):
            x = (x @ w).relu()
        return x.sum()

    found, trace = lifted(step, torch.rand(16, 16), executor="inductor")
    pair = lower(trace, found, keep_all(found.graph))
    known = {node.name for node in trace.graph.nodes}
    calls = [node.name for node in pair.backward.graph.nodes if node.op == "call_function"]
    origins = Counter(name.partition("_copy")[0] for name in calls if not name.startswith("in_memory"))
    assert known.issuperset(origins)
    assert max(origins.values()) > 1


def test_a_tensor_that_a_kernel_returns_twice(monkeypatch):
    """As oneDNN's LSTM returns the gradient of its biases: both items stand for one value, and are there."""
    twice = Output(16, (1,), 0), Output(16, (1,), 0, shares=-1)
    kernel = torch.ops.aten.var_mean.correction
    monkeypatch.setattr(known_kernels, "by_rule", lambda node: twice if node.target is kernel else None)
    w = torch.rand(4, 4, requires_grad=True)

    def step(x):
        var, mean = torch.var_mean(x @ w, 0)
        return (var.sin() + mean.cos()).sum()

    found, trace = lifted(step, torch.rand(8, 4))
    pair = lower(trace, found, keep_all(found.graph))
    for module in (pair.forward, pair.backward):  # the forward saves the one tensor
        assert module.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
