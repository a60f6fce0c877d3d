"""Proof on the user's own model: verified bit by bit, and watched while it runs.

In: a model, a batch, a budget.
Out: a `Verification`, a `Watched` step.
Imports: console/, entry/, measuring/, pipeline/, plans/, sketching/, torch_state/.
"""
