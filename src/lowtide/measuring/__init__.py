"""The truth about a step: its peak and its seconds, from a state that is put back.

In: a callable, or a model with a batch.
Out: a `Measurement`, and what came out of each run.
Imports: devices/, torch_state/.
"""
