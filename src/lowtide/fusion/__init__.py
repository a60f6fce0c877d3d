"""What Inductor will fuse: from a graph of single ops to one of kernels.

In: a `Trace` and its `Lifted` graph.
Out: a `Lifted` graph of fused loops, with the traffic of each.
Imports: capture/, plans/.
"""
