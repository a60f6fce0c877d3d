"""Lowtide inside training tools: one callback each.

In: a budget, and the tool's own trainer.
Out: its training steps capped, its log and folder told.
Imports: console/, entry/, plans/.
"""
