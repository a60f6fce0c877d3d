"""Lowtide inside training tools: one callback each.

In: a trainer of Lightning, and a budget.
Out: its training step under a cap, with what it logs.
Imports: console/, entry/, measuring/, pipeline/, plans/.
"""
