"""Seconds and workspace bytes of every op, measured on the device or by its roofline.

In: a `Lifted` graph and a device.
Out: the same graph with prices.
Imports: capture/, devices/, measuring/, plans/.
"""
