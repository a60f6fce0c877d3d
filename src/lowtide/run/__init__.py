"""Executors: the pair of graphs as functions that free each value when the plan drops it.

In: a lowered pair, op by op (`eager`) or compiled into fused kernels (`inductor/`).
Out: the two functions, and what their first run showed.
Imports: capture/, console/, devices/, measuring/, planner/, plans/, prices/.
"""
