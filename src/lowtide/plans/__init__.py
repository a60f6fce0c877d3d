"""Plain data: the graph of a step, a schedule of it, what the simulator says of that, and the plan.

In: a graph (from a capture, or from a JSON file) and the schedule of a solver.
Out: the events of a schedule and its `Timeline` from the one simulator, a `Plan`, their JSON.
Imports: no other room. No torch.
"""
