"""A plan under a budget, or the error that says what is possible.

In: a priced graph and a budget.
Out: a `Plan`, a `Frontier`, a comparison of methods.
Imports: devices/, plans/, solve/.
"""
