"""From a schedule to a pair of graphs: what the copies of a node are called."""

from collections import Counter

import torch

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
