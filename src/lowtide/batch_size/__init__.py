"""The largest batch that fits a budget.

In: a way to make a step of any batch size, a device, a budget.
Out: a `LargestBatch`, uncapped and capped.
Imports: devices/, entry/, planner/, plans/, solve/.
"""
