"""Prices: seconds and workspace bytes of every op of a graph, from one of two sources.

`roofline` needs no device: operations over the device's rate or bytes over its bandwidth, whichever is
longer, plus a launch. `measured` runs each distinct combination of operator, shapes, dtypes, strides and
arguments on the device itself. Neither touches the model, its buffers or the random state.
"""

from __future__ import annotations

import torch

from ..capture.lift import Lifted
from ..devices.table import find_device
from .measured import measured_prices
from .roofline import describe_known, roofline_prices

__all__ = ["price"]


def price(
    lifted: Lifted,
    device: torch.device,
    *,
    prices: str,
    target: str | None = None,
    channels_last: bool = False,
) -> Lifted:
    """The same graph with prices: `prices` is "measured" or "roofline", `target` an absent device's name.

    With `channels_last`, convolutions are measured on tensors of that layout.
    """
    if prices == "measured" and target is None:
        return measured_prices(lifted, device, channels_last=channels_last)
    return roofline_prices(lifted, find_device(target or describe_known(device)))
