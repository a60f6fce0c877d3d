"""An optimizer's updates inside of a backward: of a few parameters at a time, where their gradients are.

The backward function calls `update_now` with places among the step's inputs and their gradients. Which
tensors these inputs are is known to the call whose backward runs: it announces itself when autograd is about
to call that. A parameter has its gradient in `.grad` while the optimizer steps on it, and then no more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..devices.per_tensor import step_on

__all__ = ["Updates", "update_now"]

_present = threading.local()


class Updates:
    """The updates of one call: the inputs by their places, and the optimizers that have them."""

    def __init__(self, parameters: Mapping[int, torch.nn.Parameter], optimizers: Sequence[Any]) -> None:
        self.parameters = parameters
        self.optimizers = optimizers
        self.owners: dict[int, tuple[Any, dict[str, Any]]] = {}

    def begin(self) -> None:
        """Called right before the backward of this call, in the thread that runs it."""
        # Looked up once for each backward: `load_state_dict` puts other groups in the place of the old ones.
        self.owners = {
            id(parameter): (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        _present.updates = self

    def update(self, places: Sequence[int], gradients: list[torch.Tensor | None]) -> None:
        """Update the inputs at some places by their gradients, and let go of these."""
        came = [place for place, gradient in zip(places, gradients, strict=True) if gradient is not None]
        parameters = [self.parameters[place] for place in came]
        try:
            for parameter, gradient in zip(parameters, filter(_is_there, gradients), strict=True):
                parameter.grad = gradient
            gradients.clear()
            with torch.no_grad():
                for optimizer in self.optimizers:
                    if chosen := self.chosen(optimizer, parameters):
                        step_on(optimizer, chosen)
        finally:
            for parameter in parameters:
                parameter.grad = None

    def chosen(
        self, optimizer: Any, parameters: Sequence[torch.nn.Parameter]
    ) -> list[tuple[dict[str, Any], list[torch.nn.Parameter]]]:
        """Those of the parameters that an optimizer has, by its groups."""
        found: dict[int, tuple[dict[str, Any], list[torch.nn.Parameter]]] = {}
        for parameter in parameters:
            owner, group = self.owners[id(parameter)]
            if owner is optimizer:
                found.setdefault(id(group), (group, []))[1].append(parameter)
        return list(found.values())


def _is_there(gradient: torch.Tensor | None) -> bool:
    return gradient is not None


def update_now(places: Sequence[int], gradients: list[torch.Tensor | None]) -> None:
    """Update some inputs of the call whose backward runs in this thread."""
    _present.updates.update(places, gradients)
