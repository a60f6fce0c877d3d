"""The doors: `cap`, `plan`, the backend of torch.compile, and the steps that files name.

In: a user's model, batch and options.
Out: the model capped, or the plan.
Imports: capture/, console/, devices/, distributed/, measuring/, pipeline/, planner/, plans/, sketching/,
  torch_state/.
"""
