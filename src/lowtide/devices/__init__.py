"""Devices: what they are, how their allocators count, what else is on them during a step.

In: a device or the name of one, a schedule, optimizers.
Out: bytes as the allocator counts them, and the bands beside a step.
Imports: plans/.
"""
