"""From a schedule back to fx: a forward and a backward graph in which a node may stand several times.

In: a `Trace`, its `Lifted` graph and a schedule.
Out: a pair of fx graphs.
Imports: capture/, plans/, torch_state/.
"""
