"""The doors: `cap`, `plan`, the backend of torch.compile, and the steps that files name.

In: a user's model, batch and options.
Out: the model capped, or the plan.
Imports: capture/, console/, devices/, measuring/, pipeline/, planner/, plans/, ranks/, sharded/, sketching/,
  torch_state/.
"""
