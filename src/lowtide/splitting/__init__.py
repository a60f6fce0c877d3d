"""Regions of a step that run a chunk of rows at a time: logits that are never there as a whole.

In: a captured step.
Out: the step with some regions in chunks, as few as its budget needs, planned.
Imports: capture/, console/, plans/, solve/.
"""
