"""The stages of a step, each made from the one before: captured, priced, planned, lowered, runner.

In: what torch.compile's front end hands over, and the options.
Out: a function that runs the step as planned, and its plan.
Imports: capture/, console/, devices/, fusion/, lowering/, planner/, plans/, prices/, ranks/, run/,
  sketching/, splitting/, torch_state/.
"""
