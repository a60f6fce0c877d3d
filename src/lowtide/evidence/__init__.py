"""Proof on the user's own model: verified bit by bit, and watched while it runs.

In: a model, a batch, a budget.
Out: a `Verification`, a `Watched` step.
Imports: entry/, pipeline/, measuring/, plans/, sketching/, console/, torch_state/.
"""
