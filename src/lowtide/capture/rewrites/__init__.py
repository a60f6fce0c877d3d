"""Rewrites of the joint graph, in place, one concern to a file; `trace.py` says their order."""
